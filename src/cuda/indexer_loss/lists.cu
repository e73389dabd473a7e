/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * lists.cu - what stands before and behind the kernel of the indexer's loss: lists become ascending, each
 * entry once; the losses' sum; the shares of keys_index's gradient added in order. Limit: reads; of lists
 * that are not ascending yet k k comparisons each.
 */
#include "indexer_loss/losses.cuh"

/* A block a query. `keeps`: lists as an indexer gives them, ascending and the rest -1 or not seen yet, are
 * kept as they are. */
__global__ void __launch_bounds__(LOSS_THREADS)
    choose_entries(const __grid_constant__ loss_params p, const bool keeps)
{
    enum { AT_ONCE = 4 }; /* loads of a thread under way */
    __shared__ int32_t count;
    const int64_t at = blockIdx.x, b = at / p.queries, query = at - b * p.queries, seen = seen_by(p, query);
    const int32_t *const list = p.list + b * p.list_s[0] + query * p.list_s[1];
    uint8_t *const kept = p.kept + at * p.listed;
    let_next_start();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    bool ascending = keeps;
    int32_t own = 0;
    for (int64_t from = threadIdx.x; from < p.listed; from += AT_ONCE * LOSS_THREADS) {
        int32_t x[AT_ONCE], before[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t i = from + j * LOSS_THREADS;
            x[j] = i < p.listed ? list[i] : -1;
            before[j] = i < p.listed && i > 0 ? list[i - 1] : -1;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int64_t i = from + j * LOSS_THREADS;
            if (x[j] < -1 || x[j] >= p.entries) raise_status(p.status, QUERN_STATUS_BAD_INDEX);
            if (x[j] < 0 || x[j] >= seen) continue;
            ascending = ascending && (i == 0 || (before[j] >= 0 && before[j] < x[j]));
            p.chosen[at * p.listed + i] = x[j];
            own++;
        }
    }
    ascending = __syncthreads_and(ascending);
    own = __reduce_add_sync(~0u, own);
    if (ascending && threadIdx.x % 32 == 0) atomicAdd(&count, own);
    for (int64_t i = threadIdx.x; !ascending && i < p.listed; i += LOSS_THREADS) {
        const int32_t x = list[i];
        bool first = x >= 0 && x < seen;
        for (int64_t j = 0; first && j < i; j++) first = list[j] != x;
        kept[i] = first;
        if (first) atomicAdd(&count, 1);
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; !ascending && i < p.listed; i += LOSS_THREADS) {
        const int32_t x = list[i];
        int64_t rank = 0;
        if (!kept[i]) continue;
        for (int64_t j = 0; j < p.listed; j++) rank += kept[j] && list[j] < x;
        p.chosen[at * p.listed + rank] = x;
    }
    if (threadIdx.x != 0) return;
    p.count[at] = count;
    if (count > 0 && p.rows != NULL) atomicAdd(p.rows, 1);
}

quern_status loss_choose(const loss_params &p, bool keeps, cudaStream_t stream)
{
    if (p.listed < 0) return QUERN_OK;
    const cudaError_t code =
        p.rows != NULL ? cudaMemsetAsync(p.rows, 0, sizeof *p.rows, stream) : cudaSuccess;
    if (code != cudaSuccess) return cuda_report(code, "indexer_loss, clearing a counter");
    if (p.batch * p.queries == 0) return QUERN_OK;
    choose_entries<<<(unsigned)(p.batch * p.queries), LOSS_THREADS, 0, stream>>>(p, keeps);
    return LAUNCHED("indexer_loss, lists");
}

__global__ void __launch_bounds__(LOSS_THREADS)
    add_losses(const __grid_constant__ loss_params p, int64_t seen)
{
    sum_losses<LOSS_THREADS>(p, seen);
}

__global__ void __launch_bounds__(LOSS_THREADS) add_keys(const __grid_constant__ loss_params p)
{
    const int64_t i = (int64_t)blockIdx.x * LOSS_THREADS + threadIdx.x, each = p.entries * p.width;
    if (i >= p.batch * each) return;
    const int64_t b = i / each, rest = i - b * each, entry = rest / p.width;
    float sum = 0.0f;
    for (int64_t s = 0; s < p.shares; s++) sum += p.d_keys[(b * p.shares + s) * each + rest];
    put_at(p.d_keys_index.p, p.dtype,
           b * p.d_keys_index.s[0] + entry * p.d_keys_index.s[1] + rest - entry * p.width, sum);
}

quern_status loss_finish(const loss_params &p, cudaStream_t stream)
{
    const int64_t blind = p.ratio - p.position - 1, first = blind > 0 ? blind : 0,
                  seen = p.entries > 0 && p.queries > first ? p.batch * (p.queries - first) : 0,
                  all = p.batch * p.entries * p.width;
    if (p.loss != NULL) add_losses<<<1, LOSS_THREADS, 0, stream>>>(p, seen);
    if (p.d_keys_index.p != NULL && all > 0)
        add_keys<<<blocks_for(all, LOSS_THREADS), LOSS_THREADS, 0, stream>>>(p);
    return LAUNCHED("indexer_loss, sums");
}
