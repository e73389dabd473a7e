/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_case.c - random compressor calls. */
#include "dsv4_case.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t dsv4_columns(const dsv4_case *c)
{
    return (c->shape.overlap ? 4 : 2) * c->shape.width;
}

static int32_t given(const dsv4_case *c, dsv4_tensor which, int64_t b, int64_t otherwise)
{
    const test_tensor *t = &c->t[which];
    return t->buffer != NULL ? ((const int32_t *)t->view.data)[b * t->view.strides[0]] : (int32_t)otherwise;
}

dsv4_sequence dsv4_sequence_of(const dsv4_case *c, int64_t b)
{
    dsv4_sequence s = {.row0 = b * c->tokens, .rows = c->tokens};
    const int64_t r = c->shape.ratio, start = given(c, DSV4_START_TOKENS, b, c->shape.start_token);
    if (c->kind == DSV4_VARLEN) {
        s.row0 = given(c, DSV4_CU_SEQLENS, b, 0);
        s.rows = given(c, DSV4_CU_SEQLENS, b + 1, 0) - s.row0;
        for (int64_t i = 0; i < b; i++)
            s.entry0 += (given(c, DSV4_CU_SEQLENS, i + 1, 0) - given(c, DSV4_CU_SEQLENS, i, 0)) / r;
        s.entries = s.rows / r;
    }
    s.token0 = s.row0 + start;
    s.blocks = (s.rows - start) / r;
    if (c->limit > 0) s.blocks = c->limit;
    s.blocks = given(c, DSV4_BLOCK_COUNTS, b, s.blocks);
    if (c->kind != DSV4_VARLEN) {
        s.entries = s.blocks;
        s.entry0 = b * s.blocks;
    }
    s.position = given(c, DSV4_START_POSITIONS, b, c->shape.start_abs_pos);
    s.prev = c->t[DSV4_PREV_B].buffer != NULL && given(c, DSV4_HAS_PREV, b, 1) != 0;
    return s;
}

static void make(dsv4_case *c, test_random *random, dsv4_tensor which, quern_dtype dtype, int32_t ndim,
                 const int64_t *shape)
{
    const test_layout any = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1);
    c->t[which] = test_tensor_make(random, dtype, ndim, shape,
                                   !c->spaced               ? any
                                   : any == TEST_CONTIGUOUS ? TEST_CONTIGUOUS
                                                            : TEST_SPACED);
    if (dtype != QUERN_I32)
        test_tensor_normal(&c->t[which], random, which == DSV4_PROJ ? 1.5 : which == DSV4_W ? 0.15 : 1);
}

/* A tensor of rows: with a leading batch extent where the call has one. */
static void make_rows(dsv4_case *c, test_random *random, dsv4_tensor which, quern_dtype dtype, int64_t rows,
                      int64_t columns)
{
    const int64_t shape[] = {c->batch, rows, columns};
    const bool lead = c->kind == DSV4_FIXED;
    make(c, random, which, dtype, lead ? 3 : 2, lead ? shape : shape + 1);
}

static void make_i32(dsv4_case *c, test_random *random, dsv4_tensor which, int64_t count,
                     const int32_t *values)
{
    c->t[which] = test_tensor_make(random, QUERN_I32, 1, &count, TEST_UNALIGNED);
    test_tensor_set_i32(&c->t[which], values);
}

/* Lengths, and per sequence where it starts, how many blocks it has and whether there is one before. */
static void draw_sequences(dsv4_case *c, test_random *random)
{
    const int64_t r = c->shape.ratio;
    int32_t cu[DSV4_SEQUENCES + 1] = {0}, start[DSV4_SEQUENCES], position[DSV4_SEQUENCES],
                                blocks[DSV4_SEQUENCES], prev[DSV4_SEQUENCES];
    c->batch = c->kind == DSV4_ONE ? 1 : test_random_int(random, 1, DSV4_SEQUENCES);
    c->tokens = test_random_int(random, 0, 8 * r);
    c->limit = 0;
    if (c->kind != DSV4_VARLEN) {
        c->shape.start_token = test_random_int(random, 0, c->tokens < 3 ? c->tokens : 3);
        if (test_random_one_in(random, 4))
            c->limit = test_random_int(random, 0, (c->tokens - c->shape.start_token) / r);
        return;
    }
    for (int64_t b = 0; b < c->batch; b++) {
        const int32_t n = (int32_t)test_random_int(random, 0, 8 * r);
        cu[b + 1] = cu[b] + n;
        start[b] = (int32_t)test_random_int(random, 0, n < 3 ? n : 3);
        blocks[b] = (int32_t)test_random_int(random, 0, (n - start[b]) / r);
        position[b] = (int32_t)(r * test_random_int(random, 0, 5));
        prev[b] = (int32_t)test_random_int(random, 0, 1);
    }
    c->tokens = cu[c->batch] + test_random_int(random, 0, 2 * r); /* rows past the last sequence */
    make_i32(c, random, DSV4_CU_SEQLENS, c->batch + 1, cu);
    if (test_random_one_in(random, 2)) make_i32(c, random, DSV4_START_TOKENS, c->batch, start);
    if (test_random_one_in(random, 2)) make_i32(c, random, DSV4_START_POSITIONS, c->batch, position);
    if (c->t[DSV4_START_TOKENS].buffer != NULL && test_random_one_in(random, 2))
        make_i32(c, random, DSV4_BLOCK_COUNTS, c->batch, blocks);
    if (c->t[DSV4_PREV_B].buffer != NULL && test_random_one_in(random, 2))
        make_i32(c, random, DSV4_HAS_PREV, c->batch, prev);
}

static void draw_shape(dsv4_case *c, test_random *random)
{
    static const int64_t widths[] = {2, 8, 16, 24, 32, 64, 70, 128};
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    c->shape =
        (oracle_compressor){.ratio = test_random_one_in(random, 6) ? 40 : test_random_int(random, 1, 9),
                            .width = widths[test_random_int(random, 0, 7)],
                            .overlap = test_random_one_in(random, 2),
                            .rope_last = test_random_one_in(random, 2),
                            .eps = 1e-6};
    c->shape.start_abs_pos = (c->shape.rope_last ? 1 : c->shape.ratio) * test_random_int(random, 0, 5);
    if (!test_random_one_in(random, 3))
        c->shape.rope_dim = 2 * test_random_int(random, 1, c->shape.width / 2);
    c->shape.hadamard = (c->shape.width & (c->shape.width - 1)) == 0 && test_random_one_in(random, 3);
    c->round_bf16 = test_random_one_in(random, 4);
    c->kind = (dsv4_batch)test_random_int(random, 0, 2);
    c->dtype = dtypes[test_random_int(random, 0, 2)];
}

/* CSA's and HCA's entries of 512 channels. */
static void widen_shape(dsv4_case *c, test_random *random)
{
    static const int64_t ratios[] = {8, 16, 40, 128};
    c->shape.width = 512;
    c->shape.ratio = c->shape.overlap ? 4 : ratios[test_random_int(random, 0, 3)];
    c->shape.start_abs_pos = c->shape.ratio * test_random_int(random, 0, 5);
    if (c->shape.rope_dim > 0) c->shape.rope_dim = 2 * test_random_int(random, 1, 40);
    c->shape.hadamard = false;
    if (c->dtype == QUERN_F32) c->dtype = QUERN_BF16;
    c->spaced = !test_random_one_in(random, 8);
}

/* Some logits become -inf, in one channel all of the first few rows'. */
static void spoil_logits(dsv4_case *c, test_random *random)
{
    const int64_t width = c->shape.width, columns = dsv4_columns(c), n = test_tensor_count(&c->t[DSV4_PROJ]);
    double *values = test_tensor_get(&c->t[DSV4_PROJ]);
    const int64_t none = test_random_int(random, 0, width - 1);
    for (int64_t i = 0; i < n; i++) {
        const int64_t column = i % columns;
        const bool logit = column / width % 2 == 1, all = column % width == none && i / columns < 20;
        if (logit && (all || test_random_one_in(random, 7))) values[i] = -INFINITY;
    }
    test_tensor_set(&c->t[DSV4_PROJ], values);
    free(values);
}

/* The tensors of a compressor's own; `weight` of its biases and norm, `result` of its entries. */
static void make_own(dsv4_case *c, test_random *random, quern_dtype weight, quern_dtype result, bool prev,
                     bool norm)
{
    const int64_t r = c->shape.ratio, width = c->shape.width, bias[] = {r, width},
                  matrix[] = {c->in, dsv4_columns(c)}, before[] = {c->batch, r, 2 * width};
    const int64_t blocks = c->kind == DSV4_VARLEN ? c->tokens / r : dsv4_sequence_of(c, 0).blocks;
    const int32_t prev_ndim = c->kind == DSV4_ONE ? 2 : 3;
    const bool csa = c->shape.overlap;
    if (c->in > 0) make(c, random, DSV4_W, weight, 2, matrix);
    else make_rows(c, random, DSV4_PROJ, c->dtype, c->tokens, dsv4_columns(c));
    make(c, random, DSV4_BIAS_A, weight, 2, bias);
    if (csa) make(c, random, DSV4_BIAS_B, weight, 2, bias);
    if (prev) make(c, random, DSV4_PREV_B, weight, prev_ndim, before + 3 - prev_ndim);
    if (norm) make(c, random, DSV4_NORM_WEIGHT, weight, 1, &width);
    make_rows(c, random, DSV4_POOLED, QUERN_F32, blocks, width);
    make_rows(c, random, DSV4_OUT, result, blocks, width);
    make_rows(c, random, DSV4_D_OUT, result, blocks, width);
    if (c->in > 0) make_rows(c, random, DSV4_D_X, c->dtype, c->tokens, c->in);
    if (c->in > 0) make(c, random, DSV4_D_W, QUERN_F32, 2, matrix);
    else make_rows(c, random, DSV4_D_PROJ, c->dtype, c->tokens, dsv4_columns(c));
    make(c, random, DSV4_D_BIAS_A, QUERN_F32, 2, bias);
    if (csa) make(c, random, DSV4_D_BIAS_B, QUERN_F32, 2, bias);
    if (prev) make(c, random, DSV4_D_PREV_B, weight, prev_ndim, before + 3 - prev_ndim);
    if (norm) make(c, random, DSV4_D_NORM_WEIGHT, QUERN_F32, 1, &width);
}

dsv4_case dsv4_case_random_of(test_random *random, dsv4_wish wish)
{
    dsv4_case c;
    memset(&c, 0, sizeof c);
    do draw_shape(&c, random);
    while (wish.overlap && !c.shape.overlap);
    if (wish.wide) widen_shape(&c, random);
    const quern_dtype weight = test_random_one_in(random, 2) ? c.dtype : QUERN_F32,
                      result = test_random_one_in(random, 2) ? c.dtype : QUERN_F32;
    const bool prev = !wish.wide && c.shape.overlap && test_random_one_in(random, 2);
    /* Any pointer: draw_sequences() asks only whether there is one. */
    if (prev) c.t[DSV4_PREV_B].buffer = (unsigned char *)&c;
    draw_sequences(&c, random);
    c.t[DSV4_PREV_B].buffer = NULL;
    if (wish.in_of > 0) c.in = wish.in_of * test_random_int(random, 1, 90 / wish.in_of);
    else if (!wish.wide && test_random_one_in(random, 3)) c.in = test_random_int(random, 1, 90);
    if (c.in > 0) make_rows(&c, random, DSV4_X, c.dtype, c.tokens, c.in);
    make_own(&c, random, weight, result, prev, !test_random_one_in(random, 3));
    /* The norm of a few channels, of which one is 0, has no gradient to speak of. */
    if (c.in == 0 && c.shape.width >= 16 && test_random_one_in(random, 3)) spoil_logits(&c, random);
    c.max_pos = (8 + 6) * c.shape.ratio;
    const int64_t table[] = {c.max_pos, c.shape.rope_dim};
    if (c.shape.rope_dim > 0) make(&c, random, DSV4_COS_SIN, weight, 2, table);
    return c;
}

dsv4_case dsv4_case_random(test_random *random)
{
    return dsv4_case_random_of(random, (dsv4_wish){0});
}

static bool is_borrowed(int tensor)
{
    return tensor == DSV4_X || (tensor >= DSV4_COS_SIN && tensor <= DSV4_HAS_PREV);
}

dsv4_case dsv4_case_beside(const dsv4_case *c, test_random *random)
{
    dsv4_case d = *c;
    for (int i = 0; i < DSV4_TENSORS; i++) {
        d.reference[i] = NULL;
        if (!is_borrowed(i)) d.t[i] = (test_tensor){.buffer = NULL};
    }
    d.shape.width = c->shape.rope_dim + test_random_int(random, c->shape.rope_dim > 0 ? 0 : 2, 70);
    d.shape.hadamard = (d.shape.width & (d.shape.width - 1)) == 0 && test_random_one_in(random, 2);
    make_own(&d, random, c->t[DSV4_BIAS_A].view.dtype, test_random_one_in(random, 2) ? c->dtype : QUERN_F32,
             c->t[DSV4_PREV_B].buffer != NULL, !test_random_one_in(random, 3));
    return d;
}

void dsv4_case_free_beside(dsv4_case *c)
{
    for (int i = 0; i < DSV4_TENSORS; i++)
        if (is_borrowed(i)) c->t[i].buffer = NULL;
    dsv4_case_free(c);
}

/* The values of a tensor, or NULL. */
static double *values_of(const dsv4_case *c, dsv4_tensor which)
{
    return c->t[which].buffer != NULL ? test_tensor_get(&c->t[which]) : NULL;
}

static double *moved(double *p, int64_t by)
{
    return p != NULL ? p + by : NULL;
}

void dsv4_case_reference(dsv4_case *c, const double *pooled)
{
    const int64_t width = c->shape.width, columns = dsv4_columns(c), prev_count = 2 * c->shape.ratio * width;
    double *in[DSV4_TENSORS] = {NULL};
    for (int i = 0; i < DSV4_TENSORS; i++) {
        if (c->t[i].buffer == NULL || (i >= DSV4_CU_SEQLENS && i <= DSV4_HAS_PREV)) continue;
        if (i < DSV4_POOLED || i == DSV4_D_OUT) in[i] = values_of(c, (dsv4_tensor)i);
        else c->reference[i] = test_doubles(test_tensor_count(&c->t[i]));
    }
    const int64_t rows = (c->kind == DSV4_FIXED ? c->batch : 1) * c->tokens;
    double *d_proj = c->reference[DSV4_D_PROJ];
    if (c->in > 0) {
        in[DSV4_PROJ] = test_doubles(rows * columns);
        d_proj = test_doubles(rows * columns);
        if (c->w_values != NULL) {
            in[DSV4_W] = test_doubles(c->in * columns);
            memcpy(in[DSV4_W], c->w_values, (size_t)(c->in * columns) * sizeof *c->w_values);
        }
        oracle_dsv4_multiply(in[DSV4_X], in[DSV4_W], rows, c->in, columns, in[DSV4_PROJ]);
    }
    for (int64_t b = 0; b < c->batch; b++) {
        const dsv4_sequence s = dsv4_sequence_of(c, b);
        oracle_compressor shape = c->shape;
        const int64_t at = s.entry0 * width, own = b * prev_count;
        shape.start_token = s.token0 - s.row0;
        shape.start_abs_pos = s.position;
        shape.blocks = s.blocks;
        const oracle_compress_arrays x = {.proj = in[DSV4_PROJ] + s.row0 * columns,
                                          .b_a = in[DSV4_BIAS_A],
                                          .b_b = in[DSV4_BIAS_B],
                                          .norm_weight = in[DSV4_NORM_WEIGHT],
                                          .cos_sin = in[DSV4_COS_SIN],
                                          .prev_b = s.prev ? in[DSV4_PREV_B] + own : NULL,
                                          .pooled = c->reference[DSV4_POOLED] + at,
                                          .out = c->reference[DSV4_OUT] + at,
                                          .d_out = in[DSV4_D_OUT] + at,
                                          .d_proj = d_proj + s.row0 * columns,
                                          .d_b_a = c->reference[DSV4_D_BIAS_A],
                                          .d_b_b = c->reference[DSV4_D_BIAS_B],
                                          .d_norm_weight = c->reference[DSV4_D_NORM_WEIGHT],
                                          .d_prev_b =
                                              s.prev ? moved(c->reference[DSV4_D_PREV_B], own) : NULL};
        oracle_dsv4_pool(&shape, &x);
        double *kept = test_doubles(s.blocks * width);
        memcpy(kept, x.pooled, (size_t)(s.blocks * width) * sizeof *kept);
        for (int64_t i = 0; c->round_bf16 && i < s.blocks * width; i++)
            x.pooled[i] = test_round(QUERN_BF16, pooled != NULL ? pooled[at + i] : kept[i]);
        oracle_dsv4_finish(&shape, &x);
        oracle_dsv4_compress_backward(&shape, &x);
        memcpy(x.pooled, kept, (size_t)(s.blocks * width) * sizeof *kept);
        free(kept);
    }
    if (c->in > 0) {
        for (int64_t t = 0; t < rows; t++) {
            for (int64_t i = 0; i < c->in; i++) {
                for (int64_t j = 0; j < columns; j++) {
                    if (c->reference[DSV4_D_X] != NULL)
                        c->reference[DSV4_D_X][t * c->in + i] +=
                            d_proj[t * columns + j] * in[DSV4_W][i * columns + j];
                    if (c->reference[DSV4_D_W] != NULL)
                        c->reference[DSV4_D_W][i * columns + j] +=
                            in[DSV4_X][t * c->in + i] * d_proj[t * columns + j];
                }
            }
        }
        free(d_proj);
    }
    for (int i = 0; i < DSV4_TENSORS; i++) free(in[i]);
}

quern_dsv4_compress_params dsv4_case_params(const dsv4_case *c)
{
    quern_dsv4_compress_params p = QUERN_DSV4_COMPRESS_PARAMS_INIT;
    p.kind = c->shape.overlap ? QUERN_DSV4_CSA : QUERN_DSV4_HCA;
    p.ratio = c->shape.ratio;
    p.start_token = c->shape.start_token;
    p.start_abs_pos = c->shape.start_abs_pos;
    p.n_blocks = c->limit;
    p.rope_last = c->shape.rope_last;
    p.round_bf16 = c->round_bf16;
    p.hadamard = c->shape.hadamard;
    p.eps = (float)c->shape.eps;
    return p;
}

quern_dsv4_compress_tensors dsv4_case_tensors(const dsv4_case *c)
{
    quern_dsv4_compress_tensors t;
    op_case_bind("csa-compress", c->t, DSV4_TENSORS, OP_CASE_ALL, &t);
    return t;
}

void dsv4_case_run(const dsv4_case *c, quern_context *ctx)
{
    const quern_dsv4_compress_params p = dsv4_case_params(c);
    const quern_dsv4_compress_tensors t = dsv4_case_tensors(c);
    const char *op = c->shape.overlap ? "csa-compress" : "hca-compress";
    op_case_call(ctx, op, QUERN_OP_FORWARD, &p, &t);
    op_case_call(ctx, op, QUERN_OP_BACKWARD, &p, &t);
}

void dsv4_case_check(const dsv4_case *c)
{
    for (int i = 0; i < DSV4_TENSORS; i++) {
        if (c->t[i].buffer == NULL) continue;
        const char *name = op_case_field("csa-compress", i);
        if (c->reference[i] == NULL) {
            test_tensor_check_unchanged(&c->t[i], name);
            continue;
        }
        test_tensor_check_guards(&c->t[i], name);
        double *out = test_tensor_get(&c->t[i]);
        const quern_dtype dtype = c->t[i].view.dtype;
        /* A pooled row that a GPU's backward pass sums in another order may round to the next bf16. */
        const double bound = i < DSV4_D_OUT ? test_forward_bound(dtype) : test_gradient_bound(dtype),
                     slack = c->spaced && c->round_bf16 && i > DSV4_D_OUT && dtype == QUERN_F32 ? 16 : 1;
        test_check(name, out, c->reference[i], test_tensor_count(&c->t[i]), slack * bound);
        free(out);
    }
}

void dsv4_case_free(dsv4_case *c)
{
    for (int i = 0; i < DSV4_TENSORS; i++) {
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
        free(c->reference[i]);
    }
}
