/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_moe.c - experts: what their formulas count, and what a layer's time is compared with: its own
 * products alone, those of the experts on as many rows as its router gave each, and those of the shared
 * expert. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <quern/moe.h>

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { PRODUCTS = 4 };

/* One product: gate and up with SwiGLU, or down. */
typedef struct product {
    quern_nvfp4_gemm_params params;
    quern_nvfp4_gemm_tensors tensors;
    quern_tensor a, b, c, offsets;
    int32_t end; /* of the shared expert's rows */
} product;

typedef struct products {
    product of[PRODUCTS];
    void *act, *h, *y, *workspace;
    size_t bytes;
} products;

static quern_tensor matrix(void *data, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    return quern_tensor_contiguous(data, dtype, 2, shape);
}

/* offsets NULL: the shared expert, whose weights are one row of bytes. */
static void set_product(product *p, const quern_tensor *weights, const quern_tensor *offsets, quern_tensor a,
                        quern_tensor c, int64_t n, bool swiglu)
{
    const int64_t one = 1;
    *p = (product){.params = QUERN_NVFP4_GEMM_PARAMS_INIT,
                   .tensors = QUERN_NVFP4_GEMM_TENSORS_INIT,
                   .a = a,
                   .b = matrix(weights->data, QUERN_U8, offsets != NULL ? weights->shape[0] : 1,
                               weights->shape[weights->ndim - 1]),
                   .c = c,
                   .end = (int32_t)a.shape[0]};
    p->offsets = offsets != NULL ? *offsets : quern_tensor_contiguous(&p->end, QUERN_I32, 1, &one);
    p->params.n = n;
    p->params.activation = swiglu ? QUERN_NVFP4_ACTIVATION_SWIGLU : QUERN_NVFP4_ACTIVATION_NONE;
    p->tensors.a = &p->a;
    p->tensors.b_repacked = &p->b;
    p->tensors.offsets = &p->offsets;
    p->tensors.c = &p->c;
}

static const quern_tensor *tensor_of(const job *j, const char *name)
{
    return j->tensors.t[tensor_named(j->op, name)];
}

static void close_products(void *arg)
{
    products *p = arg;
    free(p->act);
    free(p->h);
    free(p->y);
    free(p->workspace);
    free(p);
}

static void set_products(products *p, const bench_case *c, const job *j)
{
    const quern_tensor *offsets = tensor_of(j, "offsets"), *permutation = tensor_of(j, "permutation");
    const quern_dtype dtype = (quern_dtype)c->dtype;
    const int64_t slots = permutation->shape[0];
    for (int i = 0; i < PRODUCTS; i++) {
        const bool shared = i >= 2, down = i % 2 == 1;
        const int64_t rows = shared ? c->n : slots;
        static const char *const weights[] = {"gate_up_repacked", "down_repacked", "shared_gate_up_repacked",
                                              "shared_down_repacked"};
        const quern_tensor in = matrix(down ? p->h : p->act, dtype, rows,
                                       down ? bench_extent_of(c, "width") : bench_extent_of(c, "depth")),
                           out = down ? matrix(p->y, QUERN_F32, rows, bench_extent_of(c, "depth"))
                                      : matrix(p->h, dtype, rows, bench_extent_of(c, "width"));
        set_product(&p->of[i], tensor_of(j, weights[i]), shared ? NULL : offsets, in, out,
                    down ? bench_extent_of(c, "depth") : 2 * bench_extent_of(c, "width"), !down);
    }
}

static void *open_products(const bench_case *c, const job *j, quern_context *ctx)
{
    products *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    const size_t slots = (size_t)tensor_of(j, "permutation")->shape[0],
                 most = slots > (size_t)c->n ? slots : (size_t)c->n;
    const quern_tensor act = matrix(NULL, (quern_dtype)c->dtype, (int64_t)most, bench_extent_of(c, "depth"));
    p->act = bench_allocate(most * (size_t)bench_extent_of(c, "depth") * sizeof(float) + 1);
    p->h = bench_allocate(most * (size_t)bench_extent_of(c, "width") * sizeof(float) + 1);
    p->y = bench_allocate(most * (size_t)bench_extent_of(c, "depth") * sizeof(float) + 1);
    bool whole = p->act != NULL && p->h != NULL && p->y != NULL;
    if (whole) {
        quern_tensor filled = act;
        filled.data = p->act;
        fill_normal(&filled, 7);
        set_products(p, c, j);
    }
    for (int i = 0; i < PRODUCTS && whole; i++) {
        size_t bytes = 0;
        whole = quern_nvfp4_gemm_workspace(ctx, &p->of[i].params, &p->of[i].tensors, &bytes) == QUERN_OK;
        if (bytes > p->bytes) p->bytes = bytes;
    }
    if (whole) p->workspace = bench_allocate(p->bytes + 1);
    if (whole && p->workspace != NULL) return p;
    close_products(p);
    return NULL;
}

static bool run_products(void *arg, quern_context *ctx, double ms[2])
{
    products *p = arg;
    const double start = now_ms();
    for (int i = 0; i < PRODUCTS; i++)
        if (quern_nvfp4_gemm(ctx, NULL, &p->of[i].params, &p->of[i].tensors, p->workspace, p->bytes) !=
            QUERN_OK)
            return false;
    ms[0] = now_ms() - start;
    return true;
}

const bench_peer peer_products = {"its products", open_products, run_products, close_products};

/* ---- what formulas count ---- */

/* A parameter's text; "" where the operation has none of the name. */
static void param_text(const bench_case *c, const char *name, char *text, size_t room)
{
    *text = '\0';
    for (int32_t i = 0; i < c->op->info.param_count; i++)
        if (strcmp(c->op->params[i].field, name) == 0)
            (void)quern_op_text(c->op->op, &c->params, i, text, room);
}

/* Experts that have rows: of a layer as its router chose; all before it did. */
static double active_experts(const bench_case *c, const job *ran)
{
    const int64_t experts = bench_extent_of(c, "experts");
    int64_t active = 0;
    if (ran == NULL) return (double)experts;
    const int32_t *ends = tensor_of(ran, "offsets")->data;
    for (int64_t e = 0; e < experts; e++) active += ends[e] > (e > 0 ? ends[e - 1] : 0);
    return (double)active;
}

void bench_count_experts(const bench_case *c, const job *ran, formula_symbols *to)
{
    char text[64];
    param_text(c, "top_k", text, sizeof text);
    const double k = atof(text);
    param_text(c, "score", text, sizeof text);
    formula_set(to, "k", k);
    formula_set(to, "G", strcmp(text, "softmax") == 0 ? (double)bench_extent_of(c, "experts") : k);
    param_text(c, "activation", text, sizeof text);
    formula_set(to, "swiglu", strcmp(text, "swiglu") == 0);
    formula_set(to, "M", active_experts(c, ran));
}

int bench_check_products(const bench_case *c)
{
    const int64_t experts = bench_extent_of(c, "experts");
    if (c->n * experts <= INT32_MAX) return EXIT_DONE;
    return fail(EXIT_USAGE, "--n %" PRId64 " --experts %" PRId64 ": below 2^31 rows are accepted", c->n,
                experts);
}
