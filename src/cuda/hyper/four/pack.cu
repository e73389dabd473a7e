/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* pack.cu - fn in two bf16, in the order in which lanes hold operands: once for the sums over channels
 * (panel.cuh), once for the gradients of the copies (backward.cu). Limit: latency. */
#include "hyper/four/panel.cuh"

enum { THREADS = 256, GROUP = 16, GROUP_WORDS = 12, GROUP_PACK = GROUP_WORDS / 4 * 32 };

/* An operand of 16 rows and 16 channels: rows g and g + 8, channels in the order of panel.cuh. */
__device__ __forceinline__ void pack_sums(const four_params &p, int64_t i)
{
    const int lane = (int)(i % 32), m = (int)(i / 32 % ROW_TILES), s = (int)(i / (32 * ROW_TILES) % STEPS),
              copy = (int)(i / PACK % COPIES);
    const int64_t channel = i / (PACK * COPIES) * DEPTH + lane % 4 * 8 + s * 4;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const int row = m * 16 + w % 2 * 8 + lane / 4;
        const float *const from =
            p.fn + row % WEIGHTS * p.fn_row + (int64_t)copy * p.width + channel + w / 2 * 2;
        words[w] = pack_two(from[0], from[1], row / WEIGHTS);
    }
    p.fn_of_sums[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

/* An operand of 24 weights and 8 channels takes three words of either part: weights 2 q, 2 q + 8, 2 q + 16
 * and the next each. Column g of tile t is channel 4 (g / 2) + 2 t + g % 2, so that a lane's results of two
 * tiles are four channels that follow one another. */
__device__ __forceinline__ void pack_copies(const four_params &p, int64_t i)
{
    const int lane = (int)(i % 32), first = (int)(i / 32 % (GROUP_WORDS / 4)) * 4,
              copy = (int)(i / GROUP_PACK % COPIES), g = lane / 4;
    const int64_t channel0 = i / (GROUP_PACK * COPIES) * GROUP + g / 2 * 4 + g % 2;
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const int tile = (first + w) / 6, kind = (first + w) % 6, j = kind % 3 * 8 + lane % 4 * 2;
        const float *const from = p.fn + j * p.fn_row + (int64_t)copy * p.width + channel0 + tile * 2;
        words[w] = pack_two(from[0], from[p.fn_row], kind / 3);
    }
    p.fn_of_copies[i] = make_uint4(words[0], words[1], words[2], words[3]);
}

__global__ void __launch_bounds__(THREADS) four_pack_fn(const __grid_constant__ four_params p)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  all = (int64_t)p.width / DEPTH * COPIES * PACK;
    static_assert(PACK / DEPTH == GROUP_PACK / GROUP, "both orders have as many words");
    if (i >= all) return;
    if (blockIdx.y == 0) pack_sums(p, i);
    else pack_copies(p, i);
}

quern_status four_pack(const four_params &p, cudaStream_t stream)
{
    const int64_t all = (int64_t)p.width / DEPTH * COPIES * PACK;
    four_pack_fn<<<dim3(blocks_for(all, THREADS), p.fn_of_copies != NULL ? 2 : 1), THREADS, 0, stream>>>(p);
    return LAUNCHED("hyper, fn in two parts");
}
