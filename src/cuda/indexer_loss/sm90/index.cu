/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.cu - the inverted index of a slice's lists, a bit for each query that chose an entry, and the sums
 * of an entry's rows of partials, a warp an entry; the last slice's are rounded. Where an entry's rows begin
 * depends on the order of blocks; no value does. Limit: reads. */
#include "common/scan.cuh"
#include "indexer_loss/losses.cuh"
#include "indexer_loss/sm90/params.cuh"

namespace sm90_loss
{

enum { WARPS = LOSS_WARPS, AT_ONCE = 4, RANKED = 32 };

__global__ void __launch_bounds__(128) loss_choose_rows(const __grid_constant__ slice s)
{
    const int64_t i = blockIdx.x;
    const int32_t *const chosen = chosen_of(s, i);
    const int count = entries_of(s, i);
    for (int at = threadIdx.x; at < count; at += 128)
        atomicOr(&s.choices[chosen[at] * s.words + i / 32].chose, 1u << i % 32);
}

/* A warp an entry. The block takes the rows of all of its entries at once: thousands of additions to one
 * number would follow one another. */
__global__ void __launch_bounds__(RANKED * 32) loss_rank_rows(const __grid_constant__ slice s)
{
    __shared__ int rows[RANKED];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t entry = (int64_t)blockIdx.x * RANKED + warp;
    const int own = entry < s.of.entries ? rank_choices(s.choices + entry * s.words, s.words) : 0;
    if (lane == 0) rows[warp] = own;
    __syncthreads();
    if (warp > 0) return;
    const int sum = sum_to_lane(rows[lane]);
    int first = lane == 31 && sum > 0 ? atomicAdd(s.taken, sum) : 0;
    first = __shfl_sync(~0u, first, 31);
    if (entry + lane < s.of.entries) s.rows_before[entry + lane] = first + sum - rows[lane];
}

quern_status index_lists(const slice &s, cudaStream_t stream)
{
    const cudaError_t code = cudaMemsetAsync(s.choices, 0, cleared_bytes(s), stream);
    if (code != cudaSuccess) return cuda_report(code, "indexer_loss, clearing choices");
    loss_choose_rows<<<(unsigned)s.count, 128, 0, stream>>>(s);
    const quern_status status = LAUNCHED("indexer_loss, choices of queries");
    if (status != QUERN_OK) return status;
    loss_rank_rows<<<blocks_for(s.of.entries, RANKED), RANKED * 32, 0, stream>>>(s);
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
    const choice last = s.choices[entry * s.words + s.words - 1];
    const int count = last.before + __popc(last.chose);
    const bf16 *const rows = s.partials + (int64_t)s.rows_before[entry] * WIDTH + column;
    float sum[8] = {};
    for (int i = lane / 16; i < count; i += 2 * AT_ONCE) {
        uint4 part[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            part[j] = i + j * 2 < count ? __ldcs((const uint4 *)(rows + (int64_t)(i + j * 2) * WIDTH))
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
