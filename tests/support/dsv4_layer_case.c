/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "dsv4_layer_case.h"

#include "cmocka_c11.h"
#include "compare.h"
#include "golden.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const layer_case_names[LAYER_TENSORS] = {
    "X",
    "cos_sin",
    "w.sinks",
    "w.q_a_proj.weight",
    "w.q_a_norm.weight",
    "w.q_b_proj.weight",
    "w.kv_proj.weight",
    "w.kv_norm.weight",
    "w.o_a_proj.weight",
    "w.o_b_proj.weight",
    "w.compressor.position_bias",
    "w.compressor.kv_proj.weight",
    "w.compressor.gate_proj.weight",
    "w.compressor.kv_norm.weight",
    "w.compressor.indexer.position_bias",
    "w.compressor.indexer.kv_proj.weight",
    "w.compressor.indexer.gate_proj.weight",
    "w.compressor.indexer.kv_norm.weight",
    "w.compressor.indexer.q_b_proj.weight",
    "w.compressor.indexer.scorer.weights_proj.weight",
    "out",
    "q_residual",
    "q",
    "kv",
    "compressed",
    "idx.k",
    "idx.q",
    "idx.score",
    "idx.topk",
    "core",
    "core_irope",
    "o_a",
    "d_out",
    "dX",
    "dw.sinks",
    "dw.q_a_proj.weight",
    "dw.q_a_norm.weight",
    "dw.q_b_proj.weight",
    "dw.kv_proj.weight",
    "dw.kv_norm.weight",
    "dw.o_a_proj.weight",
    "dw.o_b_proj.weight",
    "dw.compressor.position_bias",
    "dw.compressor.kv_proj.weight",
    "dw.compressor.gate_proj.weight",
    "dw.compressor.kv_norm.weight",
};

/* The extents of a tensor, 0 after the last; none where the kind lacks it. */
static void shape_of(const oracle_layer *l, int64_t batch, int64_t positions, int tensor, int64_t shape[5])
{
    const bool csa = l->kind == ORACLE_CSA, entries = l->kind != ORACLE_SWA;
    const int64_t T = l->tokens, S = entries ? T / l->ratio : 0, m = csa ? 2 : 1, in = l->width,
                  hd = l->heads * l->dim, go = l->groups * l->o_lora;
    const int64_t all[LAYER_TENSORS][5] = {
        [LAYER_X] = {batch, T, in},
        [LAYER_COS_SIN] = {positions, l->rope_dim},
        [LAYER_WEIGHTS + OW_SINKS] = {l->heads},
        [LAYER_WEIGHTS + OW_Q_A] = {l->q_lora, in},
        [LAYER_WEIGHTS + OW_Q_A_NORM] = {l->q_lora},
        [LAYER_WEIGHTS + OW_Q_B] = {hd, l->q_lora},
        [LAYER_WEIGHTS + OW_KV] = {l->dim, in},
        [LAYER_WEIGHTS + OW_KV_NORM] = {l->dim},
        [LAYER_WEIGHTS + OW_O_A] = {go, hd / l->groups},
        [LAYER_WEIGHTS + OW_O_B] = {in, go},
        [LAYER_WEIGHTS + OW_BIAS] = {l->ratio, m * l->dim},
        [LAYER_WEIGHTS + OW_CMP_KV] = {m * l->dim, in},
        [LAYER_WEIGHTS + OW_CMP_GATE] = {m * l->dim, in},
        [LAYER_WEIGHTS + OW_CMP_NORM] = {l->dim},
        [LAYER_WEIGHTS + OW_INDEX_BIAS] = {l->ratio, 2 * l->index_dim},
        [LAYER_WEIGHTS + OW_INDEX_KV] = {2 * l->index_dim, in},
        [LAYER_WEIGHTS + OW_INDEX_GATE] = {2 * l->index_dim, in},
        [LAYER_WEIGHTS + OW_INDEX_NORM] = {l->index_dim},
        [LAYER_WEIGHTS + OW_INDEX_Q_B] = {l->index_heads * l->index_dim, l->q_lora},
        [LAYER_WEIGHTS + OW_INDEX_HEADS] = {l->index_heads, in},
        [LAYER_OUT] = {batch, T, in},
        [LAYER_Q_RESIDUAL] = {batch, T, l->q_lora},
        [LAYER_Q] = {batch, l->heads, T, l->dim},
        [LAYER_KV] = {batch, T, l->dim},
        [LAYER_COMPRESSED] = {batch, S, l->dim},
        [LAYER_IDX_K] = {batch, S, l->index_dim},
        [LAYER_IDX_Q] = {batch, T, l->index_heads, l->index_dim},
        [LAYER_IDX_SCORE] = {batch, T, S},
        [LAYER_IDX_TOPK] = {batch, T, l->top_k},
        [LAYER_CORE] = {batch, T, l->heads, l->dim},
        [LAYER_CORE_IROPE] = {batch, T, l->heads, l->dim},
        [LAYER_O_A] = {batch, T, l->groups, l->o_lora},
        [LAYER_D_OUT] = {batch, T, in},
        [LAYER_D_X] = {batch, T, in},
    };
    const bool gradient = tensor >= LAYER_D_WEIGHTS;
    memcpy(shape, all[gradient ? tensor - LAYER_D_WEIGHTS + LAYER_WEIGHTS : tensor], sizeof all[0]);
}

/* The GPU (tests/gpu) has a core and an indexer of 16 bits: there f32 is bf16, weights have x's dtype or f32,
 * and what the core gives before its rotation, in f32, is left out. */
#ifdef QUERN_TEST_GPU
enum { LAYER_ON_GPU = true };
#else
enum { LAYER_ON_GPU = false };
#endif
static quern_dtype dtype_for(quern_dtype wanted)
{
    return LAYER_ON_GPU && wanted == QUERN_F32 ? QUERN_BF16 : wanted;
}

static quern_dtype weight_dtype_for(quern_dtype wanted, quern_dtype dtype)
{
    return LAYER_ON_GPU && wanted != dtype ? QUERN_F32 : wanted;
}

static bool has(const oracle_layer *l, int tensor)
{
    if (LAYER_ON_GPU && tensor == LAYER_CORE) return false;
    if (tensor >= LAYER_D_WEIGHTS) tensor += LAYER_WEIGHTS - LAYER_D_WEIGHTS;
    if (tensor >= LAYER_WEIGHTS && tensor < LAYER_OUT)
        return oracle_layer_count(l, (oracle_layer_weight)(tensor - LAYER_WEIGHTS)) > 0;
    if (tensor == LAYER_COMPRESSED) return l->kind != ORACLE_SWA;
    return tensor < LAYER_IDX_K || tensor > LAYER_IDX_TOPK || l->kind == ORACLE_CSA;
}

static quern_dtype dtype_of(const layer_case *c, int tensor)
{
    if (tensor == LAYER_IDX_TOPK) return QUERN_I32;
    if (tensor == LAYER_IDX_SCORE || tensor >= LAYER_D_WEIGHTS) return QUERN_F32;
    return tensor == LAYER_COS_SIN || (tensor >= LAYER_WEIGHTS && tensor < LAYER_OUT) ? c->weight_dtype
                                                                                      : c->dtype;
}

layer_case layer_case_make(test_random *random, const oracle_layer *shape, int64_t batch, quern_dtype dtype,
                           quern_dtype weight_dtype)
{
    layer_case c = {.shape = *shape,
                    .batch = batch,
                    .positions = shape->tokens + test_random_int(random, 0, 3),
                    .dtype = dtype_for(dtype),
                    .weight_dtype = weight_dtype_for(weight_dtype, dtype_for(dtype))};
    for (int i = 0; i < LAYER_TENSORS; i++) {
        int64_t extents[5];
        int32_t ndim =
            i == LAYER_Q || i == LAYER_IDX_Q || i == LAYER_CORE || i == LAYER_CORE_IROPE || i == LAYER_O_A
                ? 4
                : 3;
        if (!has(shape, i)) continue;
        shape_of(shape, batch, c.positions, i, extents);
        if (i == LAYER_COS_SIN || i >= LAYER_D_WEIGHTS || (i >= LAYER_WEIGHTS && i < LAYER_OUT))
            ndim = extents[1] > 0 ? 2 : 1;
        c.t[i] = test_tensor_make(random, dtype_of(&c, i), ndim, extents,
                                  (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
        if (i == LAYER_X || i == LAYER_D_OUT) test_tensor_normal(&c.t[i], random, 1);
        if (i >= LAYER_WEIGHTS && i < LAYER_OUT)
            test_tensor_normal(&c.t[i], random, ndim == 1 ? 1 : 1 / sqrt((double)extents[1]));
    }
    double *table = test_doubles(c.positions * shape->rope_dim);
    oracle_dsv4_rope_table(c.positions, shape->rope_dim, 1000, 0, 0, 0, 0, table);
    test_tensor_set(&c.t[LAYER_COS_SIN], table);
    free(table);
    return c;
}

layer_case layer_case_random(test_random *random, bool small)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F32, QUERN_F16, QUERN_BF16, QUERN_BF16};
    const quern_dtype dtype = dtypes[test_random_int(random, 0, 4)];
    oracle_layer l = {.kind = (oracle_layer_kind)test_random_int(random, 0, 2),
                      .tokens = test_random_int(random, 1, small ? 11 : 40),
                      .width = test_random_int(random, 5, small ? 20 : 150),
                      .q_lora = test_random_int(random, 3, small ? 10 : 70),
                      .groups = test_random_int(random, 1, 3),
                      .dim = 8 * test_random_int(random, 1, small ? 1 : 5),
                      .o_lora = test_random_int(random, 1, small ? 5 : 20),
                      .window = test_random_int(random, 1, 12),
                      .ratio = test_random_int(random, 1, 5),
                      .index_heads = test_random_int(random, 3, 12),
                      .index_dim = 8 * test_random_int(random, 1, 4),
                      .top_k = test_random_int(random, 1, 6),
                      .eps = 1e-6};
    l.heads = l.groups * test_random_int(random, 1, small ? 2 : 4);
    l.rope_dim = 2 * test_random_int(random, 1, (l.dim < l.index_dim ? l.dim : l.index_dim) / 2);
    return layer_case_make(random, &l, test_random_int(random, 1, 3), dtype,
                           test_random_one_in(random, 2) ? dtype : dtypes[test_random_int(random, 0, 4)]);
}

static double *cos_sin_of(const quern_safetensors *file, bool window, int64_t tokens, int64_t dim)
{
    const char *rope = window ? "rope.main." : "rope.compress.";
    double *cosines = golden_get(file, rope, "cos", tokens * dim / 2),
           *sines = golden_get(file, rope, "sin", tokens * dim / 2), *table = test_doubles(tokens * dim);
    for (int64_t t = 0; t < tokens; t++) {
        memcpy(table + t * dim, cosines + t * dim / 2, (size_t)(dim / 2) * sizeof *table);
        memcpy(table + t * dim + dim / 2, sines + t * dim / 2, (size_t)(dim / 2) * sizeof *table);
    }
    free(cosines), free(sines);
    return table;
}

layer_case layer_case_golden(const char *directory, int i, double *expected[LAYER_TENSORS])
{
    static const char *const names[] = {"v4_tiny_csa", "v4_tiny_hca", "v4_tiny_swa"};
    const oracle_layer l = {.kind = (oracle_layer_kind)i,
                            .tokens = 45,
                            .width = 64,
                            .q_lora = 24,
                            .heads = 4,
                            .dim = 32,
                            .groups = 2,
                            .o_lora = 16,
                            .rope_dim = 8,
                            .window = 8,
                            .ratio = i == 0 ? 4 : 8,
                            .index_heads = 8,
                            .index_dim = 16,
                            .top_k = 4,
                            .eps = 1e-6};
    test_random random = {7};
    layer_case c = layer_case_make(&random, &l, 2, QUERN_F32, QUERN_F32);
    quern_safetensors *file = golden_open(directory, names[i]);
    double *table = cos_sin_of(file, i == 2, c.shape.tokens, c.shape.rope_dim),
           *padded = test_doubles(c.positions * l.rope_dim);
    memcpy(padded, table, (size_t)(l.tokens * l.rope_dim) * sizeof *padded);
    test_tensor_set(&c.t[LAYER_COS_SIN], padded);
    free(table), free(padded);
    memset(expected, 0, LAYER_TENSORS * sizeof *expected);
    for (int k = 0; k < LAYER_D_OUT; k++) {
        if (c.t[k].buffer == NULL || k == LAYER_COS_SIN || k == LAYER_IDX_TOPK) continue;
        double *values =
            golden_get(file, "", k == LAYER_X ? "hidden" : layer_case_names[k], test_tensor_count(&c.t[k]));
        if (k >= LAYER_OUT) {
            expected[k] = values;
            continue;
        }
        test_tensor_set(&c.t[k], values);
        free(values);
    }
    quern_safetensors_close(file);
    return c;
}

void layer_case_free(layer_case *c)
{
    for (int i = 0; i < LAYER_TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
    for (int i = 0; i < 2; i++)
        if (c->packed[i].codes.buffer != NULL) dsv4_weight_free(&c->packed[i]);
}

/* The first of a compressor's weights. */
static int compressor_of(int which)
{
    return LAYER_WEIGHTS + (which == 0 ? OW_BIAS : OW_INDEX_BIAS);
}

/* Columns C_a Z_a C_b Z_b (HCA: C Z) of [Dm, columns] are rows b a (HCA: a) of values and logits. */
void layer_case_pack(layer_case *c, test_random *random, int which, weight_kind kind)
{
    const int64_t in = c->shape.width, m = c->shape.kind == ORACLE_CSA ? 2 : 1,
                  width = which == 0 ? c->shape.dim : c->shape.index_dim;
    weight *w = &c->packed[which];
    *w = dsv4_weight_random(random, kind, in, 2 * m * width);
    for (int part = 0; part < 2; part++) {
        double *rows = test_doubles(m * width * in);
        for (int64_t series = 0; series < m; series++)
            for (int64_t i = 0; i < width; i++)
                for (int64_t k = 0; k < in; k++)
                    rows[((m - 1 - series) * width + i) * in + k] =
                        w->values[k * 2 * m * width + (2 * series + part) * width + i];
        test_tensor_set(&c->t[compressor_of(which) + 1 + part], rows);
        free(rows);
    }
}

quern_dsv4_layer_params layer_case_params(const layer_case *c)
{
    quern_dsv4_layer_params p = QUERN_DSV4_LAYER_PARAMS_INIT;
    p.kind = (quern_dsv4_layer_kind)c->shape.kind;
    p.window = c->shape.window;
    p.top_k = c->shape.top_k;
    return p;
}

quern_dsv4_layer_tensors layer_case_tensors(const layer_case *c)
{
    quern_dsv4_layer_tensors t = QUERN_DSV4_LAYER_TENSORS_INIT;
    const quern_tensor *views[LAYER_TENSORS];
    for (int i = 0; i < LAYER_TENSORS; i++) views[i] = c->t[i].buffer != NULL ? &c->t[i].view : NULL;
    for (int i = 0; i < 2; i++)
        if (c->packed[i].codes.buffer != NULL)
            views[compressor_of(i) + 1] = views[compressor_of(i) + 2] = NULL;
    if (c->packed[0].codes.buffer != NULL)
        views[LAYER_D_WEIGHTS + OW_CMP_KV] = views[LAYER_D_WEIGHTS + OW_CMP_GATE] = NULL;
    memcpy((char *)&t + sizeof t.size, views, sizeof views);
    for (int i = 0; i < 2; i++) {
        if (c->packed[i].codes.buffer == NULL) continue;
        quern_dsv4_compress_tensors w;
        dsv4_weight_give(&c->packed[i], &w);
        const quern_tensor *const fields[] = {w.w_fp8, w.w_fp8_scales, w.w_codes, w.w_scales, w.w_global};
        memcpy(i == 0 ? &t.compressor_fp8 : &t.indexer_fp8, fields, sizeof fields);
    }
    return t;
}

void layer_case_forward(const layer_case *c, quern_context *ctx)
{
    const quern_dsv4_layer_params p = layer_case_params(c);
    const quern_dsv4_layer_tensors t = layer_case_tensors(c);
    size_t bytes;
    if (quern_dsv4_layer_workspace(ctx, &p, &t, &bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_dsv4_layer(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

void layer_case_backward(const layer_case *c, quern_context *ctx)
{
    const quern_dsv4_layer_params p = layer_case_params(c);
    const quern_dsv4_layer_tensors t = layer_case_tensors(c);
    size_t bytes;
    if (quern_dsv4_layer_backward_workspace(ctx, &p, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_dsv4_layer_backward(ctx, NULL, &p, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

quern_dsv4_layer_cache_params layer_store_params(const layer_case *c, int64_t sequences, int64_t ring)
{
    quern_dsv4_layer_cache_params p = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    p.kind = (quern_dsv4_layer_kind)c->shape.kind;
    p.dtype = c->dtype;
    p.sequences = sequences;
    p.capacity = c->shape.tokens;
    p.dim = c->shape.dim;
    p.window = c->shape.window;
    p.ratio = c->shape.ratio;
    p.index_dim = c->shape.index_dim;
    p.ring = ring;
    return p;
}

layer_store layer_store_open(const quern_dsv4_layer_cache_params *params)
{
    layer_store s = {.params = *params};
    size_t memory, rows;
    if (quern_dsv4_layer_cache_size(params, &memory, &rows) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
    s.memory = test_workspace_make(memory);
    s.rows = test_workspace_make(rows);
    if (quern_dsv4_layer_cache_create(params, s.memory.data, memory, s.rows.data, rows, &s.cache) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
    return s;
}

layer_store layer_store_make(const layer_case *c, int64_t sequences, int64_t ring)
{
    const quern_dsv4_layer_cache_params p = layer_store_params(c, sequences, ring);
    return layer_store_open(&p);
}

void layer_store_close(layer_store *s)
{
    test_workspace_close(&s->memory), test_workspace_close(&s->rows);
}

static void narrow(quern_tensor *t, int32_t dim, int64_t first, int64_t count)
{
    t->data = (char *)t->data + first * t->strides[dim] * (int64_t)quern_dtype_size(t->dtype);
    t->shape[dim] = count;
}

/* The view of sequence b alone, without the batch extent. */
static quern_tensor sequence_of(const quern_tensor *t, int64_t b)
{
    quern_tensor v = *t;
    v.data = (char *)t->data + b * t->strides[0] * (int64_t)quern_dtype_size(t->dtype);
    v.ndim--;
    for (int32_t i = 0; i < v.ndim; i++) {
        v.shape[i] = t->shape[i + 1];
        v.strides[i] = t->strides[i + 1];
    }
    return v;
}

void layer_case_append(const layer_case *c, quern_context *ctx, const layer_store *s, int64_t id, int64_t b,
                       int64_t first, int64_t count)
{
    quern_dsv4_layer_params p = layer_case_params(c);
    quern_dsv4_layer_tensors t = layer_case_tensors(c);
    const quern_tensor *given[LAYER_TENSORS];
    quern_tensor views[LAYER_TENSORS];
    const int64_t entry = first / c->shape.ratio, made = (first + count) / c->shape.ratio - entry;
    const int32_t sequence = (int32_t)id;
    size_t bytes;
    memcpy(given, (const char *)&t + sizeof t.size, sizeof given);
    for (int i = 0; i < LAYER_TENSORS; i++) {
        const bool whole = i >= LAYER_COS_SIN && i < LAYER_OUT;
        if (given[i] == NULL || whole) continue;
        if (i >= LAYER_D_OUT) {
            given[i] = NULL;
            continue;
        }
        views[i] = sequence_of(given[i], b);
        if (i == LAYER_COMPRESSED || i == LAYER_IDX_K) narrow(&views[i], 0, entry, made);
        else narrow(&views[i], i == LAYER_Q ? 1 : 0, first, count);
        given[i] = &views[i];
    }
    memcpy((char *)&t + sizeof t.size, given, sizeof given);
    if (quern_dsv4_layer_decode_workspace(ctx, &p, s->cache, &sequence, &count, 1, &t, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace w = test_workspace_make(bytes);
    if (quern_dsv4_layer_decode(ctx, NULL, &p, s->cache, &sequence, &count, 1, &t, w.data, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&w);
}

/* The outputs of one sequence by the oracle, as doubles of the whole batch at `to`. */
static void compute_sequence(const layer_case *c, int64_t b, double *const value[LAYER_TENSORS],
                             const int32_t *chosen, double *const to[LAYER_TENSORS])
{
    double *at[LAYER_TENSORS] = {NULL};
    for (int i = LAYER_OUT; i <= LAYER_O_A; i++)
        if (to[i] != NULL) at[i] = to[i] + b * (test_tensor_count(&c->t[i]) / c->batch);
    const int64_t T = c->shape.tokens, heads = c->shape.heads, dim = c->shape.dim;
    double *q = test_doubles(T * heads * dim);
    const oracle_layer_results results = {.q_residual = at[LAYER_Q_RESIDUAL],
                                          .q = q,
                                          .kv = at[LAYER_KV],
                                          .compressed = at[LAYER_COMPRESSED],
                                          .idx_k = at[LAYER_IDX_K],
                                          .idx_q = at[LAYER_IDX_Q],
                                          .idx_score = at[LAYER_IDX_SCORE],
                                          .core = at[LAYER_CORE],
                                          .core_irope = at[LAYER_CORE_IROPE],
                                          .o_a = at[LAYER_O_A],
                                          .out = at[LAYER_OUT]};
    oracle_dsv4_layer(&c->shape, value[LAYER_X] + b * T * c->shape.width, value + LAYER_WEIGHTS,
                      value[LAYER_COS_SIN], chosen != NULL ? chosen + b * T * c->shape.top_k : NULL,
                      &results);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = 0; t < T; t++)
            memcpy(at[LAYER_Q] + (h * T + t) * dim, q + (t * heads + h) * dim, (size_t)dim * sizeof *q);
    free(q);
}

/* The choice is the best of the scores, which are f32. */
static void check_choice(const layer_case *c, const double *scores, const int32_t *idx)
{
    const int64_t T = c->shape.tokens, S = T / c->shape.ratio, k = c->shape.top_k;
    int32_t *best = malloc((size_t)k * sizeof *best);
    for (int64_t row = 0; row < c->batch * T; row++) {
        const int64_t seen = oracle_dsv4_visible(S, c->shape.ratio, row % T);
        oracle_dsv4_best(scores + row * S, seen, k, best);
        for (int64_t s = seen; s < S; s++) assert_true(scores[row * S + s] == -INFINITY);
        assert_memory_equal(best, idx + row * k, (size_t)k * sizeof *best);
    }
    free(best);
}

/* A bound is for an operation that rounds its result once. A layer rounds to bf16 or f16 rows that lie one
 * behind the other: kv, o, o_a and out, and beside these q_residual and q, which move the scores. Such errors
 * are independent and add in squares: with u that of one rounding (0.0017 in bf16) and as much again from the
 * core's own weights, out has sqrt(6) u = 0.0042 and more where scores are large, while one operation's bound
 * of 0.004 stands for 1.4 u. Hence 2 bounds; f32 has no such allowance. A score of the indexer is a sum of
 * both signs over its heads, so its rounding is relative to more than itself: 4 bounds, for more than a few
 * scores in bf16 and f16. */
static double forward_bound(const layer_case *c, int tensor)
{
    const double bound = test_forward_bound(c->dtype);
    if (tensor == LAYER_IDX_SCORE)
        return c->dtype != QUERN_F32 && test_tensor_count(&c->t[tensor]) < LAYER_FEW ? INFINITY : 4 * bound;
    return c->dtype == QUERN_F32 ? bound : 2 * bound;
}

void layer_case_check(const layer_case *c)
{
    double *value[LAYER_TENSORS] = {NULL}, *expected[LAYER_TENSORS] = {NULL};
    int32_t *idx = c->shape.kind == ORACLE_CSA ? test_tensor_get_i32(&c->t[LAYER_IDX_TOPK]) : NULL;
    for (int i = 0; i <= LAYER_O_A; i++) {
        if (c->t[i].buffer == NULL || i == LAYER_IDX_TOPK) continue;
        value[i] = test_tensor_get(&c->t[i]);
        if (i >= LAYER_OUT) expected[i] = test_doubles(test_tensor_count(&c->t[i]));
    }
    for (int64_t b = 0; b < c->batch; b++) compute_sequence(c, b, value, idx, expected);
    if (idx != NULL) check_choice(c, value[LAYER_IDX_SCORE], idx);
    for (int i = 0; i < LAYER_D_OUT; i++) {
        if (c->t[i].buffer == NULL) continue;
        if (expected[i] != NULL)
            test_check(layer_case_names[i], value[i], expected[i], test_tensor_count(&c->t[i]),
                       forward_bound(c, i));
        if (i >= LAYER_OUT) test_tensor_check_guards(&c->t[i], layer_case_names[i]);
        else test_tensor_check_unchanged(&c->t[i], layer_case_names[i]);
    }
    for (int i = 0; i < LAYER_TENSORS; i++) free(value[i]), free(expected[i]);
    free(idx);
}

double layer_case_loss(const layer_case *c, int64_t b, const double *x, double *const w[ORACLE_LAYER_WEIGHTS],
                       const double *cos_sin, const int32_t *chosen, const double *d_out)
{
    const int64_t n = c->shape.tokens * c->shape.width;
    double *out = test_doubles(n), sum = 0;
    oracle_dsv4_layer(&c->shape, x + b * n, w, cos_sin,
                      chosen != NULL ? chosen + b * c->shape.tokens * c->shape.top_k : NULL,
                      &(oracle_layer_results){.out = out});
    for (int64_t i = 0; i < n; i++) sum += out[i] * d_out[b * n + i];
    free(out);
    return sum;
}
