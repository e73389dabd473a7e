/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * peer_onednn.c - what a program on a good GEMM library reaches. Attention: per head and block of 256
 * queries, S = Q K^T over the keys up to the block's last (matmul), the scale and the diagonal's mask (a loop
 * over the block), P = softmax(S) in place, O = P V (matmul); the primitives of a block shape are made once
 * and serve every head. Products of experts, and of a projection: a matmul each. Written for oneDNN 2.
 */
#include "bench.h"

#include "peer_room.h"
#include "values.h"

#include <quern/nvfp4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(QUERN_ONEDNN)
#include <oneapi/dnnl/dnnl.h>
#endif

#if defined(QUERN_ONEDNN) && DNNL_VERSION_MAJOR == 2
#include <omp.h>

enum { BLOCK = 256, MOST = 3 };

static void *tensor_data(const job *j, const char *name)
{
    const int i = tensor_named(j->op, name);
    return i >= 0 && j->tensors.t[i] != NULL ? j->tensors.t[i]->data : NULL;
}

/* ---- attention ---- */

/* One product or softmax over fixed memory: pointers are set before each run. */
typedef struct step {
    dnnl_primitive_t primitive;
    dnnl_memory_t memory[MOST];
    int names[MOST], count;
} step;

typedef struct composed {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    step *scores, *softmax, *output; /* by block */
    int64_t blocks;
} composed;

static bool matrix(dnnl_memory_desc_t *md, dnnl_data_type_t type, int64_t rows, int64_t columns,
                   int64_t row_stride, int64_t column_stride)
{
    const dnnl_dims_t dims = {rows, columns}, strides = {row_stride, column_stride};
    return dnnl_memory_desc_init_by_strides(md, 2, dims, type, strides) == dnnl_success;
}

static bool make_step(step *s, composed *c, const void *op_desc, const_dnnl_primitive_attr_t attr, int count,
                      const int *names, const dnnl_memory_desc_t *mds)
{
    dnnl_primitive_desc_t pd = NULL;
    bool ok = dnnl_primitive_desc_create(&pd, op_desc, attr, c->engine, NULL) == dnnl_success &&
              dnnl_primitive_create(&s->primitive, pd) == dnnl_success;
    if (pd != NULL) dnnl_primitive_desc_destroy(pd);
    for (int i = 0; i < count && ok; i++) {
        s->names[i] = names[i];
        ok = dnnl_memory_create(&s->memory[i], &mds[i], c->engine, DNNL_MEMORY_NONE) == dnnl_success;
        s->count = i + 1;
    }
    return ok;
}

static bool run_step(const step *s, composed *c, void *const *pointers)
{
    dnnl_exec_arg_t args[MOST];
    for (int i = 0; i < MOST && i < s->count; i++) {
        if (dnnl_memory_set_data_handle(s->memory[i], pointers[i]) != dnnl_success) return false;
        args[i] = (dnnl_exec_arg_t){s->names[i], s->memory[i]};
    }
    return dnnl_primitive_execute(s->primitive, c->stream, s->count, args) == dnnl_success;
}

static void free_steps(step *steps, int64_t count)
{
    for (int64_t b = 0; steps != NULL && b < count; b++) {
        for (int i = 0; i < steps[b].count; i++) dnnl_memory_destroy(steps[b].memory[i]);
        if (steps[b].primitive != NULL) dnnl_primitive_destroy(steps[b].primitive);
    }
    free(steps);
}

static void close_composed(composed *c)
{
    free_steps(c->scores, c->blocks);
    free_steps(c->softmax, c->blocks);
    free_steps(c->output, c->blocks);
    if (c->stream != NULL) dnnl_stream_destroy(c->stream);
    if (c->engine != NULL) dnnl_engine_destroy(c->engine);
}

static bool make_block(composed *c, const bench_case *what, int64_t b, dnnl_data_type_t type,
                       const_dnnl_primitive_attr_t scaled)
{
    static const int product[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
                     in_place[] = {DNNL_ARG_SRC, DNNL_ARG_DST};
    const int64_t first = b * BLOCK, rows = what->n - first < BLOCK ? what->n - first : BLOCK,
                  keys = first + rows;
    const int64_t q_row = what->heads * what->dim, k_row = what->kv_heads * what->dim,
                  v_row = what->kv_heads * what->dim_v;
    dnnl_memory_desc_t q, k, s, v, o;
    dnnl_matmul_desc_t qk, pv;
    dnnl_softmax_desc_t softmax;
    if (!matrix(&q, type, rows, what->dim, q_row, 1) || !matrix(&k, type, what->dim, keys, 1, k_row) ||
        !matrix(&s, type, rows, keys, keys, 1) || !matrix(&v, type, keys, what->dim_v, v_row, 1) ||
        !matrix(&o, type, rows, what->dim_v, what->heads * what->dim_v, 1))
        return false;
    const dnnl_memory_desc_t mds_qk[] = {q, k, s}, mds_s[] = {s, s}, mds_pv[] = {s, v, o};
    return dnnl_matmul_desc_init(&qk, &q, &k, NULL, &s) == dnnl_success &&
           dnnl_matmul_desc_init(&pv, &s, &v, NULL, &o) == dnnl_success &&
           dnnl_softmax_forward_desc_init(&softmax, dnnl_forward_inference, &s, 1) == dnnl_success &&
           make_step(&c->scores[b], c, &qk, scaled, 3, product, mds_qk) &&
           make_step(&c->softmax[b], c, &softmax, NULL, 2, in_place, mds_s) &&
           make_step(&c->output[b], c, &pv, NULL, 3, product, mds_pv);
}

static bool open_composed(composed *c, const bench_case *what)
{
    const dnnl_data_type_t type = what->dtype == QUERN_BF16 ? dnnl_bf16 : dnnl_f32;
    const float scale = 1.0f / sqrtf((float)what->dim);
    dnnl_primitive_attr_t scaled = NULL;
    memset(c, 0, sizeof *c);
    c->blocks = (what->n + BLOCK - 1) / BLOCK;
    c->scores = calloc((size_t)c->blocks, sizeof *c->scores);
    c->softmax = calloc((size_t)c->blocks, sizeof *c->softmax);
    c->output = calloc((size_t)c->blocks, sizeof *c->output);
    bool ok = c->scores != NULL && c->softmax != NULL && c->output != NULL &&
              dnnl_engine_create(&c->engine, dnnl_cpu, 0) == dnnl_success &&
              dnnl_stream_create(&c->stream, c->engine, dnnl_stream_default_flags) == dnnl_success &&
              dnnl_primitive_attr_create(&scaled) == dnnl_success &&
              dnnl_primitive_attr_set_output_scales(scaled, 1, 0, &scale) == dnnl_success;
    for (int64_t b = 0; b < c->blocks && ok; b++) ok = make_block(c, what, b, type, scaled);
    if (scaled != NULL) dnnl_primitive_attr_destroy(scaled);
    return ok;
}

/* Keys after the query get -inf; only the last BLOCK columns of a block hold any. */
static void mask_diagonal(void *scores, size_t element, int64_t first, int64_t rows)
{
    const int64_t keys = first + rows;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = first + i + 1; j < keys; j++) {
            if (element == 4) ((float *)scores)[i * keys + j] = -INFINITY;
            else ((uint16_t *)scores)[i * keys + j] = 0xff80;
        }
    }
}

/* A call's tensors: Q, K, V of the job beside it, an output and a block of scores. */
typedef struct attention_peer {
    composed c;
    const bench_case *what;
    char *q, *k, *v, *o, *scores;
} attention_peer;

static bool run_attention(void *arg, quern_context *ctx, double ms[2])
{
    attention_peer *p = arg;
    composed *c = &p->c;
    const bench_case *what = p->what;
    const size_t element = what->dtype == QUERN_BF16 ? 2 : 4;
    const double start = now_ms();
    omp_set_num_threads(quern_context_threads(ctx));
    for (int64_t h = 0; h < what->heads; h++) {
        const size_t kv = (size_t)(h / (what->heads / what->kv_heads)) * element;
        for (int64_t b = 0; b < c->blocks; b++) {
            const int64_t first = b * BLOCK, rows = what->n - first < BLOCK ? what->n - first : BLOCK;
            void *const qk[] = {p->q + (size_t)((first * what->heads + h) * what->dim) * element,
                                p->k + kv * (size_t)what->dim, p->scores};
            void *const in_place[MOST] = {p->scores, p->scores};
            void *const pv[] = {p->scores, p->v + kv * (size_t)what->dim_v,
                                p->o + (size_t)((first * what->heads + h) * what->dim_v) * element};
            if (!run_step(&c->scores[b], c, qk)) return false;
            mask_diagonal(p->scores, element, first, rows);
            if (!run_step(&c->softmax[b], c, in_place) || !run_step(&c->output[b], c, pv)) return false;
        }
    }
    if (dnnl_stream_wait(c->stream) != dnnl_success) return false;
    ms[0] = now_ms() - start;
    return true;
}

static void close_attention(void *arg)
{
    attention_peer *p = arg;
    close_composed(&p->c);
    free(p->o);
    free(p->scores);
    free(p);
}

static void *open_attention(const bench_case *what, const job *j, quern_context *ctx)
{
    const quern_attention_params *params = &what->params.attention;
    const size_t element = what->dtype == QUERN_BF16 ? 2 : 4;
    double ms[2];
    if (!params->causal || params->window > 0 || params->scale != 0 || params->query_offset >= 0 ||
        what->batch != 1 || what->documents > 0 || what->dtype == QUERN_F16 || what->device != QUERN_CPU ||
        !peer_has_room(quern_context_threads(ctx)))
        return NULL;
    attention_peer *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    p->what = what;
    p->q = tensor_data(j, "Q");
    p->k = tensor_data(j, "K");
    p->v = tensor_data(j, "V");
    p->o = bench_allocate((size_t)(what->n * what->heads * what->dim_v) * element);
    p->scores = bench_allocate((size_t)what->n * BLOCK * element);
    omp_set_num_threads(quern_context_threads(ctx));
    if (p->o != NULL && p->scores != NULL && open_composed(&p->c, what) && run_attention(p, ctx, ms))
        return p;
    close_attention(p);
    return NULL;
}

const bench_peer peer_attention = {"oneDNN", open_attention, run_attention, close_attention};

/* ---- products ---- */

/* Products of each expert's rows of a with the same weight [k, n], in the format of `md` and in memory of its
 * own for each. */
typedef struct peer_gemm {
    composed c;
    step product;
    char *a, *out, *weights;
    size_t each; /* bytes of a weight */
    int64_t experts, rows, n, k;
    dnnl_data_type_t type, out_type;
} peer_gemm;

static const dnnl_format_tag_t weight_tags[] = {dnnl_format_tag_any, dnnl_ab, dnnl_ba};

static bool reorder(composed *c, const dnnl_memory_desc_t *from, const dnnl_memory_desc_t *to,
                    const void *weight, void *reordered)
{
    dnnl_primitive_desc_t pd = NULL;
    dnnl_primitive_t primitive = NULL;
    dnnl_memory_t in = NULL, out = NULL;
    bool ok = dnnl_reorder_primitive_desc_create(&pd, from, c->engine, to, c->engine, NULL) == dnnl_success &&
              dnnl_primitive_create(&primitive, pd) == dnnl_success &&
              dnnl_memory_create(&in, from, c->engine, (void *)(uintptr_t)weight) == dnnl_success &&
              dnnl_memory_create(&out, to, c->engine, reordered) == dnnl_success;
    const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, in}, {DNNL_ARG_TO, out}};
    ok = ok && dnnl_primitive_execute(primitive, c->stream, 2, args) == dnnl_success &&
         dnnl_stream_wait(c->stream) == dnnl_success;
    if (in != NULL) dnnl_memory_destroy(in);
    if (out != NULL) dnnl_memory_destroy(out);
    if (primitive != NULL) dnnl_primitive_destroy(primitive);
    if (pd != NULL) dnnl_primitive_desc_destroy(pd);
    return ok;
}

/* Makes the product with weights in the format that a tag asks for, and every expert's weight in it. */
static bool make_product(peer_gemm *p, dnnl_format_tag_t tag, const void *weight)
{
    static const int names[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    const dnnl_dims_t dims = {p->k, p->n};
    dnnl_memory_desc_t a, w, plain, out;
    dnnl_matmul_desc_t desc;
    dnnl_primitive_desc_t pd = NULL;
    if (!matrix(&a, p->type, p->rows, p->k, p->k, 1) || !matrix(&plain, p->type, p->k, p->n, p->n, 1) ||
        !matrix(&out, p->out_type, p->rows, p->n, p->n, 1) ||
        dnnl_memory_desc_init_by_tag(&w, 2, dims, p->type, tag) != dnnl_success ||
        dnnl_matmul_desc_init(&desc, &a, &w, NULL, &out) != dnnl_success ||
        dnnl_primitive_desc_create(&pd, &desc, NULL, p->c.engine, NULL) != dnnl_success)
        return false;
    w = *dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
    dnnl_primitive_desc_destroy(pd);
    const dnnl_memory_desc_t mds[] = {a, w, out};
    p->each = (dnnl_memory_desc_get_size(&w) + 63) & ~(size_t)63;
    p->weights = bench_allocate((size_t)p->experts * p->each + 1);
    if (p->weights == NULL || dnnl_matmul_desc_init(&desc, &a, &w, NULL, &out) != dnnl_success ||
        !make_step(&p->product, &p->c, &desc, NULL, 3, names, mds) ||
        !reorder(&p->c, &plain, &w, weight, p->weights))
        return false;
    for (int64_t e = 1; e < p->experts; e++) memcpy(p->weights + (size_t)e * p->each, p->weights, p->each);
    return true;
}

static void free_product(peer_gemm *p)
{
    for (int i = 0; i < p->product.count; i++) dnnl_memory_destroy(p->product.memory[i]);
    if (p->product.primitive != NULL) dnnl_primitive_destroy(p->product.primitive);
    free(p->weights);
    p->product = (step){0};
    p->weights = NULL;
}

static size_t size_of(dnnl_data_type_t type)
{
    return type == dnnl_bf16 ? 2 : 4;
}

static bool run_gemm(void *arg, quern_context *ctx, double ms[2])
{
    peer_gemm *p = arg;
    const double start = now_ms();
    omp_set_num_threads(quern_context_threads(ctx));
    for (int64_t e = 0; e < p->experts; e++) {
        void *const pointers[] = {p->a + (size_t)(e * p->rows * p->k) * size_of(p->type),
                                  p->weights + (size_t)e * p->each,
                                  p->out + (size_t)(e * p->rows * p->n) * size_of(p->out_type)};
        if (!run_step(&p->product, &p->c, pointers)) return false;
    }
    if (dnnl_stream_wait(p->c.stream) != dnnl_success) return false;
    ms[0] = now_ms() - start;
    return true;
}

static void close_gemm(void *arg)
{
    peer_gemm *p = arg;
    free_product(p);
    close_composed(&p->c);
    free(p->out);
    free(p);
}

/* The median of three runs, after one; below 0: there is no such product. */
static double try_format(peer_gemm *p, dnnl_format_tag_t tag, const void *weight, quern_context *ctx)
{
    double ms[3], one[2];
    if (!make_product(p, tag, weight) || !run_gemm(p, ctx, one)) return -1;
    for (int i = 0; i < 3; i++) {
        if (!run_gemm(p, ctx, one)) return -1;
        ms[i] = one[0];
    }
    return timing_of(ms, 3).median;
}

/* Opens a product whose sizes are set, with the weight in the format that is fastest here. NULL without
 * memory. */
static void *open_gemm(const peer_gemm *sizes, const void *weight, quern_context *ctx)
{
    peer_gemm *p = peer_has_room(quern_context_threads(ctx)) ? malloc(sizeof *p) : NULL;
    int best = -1;
    double least = 0;
    if (p == NULL) return NULL;
    *p = *sizes;
    omp_set_num_threads(quern_context_threads(ctx));
    p->out = bench_allocate((size_t)(p->experts * p->rows * p->n) * size_of(p->out_type) + 1);
    const bool ok = p->out != NULL && dnnl_engine_create(&p->c.engine, dnnl_cpu, 0) == dnnl_success &&
                    dnnl_stream_create(&p->c.stream, p->c.engine, dnnl_stream_default_flags) == dnnl_success;
    for (int i = 0; i < (int)(sizeof weight_tags / sizeof *weight_tags) && ok; i++) {
        const double ms = try_format(p, weight_tags[i], weight, ctx);
        if (ms > 0 && (best < 0 || ms < least)) {
            best = i;
            least = ms;
        }
        free_product(p);
    }
    if (best >= 0 && make_product(p, weight_tags[best], weight)) return p;
    close_gemm(p);
    return NULL;
}

/* The weight of nvfp4-gemm's experts in bf16, to be freed; NULL without memory. */
static void *dequantised(int64_t k, int64_t n, quern_context *ctx)
{
    const int64_t codes_shape[] = {k / 2, n}, scales_shape[] = {k / 16, n}, shape[] = {k, n};
    uint8_t *codes, *scales;
    float one = 1;
    if (!bench_expert_weight(k, n, &codes, &scales)) return NULL;
    void *weight = bench_allocate((size_t)(k * n) * 2 + 1);
    const quern_tensor views[] = {quern_tensor_contiguous(codes, QUERN_U8, 2, codes_shape),
                                  quern_tensor_contiguous(scales, QUERN_U8, 2, scales_shape),
                                  quern_tensor_contiguous(&one, QUERN_F32, 0, NULL),
                                  quern_tensor_contiguous(weight, QUERN_BF16, 2, shape)};
    quern_nvfp4_dequantize_params p = QUERN_NVFP4_DEQUANTIZE_PARAMS_INIT;
    quern_nvfp4_dequantize_tensors t = QUERN_NVFP4_DEQUANTIZE_TENSORS_INIT;
    p.weight = true;
    t.codes = &views[0];
    t.scales = &views[1];
    t.global = &views[2];
    t.x = &views[3];
    if (weight != NULL && quern_nvfp4_dequantize(ctx, NULL, &p, &t, NULL, 0) != QUERN_OK) {
        free(weight);
        weight = NULL;
    }
    free(codes);
    free(scales);
    return weight;
}

/* The bf16 products of the same rows and weights, dequantised. */
static void *open_experts(const bench_case *c, const job *j, quern_context *ctx)
{
    const peer_gemm sizes = {.a = tensor_data(j, "A"),
                             .experts = bench_extent_of(c, "experts"),
                             .rows = c->n,
                             .n = bench_extent_of(c, "width"),
                             .k = bench_extent_of(c, "depth"),
                             .type = dnnl_bf16,
                             .out_type = dnnl_bf16};
    if (c->dtype != QUERN_BF16 || sizes.a == NULL || c->device != QUERN_CPU) return NULL;
    void *weight = dequantised(sizes.k, sizes.n, ctx), *peer = NULL;
    if (weight != NULL) peer = open_gemm(&sizes, weight, ctx);
    free(weight);
    return peer;
}

/* A compressor's projection from hidden states alone, in f32. */
static void *open_projection(const bench_case *c, const job *j, quern_context *ctx)
{
    const int x = tensor_named(j->op, "X"), w = tensor_named(j->op, "W");
    if (c->dtype == QUERN_F16 || c->device != QUERN_CPU || j->tensors.t[w] == NULL ||
        bench_extent_of(c, "index-width") > 0)
        return NULL;
    const peer_gemm sizes = {.a = j->tensors.t[x]->data,
                             .experts = 1,
                             .rows = c->n,
                             .n = j->tensors.t[w]->shape[1],
                             .k = j->tensors.t[w]->shape[0],
                             .type = c->dtype == QUERN_BF16 ? dnnl_bf16 : dnnl_f32,
                             .out_type = dnnl_f32};
    return open_gemm(&sizes, j->tensors.t[w]->data, ctx);
}

const bench_peer peer_experts = {"oneDNN", open_experts, run_gemm, close_gemm};
const bench_peer peer_projection = {"oneDNN's product alone", open_projection, run_gemm, close_gemm};
#else
static void *open_none(const bench_case *c, const job *j, quern_context *ctx)
{
    (void)c, (void)j, (void)ctx;
    return NULL;
}

const bench_peer peer_attention = {"oneDNN", open_none, NULL, NULL};
const bench_peer peer_experts = {"oneDNN", open_none, NULL, NULL};
const bench_peer peer_projection = {"oneDNN's product alone", open_none, NULL, NULL};
#endif
