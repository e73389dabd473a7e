/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.c - the compressors' public functions, and the steps that each takes.
 *
 *   forward:  [steps of weights.c] pool_forward, of the main compressor and of the indexer's [permute: its
 *             entries, late]
 *   backward: [steps of weights.c] pool_backward of both [convert: the gradient of x]
 */
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

/* The number of a tensor of the main compressor, or of the indexer's. */
#define OWN(field) (index ? DC(index_##field) : DC(field))

/* The step of a compressor, whose weight is made. */
static pool_args *add_pool(op_build *b, bool index, const dsv4_weight *weight)
{
    const op_call *h = b->call;
    const dsv4_compress_call *c = (const dsv4_compress_call *)h;
    const bool lead = h->lead[0].count > 0, own = lead || h->varlen;
    quern_dsv4_compress_params params = c->params;
    if (index) {
        params.format = c->params.index_format;
        params.hadamard = c->params.index_hadamard;
    }
    pool_args *p = is_backward(h) ? OP_ADD(b, pool_backward) : OP_ADD(b, pool_forward);
    p->ratio = params.ratio;
    p->width = h->given[OWN(b_a)]->shape[1];
    p->overlap = params.kind == QUERN_DSV4_CSA;
    p->batch = dsv4_compress_sequences(h);
    p->start_token = params.start_token;
    p->start_position = params.start_abs_pos;
    p->blocks = params.n_blocks;
    p->cu_seqlens = op_view(h, DC(cu_seqlens), false);
    p->start_tokens = op_view(h, DC(start_tokens), false);
    p->start_positions = op_view(h, DC(start_positions), false);
    p->block_counts = op_view(h, DC(block_counts), false);
    p->has_prev = op_view(h, DC(has_prev), false);
    p->proj = rows_view(h, OWN(proj), lead);
    if (weight->proj.ndim == 0) {
        p->x = rows_view(h, DC(x), lead);
        p->w = weight->w;
    } else {
        const int64_t shape[] = {h->lead[0].count > 0 ? h->lead[0].extent[0] : 1, h->symbol[DS_T],
                                 weight->proj.shape[1]};
        p->proj = view_on(&weight->proj, weight->proj.data, QUERN_F32, 3, shape);
    }
    p->bias_a = op_view(h, OWN(b_a), false);
    p->bias_b = op_view(h, OWN(b_b), false);
    p->prev_b = rows_view(h, OWN(prev_b), own);
    const quern_tensor norm = op_view(h, OWN(norm_weight), false), table = op_view(h, DC(cos_sin), false);
    p->entry = dsv4_entry(&params, &norm, &table);
    if (!index) p->cu_entries = op_view(h, DC(cu_seqlens_cmp), false);
    p->pooled = rows_view(h, OWN(pooled), lead);
    p->out = rows_view(h, OWN(out), lead);
    p->d_out = rows_view(h, OWN(d_out), lead);
    p->d_proj = rows_view(h, OWN(d_proj), lead);
    p->d_x = rows_view(h, DC(d_x), lead);
    p->d_w = op_view(h, OWN(d_w), false);
    p->d_prev_b = rows_view(h, OWN(d_prev_b), own);
    p->d_bias_a = op_view(h, OWN(d_b_a), false);
    p->d_bias_b = op_view(h, OWN(d_b_b), false);
    p->d_norm_weight = op_view(h, OWN(d_norm_weight), false);
    return p;
}
#undef OWN

/* Puts memory in place of a result; returns the result. */
static quern_tensor put_off(op_build *b, quern_tensor *t)
{
    const quern_tensor result = *t;
    if (t->ndim > 0) *t = op_room(b, t->dtype, t->ndim, t->shape);
    return result;
}

static void copy_late(op_build *b, const quern_tensor *from, const quern_tensor *to)
{
    if (to->ndim > 0) op_copy(b, from, to);
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

/* Both compressors forward: no output is written before both have accepted their entries. One that accepts
 * all goes last; where neither does, the indexer's outputs wait in the workspace. */
static void build_forwards(op_build *b, const dsv4_weight *main, const dsv4_weight *own)
{
    const quern_dsv4_compress_params *p = &((const dsv4_compress_call *)b->call)->params;
    const bool index_first = p->index_format != QUERN_DSV4_ROWS,
               late = index_first && p->format != QUERN_DSV4_ROWS;
    quern_tensor out = {0}, pooled = {0};
    if (!index_first) add_pool(b, false, main);
    pool_args *index = add_pool(b, true, own);
    if (late) {
        out = put_off(b, &index->out);
        pooled = put_off(b, &index->pooled);
    }
    if (index_first) add_pool(b, false, main);
    copy_late(b, &index->out, &out);
    copy_late(b, &index->pooled, &pooled);
}

/* Both backward: the gradient of x sums both in f32. */
static void build_backwards(op_build *b, const dsv4_weight *main, const dsv4_weight *own)
{
    pool_args *first = add_pool(b, false, main);
    const quern_tensor result = first->d_x;
    const bool converts = result.ndim > 0 && result.dtype != QUERN_F32;
    if (converts) first->d_x = op_room(b, QUERN_F32, 3, result.shape);
    pool_args *second = add_pool(b, true, own);
    second->d_x = first->d_x;
    second->accumulate_x = first->d_x.ndim > 0;
    if (!converts) return;
    *OP_ADD(b, convert) =
        (convert_args){.seqs = {.batch = result.shape[0], .n_q = result.shape[1], .n_kv = result.shape[1]},
                       .in = one_head(&first->d_x),
                       .out = one_head(&result)};
}

/* Both weights first, into the workspace: a bad scale byte is refused before any output is written. */
void dsv4_compress_build(op_build *b)
{
    op_call *h = b->call;
    dsv4_compress_call *c = (dsv4_compress_call *)h;
    const quern_tensor x = rows_view(h, DC(x), h->lead[0].count > 0);
    const bool both = op_uses(h, DC(index_b_a)), backward = is_backward(h);
    for (int i = 0; i <= both; i++) c->weights[i] = dsv4_weight_views(h, &dsv4_compress_weights[i]);
    const dsv4_weight main = dsv4_weight_add(b, &x, &c->weights[0], backward);
    if (!both) {
        add_pool(b, false, &main);
        return;
    }
    const dsv4_weight own = dsv4_weight_add(b, &x, &c->weights[1], backward);
    if (backward) build_backwards(b, &main, &own);
    else build_forwards(b, &main, &own);
}

quern_status quern_dsv4_compress_workspace(quern_context *ctx, const quern_dsv4_compress_params *params,
                                           const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&dsv4_compress_family, DSV4_COMPRESS, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_compress(quern_context *ctx, const quern_exec *exec,
                                 const quern_dsv4_compress_params *params,
                                 const quern_dsv4_compress_tensors *tensors, void *workspace,
                                 size_t workspace_bytes)
{
    return op_run(&dsv4_compress_family, DSV4_COMPRESS, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}

quern_status quern_dsv4_compress_backward_workspace(quern_context *ctx,
                                                    const quern_dsv4_compress_params *params,
                                                    const quern_dsv4_compress_tensors *tensors, size_t *bytes)
{
    return op_workspace_of(&dsv4_compress_family, DSV4_COMPRESS_BACKWARD, ctx, params, tensors, bytes);
}

quern_status quern_dsv4_compress_backward(quern_context *ctx, const quern_exec *exec,
                                          const quern_dsv4_compress_params *params,
                                          const quern_dsv4_compress_tensors *tensors, void *workspace,
                                          size_t workspace_bytes)
{
    return op_run(&dsv4_compress_family, DSV4_COMPRESS_BACKWARD, ctx, exec, params, tensors, workspace,
                  workspace_bytes);
}
