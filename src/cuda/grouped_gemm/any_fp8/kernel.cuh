/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the grouped product of NVFP4 weights and e4m3 activations for every GPU since sm_80:
 * any/kernel.cuh's tiles, stages and epilogue. Both operands are exact in bf16. A lane decodes its weights as
 * any/kernel.cuh does, divides them by a power of two that a column shares and rounds them to e4m3. Each
 * 128 of K are summed from zero, then added to the sums times A's scale. Accumulators 64 registers.
 *
 * Limit: rounding the weights, 12 instructions each.
 */
#ifndef QUERN_CUDA_GROUPED_GEMM_ANY_FP8_KERNEL_CUH
#define QUERN_CUDA_GROUPED_GEMM_ANY_FP8_KERNEL_CUH

#include "grouped_gemm/any/kernel.cuh"
#include "grouped_gemm/fp8.cuh"

namespace any_gemm
{

/* Two weights over 2^8 to e4m3 numbers; `by`: 2^8 over their column's power of two. */
__device__ __forceinline__ uint32_t rounded_weights(uint32_t x, float by)
{
    const float2 v = unpack2<bf16>(x);
    return pack2<bf16>(e4m3_rounded(v.x * by), e4m3_rounded(v.y * by));
}

__device__ __forceinline__ void multiply_rounded(float (&c)[TOKEN_TILES][4], const unit_part &w,
                                                 uint32_t tokens, const float (&by)[2])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < UNIT_STEPS; s++) {
        uint32_t a[4];
        decode_step<bf16>(a, w.codes[s], w.scales[s / 2], s);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = rounded_weights(a[i], by[i % 2]);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n += 2) {
            uint32_t b[4];
            load_b<TOKENS>(b, tokens, n * 8, s * 16, lane);
            mma16816<bf16>(c[n], a, b[0], b[1]);
            mma16816<bf16>(c[n + 1], a, b[2], b[3]);
        }
    }
}

/* c += scale part, by each token's scale in the group; part becomes 0. */
__device__ __forceinline__ void add_group(float (&c)[TOKEN_TILES][4], float (&part)[TOKEN_TILES][4],
                                          const fp8_params &f, const tile_place &t, int group)
{
    const float *scale = f.row_scale + group * f.scale_stride +
                         scale_place_of(f.p.ends, t.expert, t.row0 - f.p.ends.first_of(t.expert));
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 2; i++) {
        const int q = threadIdx.x % 4, token = i / 2 * 8 + q * 2 + i % 2;
        const float s = token < t.rows ? scale[i / 4 * 16 + q * 4 + i % 4] : 0.0f;
#pragma unroll
        for (int high = 0; high < 4; high += 2) {
            c[i / 2][i % 2 + high] = fmaf(s, part[i / 2][i % 2 + high], c[i / 2][i % 2 + high]);
            part[i / 2][i % 2 + high] = 0.0f;
        }
    }
}

__global__ void __launch_bounds__(THREADS) grouped_gemm_any_fp8(const __grid_constant__ fp8_params f)
{
    extern __shared__ __align__(128) char memory[];
    shared &m = *(shared *)memory;
    const gemm_params &p = f.p;
    make_tiles(m.tiles, p, TOKENS, p.b.panels, 1);
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, 1);
        const int column = t.panel * UNIT + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        const float power[2] = {power_at(f, t.expert, column), power_at(f, t.expert, column + 8)},
                    by[2] = {weight_scale<bf16>() / power[0], weight_scale<bf16>() / power[1]};
        float c[TOKEN_TILES][4] = {}, part[TOKEN_TILES][4] = {};
        unit_part w = {};
        if (p.units > 0) {
            load_tokens<bf16>(p, m, t, 0);
            w = load_part(p.b, t.expert, t.panel, 0);
        }
        for (int unit = 0; unit < p.units; unit++) {
            unit_part next = {};
            if (unit + 1 < p.units) {
                load_tokens<bf16>(p, m, t, unit + 1);
                next = load_part(p.b, t.expert, t.panel, unit + 1);
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            __syncthreads();
            multiply_rounded(part, w, smem_address(m.a[unit % 2]), by);
            __syncthreads();
            if (unit % 2 == 1 || unit + 1 == p.units) add_group(c, part, f, t, unit / 2);
            w = next;
        }
        store(p, c, t, power[0], power[1]);
    }
    finish_tail(m.tiles, p);
}

} // namespace any_gemm

#endif
