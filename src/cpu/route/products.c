/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * products.c - the router's dense products, in f32 whatever the inputs: tiles of ROUTE_ROWS rows and a panel
 * of columns, the operands widened into a thread's memory ROUTE_DEPTH at a time. A tile's sums are cut by
 * shape and a row's by nothing but its own length, so its bits do not depend on the other rows. Limit: FMA;
 * with few tokens, reading the weight.
 */
#include "core/parallel.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/route/route.h"

static int64_t tiles(int64_t n, int64_t tile)
{
    return (n + tile - 1) / tile;
}

static int64_t at_most(int64_t n, int64_t most)
{
    return n < most ? n : most;
}

/* The part of a 2-D view from (row, column) on. */
static row_source block_of(const quern_tensor *t, int64_t row, int64_t rows, int64_t column, int64_t columns)
{
    const char *data =
        (const char *)t->data + (row * t->strides[0] + column) * (int64_t)quern_dtype_size(t->dtype);
    return (row_source){data, t->dtype, t->strides[0], rows, columns};
}

static void logits_tile(void *arg, int64_t index, int32_t thread)
{
    const route_job *job = arg;
    route_scratch *s = &job->scratch[thread];
    const int64_t panel = job->dense->panel, across = tiles(job->experts, panel),
                  row = index / across * ROUTE_ROWS, expert = index % across * panel;
    const int64_t rows = at_most(job->tokens - row, ROUTE_ROWS),
                  experts = at_most(job->experts - expert, panel);
    for (int64_t d = 0; d < job->dim; d += ROUTE_DEPTH) {
        const int64_t depth = at_most(job->dim - d, ROUTE_DEPTH);
        const row_source a = block_of(&job->args->hidden, row, rows, d, depth),
                         b = block_of(&job->args->weight, expert, experts, d, depth);
        job->dense->pack_rows_f32(&a, 1.0f, s->a, depth);
        job->dense->pack_keys_f32(&b, (int32_t)panel, s->b);
        job->dense->mm_f32(rows, panel, depth, s->a, depth, 1, s->b, panel, s->c, panel, d > 0);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t e = 0; e < experts; e++)
            job->own[(row + r) * job->experts + expert + e] = job->dim > 0 ? s->c[r * panel + e] : 0.0f;
}

void route_products(const stage_exec *exec, route_job *job)
{
    parallel_for(exec, tiles(job->tokens, ROUTE_ROWS) * tiles(job->experts, job->dense->panel), logits_tile,
                 job);
}

typedef struct gradient_job {
    const route_job *route;
    const float *d;
    int64_t stride;
    bool of_weight;
} gradient_job;

/* A tile of d B or d^T B: B is the weight or the hidden states. */
static void gradient_tile(void *arg, int64_t index, int32_t thread)
{
    const gradient_job *job = arg;
    const route_job *route = job->route;
    const attention_kernels *dense = route->dense;
    route_scratch *s = &route->scratch[thread];
    const quern_tensor *b = job->of_weight ? &route->args->hidden : &route->args->weight,
                       *out = job->of_weight ? &route->args->d_weight : &route->args->d_hidden;
    const int64_t panel = dense->panel, across = tiles(route->dim, panel), row = index / across * ROUTE_ROWS,
                  column = index % across * panel;
    const int64_t rows = at_most(out->shape[0] - row, ROUTE_ROWS),
                  columns = at_most(route->dim - column, panel), length = b->shape[0];
    for (int64_t p = 0; p < length; p += ROUTE_DEPTH) {
        const int64_t depth = at_most(length - p, ROUTE_DEPTH);
        const row_source src = block_of(b, p, depth, column, columns);
        dense->pack_rows_f32(&src, 1.0f, s->b, panel);
        const float *a = job->of_weight ? job->d + p * job->stride + row : job->d + row * job->stride + p;
        dense->mm_f32(rows, panel, depth, a, job->of_weight ? 1 : job->stride,
                      job->of_weight ? job->stride : 1, s->b, panel, s->c, panel, p > 0);
    }
    for (int64_t i = 0; length == 0 && i < rows * panel; i++) s->c[i] = 0.0f;
    for (int64_t r = 0; r < rows; r++) {
        const row_source to = block_of(out, row + r, 1, column, columns);
        dense->rows->convert(s->c + r * panel, QUERN_F32, (void *)(uintptr_t)to.data, out->dtype, columns);
    }
}

void route_gradients(const stage_exec *exec, route_job *job, const float *d, int64_t stride)
{
    for (int of_weight = 0; of_weight < 2; of_weight++) {
        const quern_tensor *out = of_weight ? &job->args->d_weight : &job->args->d_hidden;
        gradient_job gradient = {job, d, stride, of_weight};
        if (out->ndim > 0)
            parallel_for(exec, tiles(out->shape[0], ROUTE_ROWS) * tiles(job->dim, job->dense->panel),
                         gradient_tile, &gradient);
    }
}
