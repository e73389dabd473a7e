/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* spread.cu - a varlen batch as one query a row: each row's position, its sequence and the entries that this
 * has, by a warp a row. Limit: latency. */
#include "common/rows.cuh"
#include "indexer/params.cuh"

enum { THREADS = 128, WARPS = THREADS / 32 };

struct spread_kernel {
    const int32_t *cu, *positions;
    int64_t cu_s, positions_s;
    int32_t batch, rows;
    uint32_t ratio;
    int32_t *position, *sequence, *limit;
    int32_t *status;
};

/* The sequence that has row t; -1: none. Equal numbers of rows are found first. */
__device__ __forceinline__ int sequence_of(const spread_kernel &a, int t)
{
    const auto has = [&](int b) {
        return t >= cu_seqlens_at(a.cu, b * a.cu_s, a.rows) &&
               t < cu_seqlens_at(a.cu, (b + 1) * a.cu_s, a.rows);
    };
    const int guess = (int)((int64_t)t * a.batch / a.rows);
    if (guess < a.batch && has(guess)) return guess;
    for (int b0 = 0; b0 < a.batch; b0 += 32) {
        const int b = b0 + (int)threadIdx.x % 32;
        const unsigned found = __ballot_sync(~0u, b < a.batch && has(b));
        if (found != 0) return b0 + __ffs((int)found) - 1;
    }
    return -1;
}

__global__ void __launch_bounds__(THREADS) index_spread(const __grid_constant__ spread_kernel a)
{
    const int t = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    let_next_start();
    if (blockIdx.x == 0 && a.status != NULL)
        for (int b = (int)threadIdx.x; b <= a.batch; b += THREADS) {
            const int32_t end = a.cu[b * a.cu_s], before = b > 0 ? a.cu[(b - 1) * a.cu_s] : 0;
            if (end < before || end > (b > 0 ? a.rows : 0)) raise_status(a.status, QUERN_STATUS_BAD_OFFSETS);
            if (b < a.batch && a.positions[b * a.positions_s] < 0)
                raise_status(a.status, QUERN_STATUS_BAD_POSITION);
        }
    if (t >= a.rows) return;
    const int b = sequence_of(a, t);
    if (threadIdx.x % 32 != 0) return;
    int64_t first = -1, end = -1, position = -1;
    if (b >= 0) {
        first = a.positions[b * a.positions_s];
        position = first + t - cu_seqlens_at(a.cu, b * a.cu_s, a.rows);
        end = first + cu_seqlens_at(a.cu, (b + 1) * a.cu_s, a.rows) - cu_seqlens_at(a.cu, b * a.cu_s, a.rows);
    }
    const bool good = first >= 0 && end <= INT32_MAX;
    a.position[t] = good ? (int32_t)position : -1;
    a.sequence[t] = good ? b : -1;
    a.limit[t] = good ? (int32_t)(end / a.ratio) : 0;
}

size_t index_spread_bytes(const indexer_args *args)
{
    enum { ALIGNMENT = 16 };
    const size_t bytes = present(args->cu) ? 3 * (size_t)args->q.shape[1] * sizeof(int32_t) : 0;
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

quern_status index_spread_rows(const stage_exec *exec, const indexer_args *args, const index_kernel &k)
{
    spread_kernel a = {};
    if (k.sequence == NULL) return QUERN_OK;
    a.cu = (const int32_t *)args->cu.data;
    a.cu_s = args->cu.strides[0];
    a.positions = (const int32_t *)args->positions.data;
    a.positions_s = args->positions.strides[0];
    a.batch = (int32_t)args->cu.shape[0] - 1;
    a.rows = k.batch;
    a.ratio = k.ratio;
    a.position = (int32_t *)k.positions;
    a.sequence = (int32_t *)k.sequence;
    a.limit = (int32_t *)k.limit;
    a.status = exec->status;
    index_spread<<<blocks_for(a.rows, WARPS), THREADS, 0, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("the indexer's rows");
}
