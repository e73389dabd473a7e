/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.cu - the inverted index of a slice's lists, a bit for each query that chose an entry, and the sums
 * of an entry's rows of partials, a warp an entry. Where an entry's rows begin depends on the order of
 * blocks; no value does. Limit: reads. */
#include "indexer_loss/sm90/params.cuh"

namespace sm90_loss
{

enum { WARPS = 8, AT_ONCE = 4 };

__global__ void __launch_bounds__(128) loss_choose_rows(const __grid_constant__ slice s)
{
    const int64_t i = blockIdx.x;
    const int32_t *const chosen = chosen_of(s, i);
    const int count = entries_of(s, i);
    for (int at = threadIdx.x; at < count; at += 128)
        atomicOr(&s.choices[chosen[at] * s.words + i / 32].chose, 1u << i % 32);
}

__global__ void __launch_bounds__(WARPS * 32) loss_rank_rows(const __grid_constant__ slice s)
{
    const int64_t entry = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (entry >= s.of.entries) return;
    const int before = rank_choices(s.choices + entry * s.words, s.words);
    if (threadIdx.x % 32 == 0) s.rows_before[entry] = before > 0 ? atomicAdd(s.taken, before) : 0;
}

quern_status index_lists(const slice &s, cudaStream_t stream)
{
    const size_t bytes = (size_t)(s.of.entries * s.words) * sizeof(choice);
    cudaError_t code = cudaMemsetAsync(s.choices, 0, bytes, stream);
    if (code == cudaSuccess) code = cudaMemsetAsync(s.taken, 0, sizeof *s.taken, stream);
    if (code != cudaSuccess) return cuda_report(code, "indexer_loss, clearing choices");
    loss_choose_rows<<<(unsigned)s.count, 128, 0, stream>>>(s);
    const quern_status status = LAUNCHED("indexer_loss, choices of queries");
    if (status != QUERN_OK) return status;
    loss_rank_rows<<<blocks_for(s.of.entries, WARPS), WARPS * 32, 0, stream>>>(s);
    return LAUNCHED("indexer_loss, ranks of choices");
}

/* Half a warp reads a row; the first half those of even numbers. */
__global__ void __launch_bounds__(WARPS * 32) loss_sum_rows(const __grid_constant__ slice s)
{
    const int64_t entry = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, column = lane % 16 * 8;
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
    float *const to = s.sums + entry * s.of.width + column;
#pragma unroll
    for (int k = 0; k < 8; k++) to[k] = s.adds ? to[k] + sum[k] : sum[k];
}

quern_status sum_rows(const slice &s, cudaStream_t stream)
{
    loss_sum_rows<<<blocks_for(s.of.entries, WARPS), WARPS * 32, 0, stream>>>(s);
    return LAUNCHED("indexer_loss, sums of partials");
}

} // namespace sm90_loss
