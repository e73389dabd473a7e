/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* any.cu - turns a stage's arguments into what the attention kernels take, and the variants for any
 * GPU: of 16-bit inputs on the tensor cores, of f32 on the f32 cores. */
#include "attend/any.cuh"
#include "attend/backward/params.cuh"
#include "common/tail.cuh"
#include "variants.cuh"

#include <math.h>
#include <stdio.h>

attend_launch attend_launch_of(const attend_args *args)
{
    attend_launch l = {};
    attend_kernel &a = l.kernel;
    a.sq = seqs_of(args->seqs);
    a.q = view4_of(args->q);
    a.k = view4_of(args->k);
    a.v = view4_of(args->v);
    a.o = view4_of(args->o);
    a.d_o = view4_of(args->d_o);
    a.d_q = view4_of(args->d_q);
    a.d_k = view4_of(args->d_k);
    a.d_v = view4_of(args->d_v);
    a.lse = view3_of(args->lse);
    a.delta = view3_of(args->delta);
    a.row_scale = view3_of(args->row_scale);
    a.heads = (int32_t)args->q.shape[2];
    a.kv_heads = (int32_t)args->k.shape[2];
    a.group = a.kv_heads > 0 ? a.heads / a.kv_heads : 1;
    l.listed = present(args->list);
    const bool by_head = l.listed && args->scope == LIST_BY_HEAD;
    a.hs = by_head ? 1 : a.group;
    a.units = by_head ? a.heads : a.kv_heads;
    a.dim_k = (int32_t)args->q.shape[3];
    a.dim_v = (int32_t)args->v.shape[3];
    a.scale = args->scale;
    a.scale_log2 = args->scale * 1.4426950408889634f;
    a.mask = args->mask;
    a.causal = args->causal;
    a.visibility = args->visibility;
    a.window = args->window;
    a.query_offset = args->query_offset;
    a.block_size = args->block_size;
    a.stride = args->stride;
    if (l.listed) {
        a.list = (const int32_t *)args->list.data;
        for (int i = 0; i < 3; i++) a.list_stride[i] = args->list.strides[i];
        a.list_k = (int32_t)args->list.shape[3];
        a.list_block = args->mask == ATTEND_COMPRESSED ? 128 : (int32_t)args->block_size;
    }
    a.tile = args->tile > 0 ? (int32_t)args->tile : 1;
    a.by_hs = fast_div_by((uint32_t)(a.hs > 0 ? a.hs : 1));
    a.by_block = fast_div_by((uint32_t)(a.list_block > 0 ? a.list_block : 1));
    a.by_tile_rows = fast_div_by((uint32_t)(a.hs > 0 ? a.hs : 1) * (uint32_t)a.tile);
    a.vec_q = rows_aligned16(args->q);
    a.vec_k = rows_aligned16(args->k);
    a.vec_v = rows_aligned16(args->v);
    a.vec_o = rows_aligned16(args->o);
    a.vec_do = rows_aligned16(args->d_o);
    a.f32_dq = args->d_q.dtype == QUERN_F32;
    a.f32_dkv = args->d_k.dtype == QUERN_F32;
    a.add_q = args->accumulate_q;
    a.add_k = args->accumulate_k;
    a.add_v = args->accumulate_v;
    l.dtype = args->q.dtype;
    const int dim = a.dim_k > a.dim_v ? a.dim_k : a.dim_v;
    l.dim = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
    return l;
}

static bool listed_fits(const attend_args *args, char why[STAGE_WHY_BYTES])
{
    if (present(args->list) && args->list.shape[3] > 1024) {
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld entries: the cuda backend takes up to 1024",
                 (long long)args->list.shape[3]);
        return false;
    }
    const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    if (present(args->list) && args->list.shape[3] * block > INT32_MAX / 2) {
        snprintf(why, STAGE_WHY_BYTES,
                 "lists of %lld blocks of %lld keys: the cuda backend takes up to 2^30 keys a list",
                 (long long)args->list.shape[3], (long long)block);
        return false;
    }
    return true;
}

/* The limits of all kernels. */
static bool limits_fit(const attend_args *args, char why[STAGE_WHY_BYTES])
{
    if (!dims_fit(args->q.shape[3], args->v.shape[3], why)) return false;
    if (args->k.shape[2] > 0 && args->seqs.n_q > INT32_MAX / (args->q.shape[2] / args->k.shape[2] + 1)) {
        snprintf(why, STAGE_WHY_BYTES,
                 "%lld queries of %lld heads a group: the cuda backend takes up to 2^31 rows a group",
                 (long long)args->seqs.n_q, (long long)(args->q.shape[2] / args->k.shape[2]));
        return false;
    }
    return listed_fits(args, why);
}

bool attend_fits(const attend_args *args, char why[STAGE_WHY_BYTES])
{
    if (!present(args->kv_first) && !present(args->kv_count)) return limits_fit(args, why);
    snprintf(why, STAGE_WHY_BYTES, "%s is given: the cuda backend's backward takes none so far",
             present(args->kv_first) ? "kv_first" : "kv_count");
    return false;
}

bool attend_parts_fit(const stage_exec *exec, const attend_args *args, attend_launch *l, attend_part *first,
                      attend_part *second, char why[STAGE_WHY_BYTES])
{
    size_t most = 0;
    const launcher note = {NULL, &most};
    l->kernel.splits = 1; /* of a grid that is only asked for its blocks' memory */
    if (first(args, *l, note) != QUERN_OK || (second != NULL && second(args, *l, note) != QUERN_OK))
        return false;
    return shared_fits(exec, most, second != NULL ? "attention's backward" : "attention's forward", why);
}

/* ---- the forward ---- */

quern_status attend_end(const stage_exec *exec, const attend_args *args)
{
    const quern_status status = fill_tail(exec, &args->seqs, true, &args->o, 0.0f);
    return status != QUERN_OK ? status : fill_tail_stat(exec, &args->seqs, &args->lse, -INFINITY);
}

quern_status attend_forward_by(const stage_exec *exec, const attend_args *args, const attend_launch &l,
                               attend_part *part)
{
    const quern_status status = part(args, l, {(cudaStream_t)exec->stream, NULL});
    return status != QUERN_OK ? status : attend_end(exec, args);
}

static attend_part *forward_of(const attend_launch &l)
{
    static attend_part *const parts[2][3] = {
        {attend_forward_bf16_64, attend_forward_bf16_128, attend_forward_bf16_256},
        {attend_forward_f16_64, attend_forward_f16_128, attend_forward_f16_256}};
    static attend_part *const f32[3] = {attend_forward_f32_64, attend_forward_f32_128,
                                        attend_forward_f32_256};
    return l.dtype == QUERN_F32 ? part_of(l, f32) : part_of(l, parts);
}

static bool attend_forward_any_supports(const stage_exec *exec, const attend_args *args,
                                        char why[STAGE_WHY_BYTES])
{
    if (args->q.dtype == QUERN_F32 || !limits_fit(args, why)) return false;
    attend_launch l = attend_launch_of(args);
    return attend_parts_fit(exec, args, &l, forward_of(l), NULL, why);
}

static bool attend_forward_f32_supports(const stage_exec *exec, const attend_args *args,
                                        char why[STAGE_WHY_BYTES])
{
    if (args->q.dtype != QUERN_F32 || !limits_fit(args, why)) return false;
    attend_launch l = attend_launch_of(args);
    return attend_parts_fit(exec, args, &l, forward_of(l), NULL, why);
}

static quern_status attend_forward_any_run(const stage_exec *exec, const attend_args *args, void *)
{
    const attend_launch l = attend_launch_of(args);
    return attend_forward_by(exec, args, l, forward_of(l));
}

static quern_status attend_forward_f32_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    return attend_forward_any_run(exec, args, workspace);
}

/* ---- the backward ---- */

quern_status backward_begin(const stage_exec *exec, const attend_args *args, int keys, void *workspace,
                            attend_launch *l)
{
    *l = attend_launch_of(args);
    quern_status status = attend_backward_delta(args, *l, (cudaStream_t)exec->stream);
    if (status == QUERN_OK && l->listed) status = inverse_build(exec, args, &l->kernel, workspace);
    char *const shares = (char *)workspace + (l->listed ? inverse_workspace(args) : 0);
    l->kernel.part = (float *)(((uintptr_t)shares + 15) & ~(uintptr_t)15);
    l->keys = keys;
    l->kernel.splits = backward_splits(args, keys);
    return status;
}

static quern_status fill_tails(const stage_exec *exec, const attend_args *args)
{
    quern_status status = QUERN_OK;
    if (!args->accumulate_q) status = fill_tail(exec, &args->seqs, true, &args->d_q, 0.0f);
    if (status == QUERN_OK && !args->accumulate_k)
        status = fill_tail(exec, &args->seqs, false, &args->d_k, 0.0f);
    if (status == QUERN_OK && !args->accumulate_v)
        status = fill_tail(exec, &args->seqs, false, &args->d_v, 0.0f);
    return status;
}

quern_status backward_end(const stage_exec *exec, const attend_args *args, const attend_launch &l)
{
    const quern_status status = backward_sum_shares(args, l, (cudaStream_t)exec->stream);
    return status != QUERN_OK ? status : fill_tails(exec, args);
}

quern_status attend_backward_by(const stage_exec *exec, const attend_args *args, void *workspace,
                                attend_part *rows, attend_part *keys)
{
    attend_launch l;
    const launcher to = {(cudaStream_t)exec->stream, NULL};
    quern_status status = backward_begin(exec, args, backward_keys(args), workspace, &l);
    if (status == QUERN_OK) status = rows(args, l, to);
    if (status == QUERN_OK) status = keys(args, l, to);
    return status != QUERN_OK ? status : backward_end(exec, args, l);
}

static attend_part *rows_of(const attend_launch &l)
{
    static attend_part *const parts[2][3] = {
        {attend_rows_bf16_64, attend_rows_bf16_128, attend_rows_bf16_256},
        {attend_rows_f16_64, attend_rows_f16_128, attend_rows_f16_256}};
    return part_of(l, parts);
}

static attend_part *keys_of(const attend_launch &l)
{
    static attend_part *const parts[2][3] = {
        {attend_keys_bf16_64, attend_keys_bf16_128, attend_keys_bf16_256},
        {attend_keys_f16_64, attend_keys_f16_128, attend_keys_f16_256}};
    return part_of(l, parts);
}

size_t attend_backward_any_bytes(const stage_exec *, const attend_args *args)
{
    if (args->q.dtype == QUERN_F32) return 0;
    return (present(args->list) ? inverse_workspace(args) : 0) +
           backward_shares_bytes(args, backward_keys(args));
}

static bool attend_backward_any_supports(const stage_exec *exec, const attend_args *args,
                                         char why[STAGE_WHY_BYTES])
{
    if (args->q.dtype == QUERN_F32 || !attend_fits(args, why)) return false;
    attend_launch l = attend_launch_of(args);
    return attend_parts_fit(exec, args, &l, rows_of(l), keys_of(l), why);
}

static quern_status attend_backward_any_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    const attend_launch l = attend_launch_of(args);
    return attend_backward_by(exec, args, workspace, rows_of(l), keys_of(l));
}

static attend_part *f32_of(const attend_launch &l)
{
    static attend_part *const parts[3] = {attend_backward_f32_64, attend_backward_f32_128,
                                          attend_backward_f32_256};
    return part_of(l, parts);
}

static size_t attend_backward_f32_bytes(const stage_exec *, const attend_args *args)
{
    const int64_t *q = args->q.shape;
    if (args->q.dtype != QUERN_F32) return 0;
    return (present(args->list) ? inverse_workspace(args) : 0) +
           (size_t)(q[0] * q[1] * q[2]) * sizeof(float2) + 7;
}

static bool attend_backward_f32_supports(const stage_exec *exec, const attend_args *args,
                                         char why[STAGE_WHY_BYTES])
{
    if (args->q.dtype != QUERN_F32 || !attend_fits(args, why)) return false;
    attend_launch l = attend_launch_of(args);
    return attend_parts_fit(exec, args, &l, f32_of(l), f32_of(l), why);
}

static quern_status attend_backward_f32_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    attend_launch l = attend_launch_of(args);
    quern_status status = attend_backward_delta(args, l, (cudaStream_t)exec->stream);
    if (status == QUERN_OK && l.listed) status = inverse_build(exec, args, &l.kernel, workspace);
    char *const norm = (char *)workspace + (l.listed ? inverse_workspace(args) : 0);
    l.norm = (float2 *)(((uintptr_t)norm + 7) & ~(uintptr_t)7);
    if (status == QUERN_OK) status = f32_of(l)(args, l, {(cudaStream_t)exec->stream, NULL});
    return status != QUERN_OK ? status : fill_tails(exec, args);
}

extern const variant<attend_args> attend_forward_any = {"attend_forward_any", attend_forward_any_supports,
                                                        NULL, attend_forward_any_run};
extern const variant<attend_args> attend_forward_f32 = {"attend_forward_f32", attend_forward_f32_supports,
                                                        NULL, attend_forward_f32_run};
extern const variant<attend_args> attend_backward_any = {"attend_backward_any", attend_backward_any_supports,
                                                         attend_backward_any_bytes, attend_backward_any_run};
extern const variant<attend_args> attend_backward_f32 = {"attend_backward_f32", attend_backward_f32_supports,
                                                         attend_backward_f32_bytes, attend_backward_f32_run};
