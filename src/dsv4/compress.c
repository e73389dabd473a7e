/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.c - the compressors' public functions, and the stages that each runs.
 *
 *   forward:  [steps of weights.c] pool_forward, of the main compressor and of the indexer's [permute: its
 *             entries, late]
 *   backward: [steps of weights.c] pool_backward of both [convert: the gradient of x]
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

static bool is_backward(const op_call *call)
{
    return call->operation == DSV4_COMPRESS_BACKWARD;
}

/* The tensor as [B, rows, columns]; `own`: the caller's tensor has the batch extent. */
static quern_tensor rows_view(const op_call *call, int32_t tensor, bool own)
{
    const quern_tensor t = op_view(call, tensor, false);
    return t.ndim == 0 || own ? t : view_with_batch(&t);
}

/* The tensors of a compressor that has its own. */
typedef struct own_tensors {
    int8_t proj, w, b_a, b_b, prev_b, norm_weight, pooled, out, d_out, d_proj, d_prev_b, d_w, d_b_a, d_b_b,
        d_norm_weight, w_fp8;
} own_tensors;
static const own_tensors main_tensors = {.proj = DC_PROJ,
                                         .w = DC_W,
                                         .b_a = DC_B_A,
                                         .b_b = DC_B_B,
                                         .prev_b = DC_PREV_B,
                                         .norm_weight = DC_NORM_WEIGHT,
                                         .pooled = DC_POOLED,
                                         .out = DC_OUT,
                                         .d_out = DC_D_OUT,
                                         .d_proj = DC_D_PROJ,
                                         .d_prev_b = DC_D_PREV_B,
                                         .d_w = DC_D_W,
                                         .d_b_a = DC_D_B_A,
                                         .d_b_b = DC_D_B_B,
                                         .d_norm_weight = DC_D_NORM_WEIGHT,
                                         .w_fp8 = DC_W_FP8},
                         index_tensors = {.proj = DC_INDEX_PROJ,
                                          .w = DC_INDEX_W,
                                          .b_a = DC_INDEX_B_A,
                                          .b_b = DC_INDEX_B_B,
                                          .prev_b = DC_INDEX_PREV_B,
                                          .norm_weight = DC_INDEX_NORM_WEIGHT,
                                          .pooled = DC_INDEX_POOLED,
                                          .out = DC_INDEX_OUT,
                                          .d_out = DC_INDEX_D_OUT,
                                          .d_proj = DC_INDEX_D_PROJ,
                                          .d_prev_b = DC_INDEX_D_PREV_B,
                                          .d_w = DC_INDEX_D_W,
                                          .d_b_a = DC_INDEX_D_B_A,
                                          .d_b_b = DC_INDEX_D_B_B,
                                          .d_norm_weight = DC_INDEX_D_NORM_WEIGHT,
                                          .w_fp8 = DC_INDEX_W_FP8};

static pool_args pool_of(const dsv4_compress_call *c, const own_tensors *t,
                         const quern_dsv4_compress_params *params)
{
    const op_call *h = &c->head;
    const bool lead = h->lead[0].count > 0, own = lead || h->varlen;
    pool_args p = {.ratio = params->ratio,
                   .width = h->given[t->b_a]->shape[1],
                   .overlap = params->kind == QUERN_DSV4_CSA,
                   .batch = dsv4_compress_sequences(h),
                   .start_token = params->start_token,
                   .start_position = params->start_abs_pos,
                   .blocks = params->n_blocks};
    p.cu_seqlens = op_view(h, DC_CU_SEQLENS, false);
    p.start_tokens = op_view(h, DC_START_TOKENS, false);
    p.start_positions = op_view(h, DC_START_POSITIONS, false);
    p.block_counts = op_view(h, DC_BLOCK_COUNTS, false);
    p.has_prev = op_view(h, DC_HAS_PREV, false);
    p.proj = rows_view(h, t->proj, lead);
    p.x = rows_view(h, DC_X, lead);
    p.bias_a = op_view(h, t->b_a, false);
    p.bias_b = op_view(h, t->b_b, false);
    p.prev_b = rows_view(h, t->prev_b, own);
    const quern_tensor norm = op_view(h, t->norm_weight, false), table = op_view(h, DC_COS_SIN, false);
    p.entry = dsv4_entry(params, &norm, &table);
    p.pooled = rows_view(h, t->pooled, lead);
    p.out = rows_view(h, t->out, lead);
    p.d_out = rows_view(h, t->d_out, lead);
    p.d_proj = rows_view(h, t->d_proj, lead);
    p.d_x = rows_view(h, DC_D_X, lead);
    p.d_w = op_view(h, t->d_w, false);
    p.d_prev_b = rows_view(h, t->d_prev_b, own);
    p.d_bias_a = op_view(h, t->d_b_a, false);
    p.d_bias_b = op_view(h, t->d_b_b, false);
    p.d_norm_weight = op_view(h, t->d_norm_weight, false);
    return p;
}

/* The weight of a call from x: in `pool` as floats, or as the projections that it makes. */
static dsv4_weight make_weight(const op_call *h, const own_tensors *t, pool_args *pool, arena *a)
{
    const dsv4_weight_given given = {.w = op_view(h, t->w, false),
                                     .w_fp8 = op_view(h, t->w_fp8, false),
                                     .w_fp8_scales = op_view(h, t->w_fp8 + 1, false),
                                     .w_codes = op_view(h, t->w_fp8 + 2, false),
                                     .w_scales = op_view(h, t->w_fp8 + 3, false),
                                     .w_global = op_view(h, t->w_fp8 + 4, false)};
    if (pool->x.ndim == 0) return (dsv4_weight){.w = given.w};
    const dsv4_weight weight = dsv4_weight_of(&pool->x, &given, is_backward(h), a);
    pool->w = weight.w;
    if (weight.proj.ndim == 0) return weight;
    const int64_t shape[] = {pool->x.shape[0], pool->x.shape[1], weight.proj.shape[1]};
    pool->proj = view_on(&weight.proj, weight.proj.data, QUERN_F32, 3, shape);
    pool->x = (quern_tensor){0};
    return weight;
}

/* The tensor's rows in the workspace instead, to be copied later. */
static permute_args put_off(quern_tensor *t, arena *a)
{
    permute_args copy = {.per = 1, .out = *t};
    if (t->ndim == 0) return copy;
    *t = view_on(t, arena_take(a, (size_t)view_elements(t) * quern_dtype_size(t->dtype)), t->dtype, t->ndim,
                 t->shape);
    copy.x = *t;
    return copy;
}

/* [B, rows, columns] as [B, rows, 1, columns]. */
static quern_tensor one_head(const quern_tensor *t)
{
    quern_tensor v = *t;
    v.ndim = 4;
    v.shape[3] = t->shape[2];
    v.strides[3] = t->strides[2];
    v.shape[2] = 1;
    v.strides[2] = t->strides[1];
    return v;
}

/* The indexer's compressor beside the main one. No output is written before both have accepted their entries;
 * the gradient of x sums both in f32. */
static void pair(dsv4_compress_call *c, arena *a)
{
    quern_dsv4_compress_params p = c->params;
    p.format = c->params.index_format;
    p.hadamard = c->params.index_hadamard;
    c->index = pool_of(c, &index_tensors, &p);
    c->index_weight = make_weight(&c->head, &index_tensors, &c->index, a);
    c->index_first = p.format != QUERN_DSV4_ROWS && !is_backward(&c->head);
    if (c->index_first && c->params.format != QUERN_DSV4_ROWS) {
        c->late_out = put_off(&c->index.out, a);
        c->late_pooled = put_off(&c->index.pooled, a);
    }
    quern_tensor *sum = &c->pool.d_x;
    if (sum->ndim == 0) return;
    if (sum->dtype != QUERN_F32) {
        c->d_x.out = one_head(sum);
        *sum =
            view_on(sum, arena_take(a, (size_t)view_elements(sum) * sizeof(float)), QUERN_F32, 3, sum->shape);
        c->d_x.in = one_head(sum);
        c->d_x.seqs = (stage_seqs){.batch = sum->shape[0], .n_q = sum->shape[1], .n_kv = sum->shape[1]};
    }
    c->index.d_x = *sum;
    c->index.accumulate_x = true;
}

static size_t larger(size_t x, size_t y)
{
    return x > y ? x : y;
}

quern_status dsv4_compress_plan(op_call *call)
{
    dsv4_compress_call *c = (dsv4_compress_call *)call;
    const pool_stage *stage =
        is_backward(call) ? &call->backend->pool_backward : &call->backend->pool_forward;
    arena a = op_workspace();
    char why[STAGE_WHY_BYTES] = "";
    if (stage->run == NULL)
        return error_set(QUERN_ERR_UNSUPPORTED, "the %s backend has no compressors: the cpu has",
                         call->backend->name);
    c->pool = pool_of(c, &main_tensors, &c->params);
    c->pool.cu_entries = op_view(call, DC_CU_SEQLENS_CMP, false);
    c->weight = make_weight(call, &main_tensors, &c->pool, &a);
    const bool both = c->both = op_uses(call, DC_INDEX_B_A);
    if (both) pair(c, &a);
    if (!STAGE_TAKES(*stage, &call->exec, &c->pool, why) ||
        (both && !STAGE_TAKES(*stage, &call->exec, &c->index, why)))
        return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    size_t bytes = stage->workspace(&call->exec, &c->pool);
    if (both) bytes = larger(bytes, stage->workspace(&call->exec, &c->index));
    if (c->late_out.x.ndim > 0)
        bytes = larger(bytes, STAGE_WORKSPACE(call->backend->permute, &call->exec, &c->late_out));
    const char *missing = dsv4_weight_missing(call->backend, &call->exec, &c->weight, &bytes);
    if (missing == NULL) missing = dsv4_weight_missing(call->backend, &call->exec, &c->index_weight, &bytes);
    if (missing != NULL)
        return error_set(QUERN_ERR_UNSUPPORTED, "the %s backend has no %s for these weights: the cpu has",
                         call->backend->name, missing);
    c->scratch = arena_take(&a, bytes);
    op_workspace_end(call, &a);
    return QUERN_OK;
}

/* Runs what a compressor's weight needs. */
static quern_status run_weight(const op_call *call, const op_frame *frame, const dsv4_weight *weight)
{
    const void *scratch = ((const dsv4_compress_call *)call)->scratch;
    quern_status status = QUERN_OK;
#define RUN(stage, step, output)                                                                             \
    if (status == QUERN_OK && weight->step.output.ndim > 0)                                                  \
        status = op_##stage(call, frame, &weight->step, scratch);
    DSV4_WEIGHT_STEPS(RUN)
#undef RUN
    return status;
}

static quern_status run_pool(const op_call *call, const op_frame *frame, bool index)
{
    const dsv4_compress_call *c = (const dsv4_compress_call *)call;
    const pool_args *args = index ? &c->index : &c->pool;
    return is_backward(call) ? op_pool_backward(call, frame, args, c->scratch)
                             : op_pool_forward(call, frame, args, c->scratch);
}

/* Both weights first, into the workspace: a bad scale byte is refused before any output is written. */
quern_status dsv4_compress_run(const op_call *call, const op_frame *frame)
{
    const dsv4_compress_call *c = (const dsv4_compress_call *)call;
    quern_status status = run_weight(call, frame, &c->weight);
    if (status == QUERN_OK && c->both) status = run_weight(call, frame, &c->index_weight);
    if (status == QUERN_OK) status = run_pool(call, frame, c->both && c->index_first);
    if (status == QUERN_OK && c->both) status = run_pool(call, frame, !c->index_first);
    if (status == QUERN_OK && c->late_out.x.ndim > 0)
        status = op_permute(call, frame, &c->late_out, c->scratch);
    if (status == QUERN_OK && c->late_pooled.x.ndim > 0)
        status = op_permute(call, frame, &c->late_pooled, c->scratch);
    if (status == QUERN_OK && c->d_x.in.ndim > 0) status = op_convert(call, frame, &c->d_x, c->scratch);
    return status;
}

quern_status quern_dsv4_compress_workspace(quern_context *ctx, const quern_dsv4_compress_params *params,
                                           const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    dsv4_compress_call call;
    return op_workspace_of(&call.head, &dsv4_compress_family, DSV4_COMPRESS, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_compress(quern_context *ctx, const quern_exec *exec,
                                 const quern_dsv4_compress_params *params,
                                 const quern_dsv4_compress_tensors *tensors, void *workspace,
                                 size_t workspace_bytes)
{
    dsv4_compress_call call;
    return op_run(&call.head, &dsv4_compress_family, DSV4_COMPRESS, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_dsv4_compress_backward_workspace(quern_context *ctx,
                                                    const quern_dsv4_compress_params *params,
                                                    const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    dsv4_compress_call call;
    return op_workspace_of(&call.head, &dsv4_compress_family, DSV4_COMPRESS_BACKWARD, ctx, params, tensors,
                           bytes);
}

quern_status quern_dsv4_compress_backward(quern_context *ctx, const quern_exec *exec,
                                          const quern_dsv4_compress_params *params,
                                          const quern_dsv4_compress_tensors *tensors, void *workspace,
                                          size_t workspace_bytes)
{
    dsv4_compress_call call;
    return op_run(&call.head, &dsv4_compress_family, DSV4_COMPRESS_BACKWARD, ctx, exec, params, tensors,
                  workspace, workspace_bytes);
}
