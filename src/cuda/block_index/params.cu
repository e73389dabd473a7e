/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cu - a call's arguments as the block indexer's kernels take them, and the lists of no query. */
#include "block_index/params.cuh"

static void rows_of(const quern_tensor &t, int64_t (&row)[3])
{
    for (int i = 0; i < 3 && i < t.ndim; i++) row[i] = t.strides[i];
}

block_index_kernel block_index_kernel_of(const block_index_args *args)
{
    block_index_kernel a = {};
    a.sq = seqs_of(args->seqs);
    a.q = view4_of(args->q);
    a.keys = view4_of(args->keys);
    a.units = (int32_t)args->keys.shape[2];
    a.hs = (int32_t)(args->q.shape[2] / args->keys.shape[2]);
    a.dim = (int32_t)args->q.shape[3];
    a.k = (int32_t)args->rule.k;
    a.forced_first = (int32_t)args->rule.forced_first;
    a.forced_local = args->rule.forced_local;
    a.block_size = args->rule.block_size;
    a.query_offset = args->query_offset;
    a.blocks = (int32_t *)args->blocks.data;
    rows_of(args->blocks, a.blocks_row);
    a.list_rows = args->blocks.shape[2];
    a.count = present(args->count) ? (int32_t *)args->count.data : NULL;
    rows_of(args->count, a.count_row);
    a.scores = present(args->scores) ? (float *)args->scores.data : NULL;
    rows_of(args->scores, a.scores_row);
    a.width = present(args->scores) ? args->scores.shape[3] : 0;
    a.by_hs = fast_div_by((uint32_t)a.hs);
    a.wide = rows_aligned16(args->q) && rows_aligned16(args->keys);
    return a;
}

bool block_index_takes(const block_index_args *args, char why[STAGE_WHY_BYTES])
{
    const stage_seqs &s = args->seqs;
    if (!dims_fit(args->q.shape[3], 0, why)) return false;
    const int64_t queries = s.cu_q.data != NULL ? s.n_q + s.batch : s.n_q * s.batch;
    if (args->rule.k <= INT32_MAX / 2 && s.n_kv <= INT32_MAX - 1024 && args->q.shape[2] <= UINT16_MAX &&
        queries <= (INT32_MAX - 1024) / args->q.shape[2])
        return true;
    snprintf(why, STAGE_WHY_BYTES,
             "%lld x %lld queries of %lld lists of %lld blocks: the cuda backend takes 65535 lists and fewer "
             "than 2^31 rows",
             (long long)s.batch, (long long)s.n_q, (long long)args->q.shape[2], (long long)args->rule.k);
    return false;
}

enum { PAD_THREADS = 128, PAD_BLOCKS = 64 };

static __global__ void __launch_bounds__(PAD_THREADS)
    block_index_rest(const __grid_constant__ block_index_kernel a)
{
    const int64_t heads = (int64_t)a.units * a.hs, warps = gridDim.x * (PAD_THREADS / 32),
                  first = cu_seqlens_at(a.sq.cu_q, a.sq.batch, a.sq.n_q);
    const index_contest none = {0, 0, 0, 0, 0};
    for (int64_t i = blockIdx.x * (PAD_THREADS / 32) + threadIdx.x / 32; i < (a.list_rows - first) * heads;
         i += warps)
        index_write_forced(a, none, 0, i % heads, first + i / heads);
}

quern_status block_index_pad(const stage_exec *exec, const block_index_kernel &a)
{
    if (a.sq.cu_q == NULL) return QUERN_OK;
    block_index_rest<<<PAD_BLOCKS, PAD_THREADS, 0, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("block_index: lists of no query");
}
