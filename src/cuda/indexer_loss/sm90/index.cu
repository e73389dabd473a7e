/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.cu - the inverted index of a slice's lists, a bit for each query that chose an entry, and the sums
 * of an entry's rows of partials, a warp an entry; the last slice's are rounded. Where an entry's places
 * begin depends on the order of blocks; no value does. Limit: reads. */
#include "common/scan.cuh"
#include "indexer_loss/losses.cuh"
#include "indexer_loss/sm90/params.cuh"

namespace sm90_loss
{

enum { WARPS = LOSS_WARPS, AT_ONCE = 8, CHOOSING = 1024, CHOSEN_AT_ONCE = 16 };
enum { RANGE = 4096, RANKED = 128, RANKED_WORDS = 16 };

/* A block a word of 32 queries and RANGE entries, a warp a query: bits are made in shared memory. */
__global__ void __launch_bounds__(CHOOSING) loss_choose_rows(const __grid_constant__ slice s)
{
    __shared__ uint32_t chose[RANGE];
    const int first = (int)blockIdx.y * RANGE, query = threadIdx.x / 32,
              range = (int)min((int64_t)RANGE, s.of.entries - first);
    const int64_t word = blockIdx.x, i = word * 32 + query;
    const int32_t *const chosen = chosen_of(s, i);
    const int count = entries_of(s, i);
    for (int at = threadIdx.x; at < range; at += CHOOSING) chose[at] = 0;
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *s.taken = 0;
    __syncthreads();
    for (int from = threadIdx.x % 32; from < count; from += 32 * CHOSEN_AT_ONCE) {
        int entry[CHOSEN_AT_ONCE];
#pragma unroll
        for (int j = 0; j < CHOSEN_AT_ONCE; j++)
            entry[j] = from + j * 32 < count ? chosen[from + j * 32] - first : -1;
#pragma unroll
        for (int j = 0; j < CHOSEN_AT_ONCE; j++)
            if (entry[j] >= 0 && entry[j] < range) atomicOr(&chose[entry[j]], 1u << query);
    }
    __syncthreads();
    choice *const to = s.choices + word * s.of.entries + first;
    for (int at = threadIdx.x; at < range; at += CHOOSING) to[at] = {chose[at], 0};
}

/* A thread an entry. The block takes the places of all of its entries at once: thousands of additions to one
 * number would follow one another. */
__global__ void __launch_bounds__(RANKED) loss_rank_rows(const __grid_constant__ slice s)
{
    __shared__ int rows[RANKED / 32], first;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t entry = (int64_t)blockIdx.x * RANKED + threadIdx.x;
    int own = 0;
    if (entry < s.of.entries) {
        choice *const words = s.choices + entry;
        for (int64_t word = 0; word < s.words; word += RANKED_WORDS) {
            uint32_t chose[RANKED_WORDS];
#pragma unroll
            for (int i = 0; i < RANKED_WORDS; i++)
                chose[i] = word + i < s.words ? words[(word + i) * s.of.entries].chose : 0;
#pragma unroll
            for (int i = 0; i < RANKED_WORDS; i++) {
                if (word + i < s.words) words[(word + i) * s.of.entries].before = own;
                own += __popc(chose[i]);
            }
        }
    }
    const int sum = sum_to_lane(own);
    if (lane == 31) rows[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int i = 0; i < RANKED / 32; i++) {
        before += i < warp ? rows[i] : 0;
        all += rows[i];
    }
    if (threadIdx.x == 0) first = atomicAdd(s.taken, all);
    __syncthreads();
    if (entry < s.of.entries) s.rows_before[entry] = first + before + sum - own;
}

quern_status index_lists(const slice &s, cudaStream_t stream)
{
    const dim3 grid((unsigned)s.words, blocks_for(s.of.entries, RANGE));
    loss_choose_rows<<<grid, CHOOSING, 0, stream>>>(s);
    const quern_status status = LAUNCHED("indexer_loss, choices of queries");
    if (status != QUERN_OK) return status;
    loss_rank_rows<<<blocks_for(s.of.entries, RANKED), RANKED, 0, stream>>>(s);
    return LAUNCHED("indexer_loss, ranks of choices");
}

/* Half a warp reads a row; the first half those of even numbers. */
__global__ void __launch_bounds__(WARPS * 32) loss_sum_rows(const __grid_constant__ slice s)
{
    const int64_t entry = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, column = lane % 16 * 8;
    if (s.gives_loss && blockIdx.x == gridDim.x - 1) {
        sum_losses(s.of, 0);
        return;
    }
    if (entry >= s.of.entries) return;
    const choice last = s.choices[(s.words - 1) * s.of.entries + entry];
    const int count = last.before + __popc(last.chose);
    const int32_t *const places = s.places + s.rows_before[entry];
    const bf16 *const rows = s.partials + column;
    float sum[8] = {};
    for (int i = lane / 16; i < count; i += 2 * AT_ONCE) {
        int place[AT_ONCE];
        uint4 part[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) place[j] = i + j * 2 < count ? __ldg(places + i + j * 2) : -1;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            part[j] = place[j] >= 0 ? __ldcs((const uint4 *)(rows + (int64_t)place[j] * WIDTH))
                                    : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const uint32_t words[4] = {part[j].x, part[j].y, part[j].z, part[j].w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float2 x = unpack2<bf16>(words[k]);
                sum[k * 2] += x.x;
                sum[k * 2 + 1] += x.y;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) sum[k] += __shfl_xor_sync(~0u, sum[k], 16);
    if (lane >= 16 || column >= s.of.width) return;
    float *const kept = s.sums + entry * s.of.width + column;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (s.adds) sum[k] += kept[k];
        if (!s.last) kept[k] = sum[k];
    }
    if (!s.last) return;
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; k++) words[k] = pack2<bf16>(sum[k * 2], sum[k * 2 + 1]);
    store_eight((bf16 *)s.of.d_keys_index.p + s.b * s.of.d_keys_index.s[0] + entry * s.of.d_keys_index.s[1] +
                    column,
                words, s.d_keys_wide);
}

quern_status sum_rows(const slice &s, cudaStream_t stream)
{
    loss_sum_rows<<<blocks_for(s.of.entries, WARPS) + s.gives_loss, WARPS * 32, 0, stream>>>(s);
    return LAUNCHED("indexer_loss, sums of partials");
}

} // namespace sm90_loss
