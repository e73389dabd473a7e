/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the grouped product for every GPU since sm_80.
 *
 * A block of four warps owns 64 columns of B and 64 tokens of an expert; a warp has 16 of the columns. Tokens
 * are copied by cp.async, two stages of 64 of K; a lane's weights of a stage are 16 bytes, loaded a stage
 * ahead and decoded in registers. Blocks walk the tiles that follow from the offsets. Registers: 32
 * accumulators, 6 for weights.
 *
 * Limit: with few tokens, reading the weights; with many, the tensor cores.
 */
#ifndef QUERN_CUDA_GROUPED_GEMM_ANY_KERNEL_CUH
#define QUERN_CUDA_GROUPED_GEMM_ANY_KERNEL_CUH

#include "grouped_gemm/params.cuh"

namespace any_gemm
{

enum { THREADS = 128, TOKENS = 64, TOKEN_TILES = TOKENS / 8, STAGE_BYTES = TOKENS * 128 };

struct shared {
    char a[2][STAGE_BYTES];
    tile_list tiles;
};

template <typename T>
__device__ __forceinline__ void load_tokens(const gemm_params &p, shared &m, const tile_place &t, int step)
{
    const int unit = step % p.b.units;
    const int64_t column0 = p.parts > 1 ? (int64_t)step * UNIT : (int64_t)unit * UNIT;
    const uint32_t to = smem_address(m.a[step % 2]);
#pragma unroll
    for (int i = 0; i < STAGE_BYTES / 16 / THREADS; i++) {
        const int chunk = i * THREADS + threadIdx.x, row = chunk / 8, column = chunk % 8 * 8;
        const bool here = row < t.rows && unit * UNIT + column < p.b.k;
        const T *from = (const T *)p.a + (here ? (t.row0 + row) * p.a_stride + column0 + column : 0);
        cp_async16(to + tile_at<TOKENS>(row, chunk % 8), from, here);
    }
    cp_async_commit();
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[TOKEN_TILES][4], const unit_part &w, uint32_t tokens)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < UNIT_STEPS; s++) {
        uint32_t a[4];
        decode_step<T>(a, w.codes[s], w.scales[s / 2], s);
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n += 2) {
            uint32_t b[4];
            load_b<TOKENS>(b, tokens, n * 8, s * 16, lane);
            mma16816<T>(c[n], a, b[0], b[1]);
            mma16816<T>(c[n + 1], a, b[2], b[3]);
        }
    }
}

/* low_unit, high_unit: the factors of the sums of a lane's two columns. */
__device__ __forceinline__ void store(const gemm_params &p, const float (&c)[TOKEN_TILES][4],
                                      const tile_place &t, float low_unit, float high_unit)
{
    const int lane = threadIdx.x % 32, column = t.panel * UNIT + threadIdx.x / 32 * 16 + lane / 4;
    const column_terms low = column_terms_of(p, t.expert, column),
                       high = column_terms_of(p, t.expert, column + 8);
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 2; i++) {
        const int token = i / 2 * 8 + lane % 4 * 2 + i % 2;
        if (token >= t.rows) continue;
        const int64_t row = t.row0 + token;
        const float global = a_global_of(p, t.expert, row),
                    x = finished(p, c[i / 2][i % 2], low_unit, global, low),
                    y = finished(p, c[i / 2][i % 2 + 2], high_unit, global, high);
        if (p.swiglu) {
            const int to = t.panel * (UNIT / 2) + threadIdx.x / 32 * 8 + lane / 4;
            if (to < p.b.n / 2) store_any(p.c, p.c_dtype, row * p.c_stride + to, swiglu_of(p.rule, x, y));
            continue;
        }
        if (column < p.b.n) store_any(p.c, p.c_dtype, row * p.c_stride + column, x);
        if (column + 8 < p.b.n) store_any(p.c, p.c_dtype, row * p.c_stride + column + 8, y);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) grouped_gemm_any(const __grid_constant__ gemm_params p)
{
    extern __shared__ __align__(128) char memory[];
    shared &m = *(shared *)memory;
    const int steps = p.parts * p.b.units;
    make_tiles(m.tiles, p, TOKENS, p.b.panels, 1);
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, 1);
        float c[TOKEN_TILES][4] = {};
        unit_part w = {};
        if (steps > 0) {
            load_tokens<T>(p, m, t, 0);
            w = load_part(p.b, t.expert, t.panel, 0);
        }
        for (int step = 0; step < steps; step++) {
            unit_part next = {};
            if (step + 1 < steps) {
                load_tokens<T>(p, m, t, step + 1);
                next = load_part(p.b, t.expert, t.panel, (step + 1) % p.b.units);
                cp_async_wait<1>();
            } else {
                cp_async_wait<0>();
            }
            __syncthreads();
            multiply<T>(c, w, smem_address(m.a[step % 2]));
            __syncthreads();
            w = next;
        }
        store(p, c, t, weight_scale<T>(), weight_scale<T>());
    }
    finish_tail(m.tiles, p);
}

} // namespace any_gemm

#endif
