/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lists.cu - what stands before the items of the block indexer's loss: lists ascending, each block once, and
 * the inverted index of a slice, a bit for each query that chose a block. Where a block's entries begin
 * depends on the order of threads; no value does. Limit: reads; of lists k k comparisons each. */
#include "index_loss/params.cuh"

#include "common/rows.cuh"

namespace index_loss
{

static __device__ __forceinline__ bool is_first(const int32_t *list, int64_t e)
{
    for (int64_t i = 0; i < e; i++)
        if (list[i] == list[e]) return false;
    return true;
}

/* How many blocks of a list come before place e's; -1: an earlier place has it. */
static __device__ __forceinline__ int64_t rank_in(const int32_t *list, int64_t k, int64_t e)
{
    int64_t rank = 0;
    if (!is_first(list, e)) return -1;
    for (int64_t i = 0; i < k; i++) rank += list[i] >= 0 && list[i] < list[e] && is_first(list, i);
    return rank;
}

/* A warp a list. */
static __global__ void __launch_bounds__(THREADS) index_loss_choose(const __grid_constant__ params p)
{
    const int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, j = at / p.all, i = at % p.all;
    const int lane = threadIdx.x % 32;
    if (at >= p.lists * p.all) return;
    sequence s;
    int64_t query;
    int32_t count = 0, keys = 0;
    if (query_at(p, i, &s, &query)) {
        const int64_t hi = keys_seen(p, s, query), limit = mask_blocks(hi, p.block_size),
                      all = mask_blocks(s.nk, p.block_size), row = p.sq.cu_q == NULL ? query : i;
        const int32_t *const list = p.list + s.view_b * p.list_s[0] + j * p.list_s[1] + row * p.list_s[2];
        bool ascending = true;
        for (int64_t e = lane; e < p.k; e += 32) {
            const int32_t x = list[e];
            if (x < -1 || x >= all) raise_status(p.status, QUERN_STATUS_BAD_INDEX);
            ascending = ascending && (x < 0 || x >= limit || e == 0 || (list[e - 1] >= 0 && list[e - 1] < x));
        }
        ascending = __all_sync(~0u, ascending);
        for (int64_t e = lane; e < p.k; e += 32) {
            const int32_t x = list[e];
            if (x < 0 || x >= limit) continue;
            const int64_t rank = ascending ? e : rank_in(list, p.k, e), end = (x + 1) * p.block_size;
            if (rank < 0) continue;
            p.chosen[at * p.k + rank] = x;
            count++;
            keys += (int32_t)((end < hi ? end : hi) - x * p.block_size);
        }
    }
    count = __reduce_add_sync(~0u, count);
    keys = __reduce_add_sync(~0u, keys);
    if (lane != 0) return;
    p.count[at] = count;
    p.seen[at] = keys;
}

static __global__ void __launch_bounds__(THREADS) index_loss_rows(const __grid_constant__ params p)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    bool any = false;
    for (int64_t j = 0; i < p.all && j < p.lists; j++) any = any || p.count[j * p.all + i] > 0;
    const int rows = __syncthreads_count(any);
    if (threadIdx.x == 0 && rows > 0) atomicAdd(p.rows, rows);
}

quern_status choose_blocks(const params &p, cudaStream_t stream)
{
    const cudaError_t code = cudaMemsetAsync(p.rows, 0, sizeof *p.rows, stream);
    if (code != cudaSuccess) return cuda_report(code, "index_loss, clearing a counter");
    if (p.lists * p.all == 0) return QUERN_OK;
    index_loss_choose<<<blocks_for(p.lists * p.all, WARPS), THREADS, 0, stream>>>(p);
    index_loss_rows<<<blocks_for(p.all, THREADS), THREADS, 0, stream>>>(p);
    return LAUNCHED("index_loss, lists");
}

/* ---- a slice, by block ---- */

/* Place e of the slice's lists: its query, list and block; false past the list's end. */
struct place {
    int64_t query, list, block;
    int rank;
};
static __device__ __forceinline__ bool place_at(const params &p, int64_t e, place *x)
{
    if (e >= p.lists * p.queries * p.k) return false;
    sequence s;
    int64_t unused;
    x->rank = (int)(e % p.k);
    x->query = e / p.k % p.queries;
    x->list = e / p.k / p.queries;
    const int64_t at = x->list * p.all + p.first + x->query;
    if (x->rank >= p.count[at] || !query_at(p, p.first + x->query, &s, &unused)) return false;
    x->block = x->list * p.blocks + first_block(p, s) + p.chosen[at * p.k + x->rank];
    return true;
}

static __global__ void __launch_bounds__(THREADS) index_loss_mark(const __grid_constant__ params p)
{
    place x;
    if (place_at(p, (int64_t)blockIdx.x * THREADS + threadIdx.x, &x))
        atomicOr(&p.choices[x.block * p.words + x.query / 32].chose, 1u << x.query % 32);
}

static __global__ void __launch_bounds__(THREADS) index_loss_rank(const __grid_constant__ params p)
{
    const int64_t block = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (block >= p.lists * p.blocks) return;
    const int count = rank_choices(p.choices + block * p.words, p.words);
    if (threadIdx.x % 32 != 0) return;
    p.items[block] = count;
    p.start[block] = count > 0 ? atomicAdd(p.taken, count) : 0;
}

static __global__ void __launch_bounds__(THREADS) index_loss_fill(const __grid_constant__ params p)
{
    place x;
    if (!place_at(p, (int64_t)blockIdx.x * THREADS + threadIdx.x, &x)) return;
    const choice here = p.choices[x.block * p.words + x.query / 32];
    const int before = here.before + __popc(here.chose & ((1u << x.query % 32) - 1));
    p.entries[p.start[x.block] + before] = (int32_t)(x.query * p.k + x.rank);
}

quern_status index_slice(const params &p, cudaStream_t stream)
{
    const size_t bytes = (size_t)(p.lists * p.blocks * p.words) * sizeof(choice);
    cudaError_t code = cudaMemsetAsync(p.choices, 0, bytes, stream);
    if (code == cudaSuccess) code = cudaMemsetAsync(p.taken, 0, sizeof *p.taken, stream);
    if (code != cudaSuccess) return cuda_report(code, "index_loss, clearing choices");
    const unsigned places = blocks_for(p.lists * p.queries * p.k, THREADS);
    index_loss_mark<<<places, THREADS, 0, stream>>>(p);
    index_loss_rank<<<blocks_for(p.lists * p.blocks, WARPS), THREADS, 0, stream>>>(p);
    index_loss_fill<<<places, THREADS, 0, stream>>>(p);
    return LAUNCHED("index_loss, choices");
}

} // namespace index_loss
