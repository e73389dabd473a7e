/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_launch.cu - turns a stage's arguments into what the attention kernels take, and the attention
 * stages themselves: which dtypes and dims run where, and the rows past the last sequence border. */
#include "any/attend/attend_backward.cuh"
#include "common/tail.cuh"
#include "sm90/attend/attend.cuh"
#include "stages.cuh"

#include <math.h>
#include <stdio.h>

attend_launch attend_launch_of(const attend_args *args)
{
    attend_launch l = {};
    attend_kernel &a = l.kernel;
    a.sq = seqs_of(args->seqs);
    a.q = view4_of(args->q), a.k = view4_of(args->k), a.v = view4_of(args->v), a.o = view4_of(args->o);
    a.d_o = view4_of(args->d_o), a.d_q = view4_of(args->d_q), a.d_k = view4_of(args->d_k), a.d_v = view4_of(args->d_v);
    a.lse = view3_of(args->lse), a.delta = view3_of(args->delta), a.row_scale = view3_of(args->row_scale);
    a.heads = (int32_t)args->q.shape[2], a.kv_heads = (int32_t)args->k.shape[2];
    a.group = a.kv_heads > 0 ? a.heads / a.kv_heads : 1;
    l.listed = present(args->list);
    const bool by_head = l.listed && args->scope == LIST_BY_HEAD;
    a.hs = by_head ? 1 : a.group;
    a.units = by_head ? a.heads : a.kv_heads;
    a.dim_k = (int32_t)args->q.shape[3], a.dim_v = (int32_t)args->v.shape[3];
    a.scale = args->scale, a.scale_log2 = args->scale * 1.4426950408889634f;
    a.mask = args->mask, a.causal = args->causal, a.visibility = args->visibility;
    a.window = args->window, a.query_offset = args->query_offset;
    a.block_size = args->block_size, a.stride = args->stride;
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
    a.vec_q = rows_aligned16(args->q), a.vec_k = rows_aligned16(args->k), a.vec_v = rows_aligned16(args->v);
    a.vec_o = rows_aligned16(args->o), a.vec_do = rows_aligned16(args->d_o);
    a.f32_dq = args->d_q.dtype == QUERN_F32, a.f32_dkv = args->d_k.dtype == QUERN_F32;
    a.add_q = args->accumulate_q, a.add_k = args->accumulate_k, a.add_v = args->accumulate_v;
    l.dtype = args->q.dtype;
    const int dim = a.dim_k > a.dim_v ? a.dim_k : a.dim_v;
    l.dim = dim <= 64 ? 64 : dim <= 128 ? 128 : 256;
    return l;
}

static bool listed_fits(const attend_args *args, char why[STAGE_WHY_BYTES])
{
    if (present(args->list) && args->list.shape[3] > 1024) {
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld entries: the cuda backend takes up to 1024", (long long)args->list.shape[3]);
        return false;
    }
    const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    if (present(args->list) && args->list.shape[3] * block > INT32_MAX / 2) {
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld blocks of %lld keys: the cuda backend takes up to 2^30 keys a list",
                 (long long)args->list.shape[3], (long long)block);
        return false;
    }
    return true;
}

static bool shape_fits(const attend_args *args, char why[STAGE_WHY_BYTES])
{
    if (!dims_fit(args->q.shape[3], args->v.shape[3], why)) return false;
    if (args->k.shape[2] > 0 && args->seqs.n_q > INT32_MAX / (args->q.shape[2] / args->k.shape[2] + 1)) {
        snprintf(why, STAGE_WHY_BYTES, "%lld queries of %lld heads a group: the cuda backend takes up to 2^31 rows a group",
                 (long long)args->seqs.n_q, (long long)(args->q.shape[2] / args->k.shape[2]));
        return false;
    }
    return listed_fits(args, why);
}

/* The same for every kernel: what pointers are aligned to is not known yet. */
size_t attend_forward_bytes(const stage_exec *, const attend_args *args) { return args->q.dtype == QUERN_F32 ? 0 : SM90_COUNT_BYTES; }

/* The inverted index, the partial sums of the keys' gradients, what Hopper's kernels need. */
size_t attend_backward_bytes(const stage_exec *, const attend_args *args)
{
    return (present(args->list) ? inverse_workspace(args) : 0) + (args->q.dtype == QUERN_F32 ? 0 : attend_backward_keys_bytes(args) + sm90_attend_backward_bytes(args));
}

static quern_status attend_backward_half(const stage_exec *exec, const attend_args *args, void *workspace, const launcher &to)
{
    attend_launch l = attend_launch_of(args);
    size_t index_bytes = 0;
    if (l.listed && to.most == NULL) {
        const quern_status status = inverse_build(exec, args, &l.kernel, workspace);
        if (status != QUERN_OK) return status;
        index_bytes = inverse_workspace(args);
    }
    char *const sums = (char *)workspace + index_bytes;
    sm90_device device;
    if (to.most != NULL || !sm90_attend_backward_takes(exec, args, &device)) {
        const quern_status status = attend_backward_by_rows(args, l, to);
        return status != QUERN_OK ? status : attend_backward_by_keys(args, l, sums, to, NULL);
    }
    const sm90_backward_call hopper = {device, sums + attend_backward_keys_bytes(args)};
    return attend_backward_by_keys(args, l, sums, to, &hopper);
}

static quern_status attend_forward_launch(const attend_args *args, const launcher &to)
{
    return args->q.dtype == QUERN_F32 ? attend_forward_f32(args, to) : attend_forward_half(args, to);
}

static quern_status attend_backward_launch(const stage_exec *exec, const attend_args *args, void *workspace, const launcher &to)
{
    const quern_status status = attend_backward_delta(args, to);
    if (status != QUERN_OK) return status;
    return args->q.dtype == QUERN_F32 ? attend_backward_f32(exec, args, workspace, to) : attend_backward_half(exec, args, workspace, to);
}

bool attend_forward_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES])
{
    size_t most = 0;
    return shape_fits(args, why) && attend_forward_launch(args, {NULL, &most}) == QUERN_OK && shared_fits(exec, most, "attention's forward", why);
}

bool attend_backward_supports(const stage_exec *exec, const attend_args *args, char why[STAGE_WHY_BYTES])
{
    size_t most = 0;
    return shape_fits(args, why) && attend_backward_launch(exec, args, NULL, {NULL, &most}) == QUERN_OK &&
           shared_fits(exec, most, "attention's backward", why);
}

bool shared_fits(const stage_exec *exec, size_t bytes, const char *what, char why[STAGE_WHY_BYTES])
{
    int offered = 0;
    cudaError_t code = cudaSuccess;
    if (exec->shared_bytes == 0) code = shared_offered(exec->device_id, &offered);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        snprintf(why, STAGE_WHY_BYTES, "cuda:%d, shared memory of a block: %s", exec->device_id, cudaGetErrorString(code));
        return false;
    }
    const size_t limit = exec->shared_bytes > 0 ? exec->shared_bytes : (size_t)offered;
    if (bytes <= limit) return true;
    snprintf(why, STAGE_WHY_BYTES, "%s at this head dim, dtype and list length takes %zu bytes of shared memory a block: cuda:%d offers %zu", what,
             bytes, exec->device_id, limit);
    return false;
}

quern_status attend_forward_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    quern_status status;
    sm90_device device;
    if (sm90_attend_forward_takes(exec, args, &device)) status = sm90_attend_forward(exec, args, device, workspace);
    else status = attend_forward_launch(args, {(cudaStream_t)exec->stream, NULL});
    if (status != QUERN_OK) return status;
    const quern_status tail = fill_tail(exec, &args->seqs, true, &args->o, 0.0f);
    return tail != QUERN_OK ? tail : fill_tail_stat(exec, &args->seqs, &args->lse, -INFINITY);
}

quern_status attend_backward_run(const stage_exec *exec, const attend_args *args, void *workspace)
{
    quern_status status = attend_backward_launch(exec, args, workspace, {(cudaStream_t)exec->stream, NULL});
    if (status == QUERN_OK && !args->accumulate_q) status = fill_tail(exec, &args->seqs, true, &args->d_q, 0.0f);
    if (status == QUERN_OK && !args->accumulate_k) status = fill_tail(exec, &args->seqs, false, &args->d_k, 0.0f);
    if (status == QUERN_OK && !args->accumulate_v) status = fill_tail(exec, &args->seqs, false, &args->d_v, 0.0f);
    return status;
}
