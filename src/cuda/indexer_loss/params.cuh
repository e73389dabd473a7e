/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - the arguments of the kernels of the indexer's loss. Queries are numbered over the batch. */
#ifndef QUERN_CUDA_INDEXER_LOSS_PARAMS_CUH
#define QUERN_CUDA_INDEXER_LOSS_PARAMS_CUH

#include "common/entry.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/values.cuh"

enum { INDEX_WIDTH_MOST = 128, HEADS_MOST = 128, LOSS_THREADS = 256, LOSS_WARPS = LOSS_THREADS / 32 };

struct loss_params {
    int64_t batch, queries, entries, listed; /* of lists; -1: all entries that are seen */
    int64_t ratio, position;
    int32_t heads, dim, index_heads, width;
    int32_t tile;                  /* entries of a tile */
    int64_t shares, share_queries; /* of a sequence, each with sums of its own of keys_index's gradient */
    float scale, scale_index, lambda;
    bool q_wide, keys_wide, q_index_wide, keys_index_wide; /* rows allow loads of 16 bytes */
    view4 q, keys, q_index, keys_index, w, d_q_index, d_keys_index, d_w;
    quern_dtype w_dtype, dtype; /* dtype: of all the others */
    view3 lse_win, row_loss;
    const float *sink;
    const int32_t *list;
    int64_t list_s[2];
    float *loss;
    int32_t *chosen, *count; /* [queries of all][listed]; [queries of all]; of lists alone */
    uint8_t *kept;           /* as chosen: whether a place is the first of its entry */
    int32_t *rows;           /* queries that have an entry, of lists; NULL: count_rows() of `count` */
    double *losses;          /* [queries of all] */
    float *d_keys;           /* [batch][shares][entries][width], or NULL */
    int32_t *status;
};

__device__ __forceinline__ int64_t seen_by(const loss_params &p, int64_t query)
{
    return min((p.position + query + 1) / p.ratio, p.entries);
}

/* Adds to `rows` how many queries have an entry, of lists; of `threads` threads whole warps call. */
__device__ __forceinline__ void count_rows(const loss_params &p, int32_t *rows, int thread, int threads)
{
    int32_t own = 0;
    for (int64_t i = thread; i < p.batch * p.queries; i += threads) own += p.count[i] > 0;
    own = __reduce_add_sync(~0u, own);
    if (threadIdx.x % 32 == 0) atomicAdd(rows, own);
}

/* A call's arguments but for the workspace, and what lists need of that. */
loss_params loss_params_of(const stage_exec *exec, const indexer_loss_args *args);
void loss_carve(arena *a, loss_params *p);

quern_status loss_choose(const loss_params &p, bool keeps, cudaStream_t stream);
quern_status loss_finish(const loss_params &p, cudaStream_t stream);
/* An instance a dtype. The bytes of shared memory that a block takes. */
template <typename T> size_t loss_bytes(const loss_params &p);
template <typename T> quern_status loss_run(const loss_params &p, cudaStream_t stream);

#endif
