/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * wide.cuh - the grouped product of many tokens by repacked weights: tiles of 128 tokens and PANELS panels,
 * for widths that pairs of panels divide badly: N 288 has five panels, 2880 has 45.
 *
 * The two warpgroups that multiply have three and two panels. A stage is a unit of 64 of K. Weights are
 * decoded twice as often as for 256 tokens: 90 instructions a panel and unit beside 256 clocks of products.
 *
 * Registers: 64 accumulators a panel, and two operands of two products each: one is decoded while the
 * products of the other run.
 */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_WIDE_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_WIDE_CUH

#include "grouped_gemm/sm90/kernel.cuh"

namespace sm90_gemm
{

template <int PANELS> struct wide_form {
    enum {
        LOW = (PANELS + 1) / 2, /* panels of the first warpgroup */
        THREADS = 384,
        STAGES = 200 * 1024 / (WIDE_TOKENS * 128 + PANELS * UNIT_BYTES),
        LOW_REGISTERS = 240,
        HIGH_REGISTERS = 208
    };
};

template <int PANELS> struct wide_shared {
    typedef wide_form<PANELS> f;
    char a[f::STAGES][WIDE_TOKENS * 128]; /* first: tiles are aligned to 1024 bytes */
    char b[f::STAGES][PANELS][1][UNIT_BYTES];
    char out[8][STORE_BYTES]; /* a warp's results on their way to C */
    ring<f::STAGES> stages;
    tile_list tiles;
};

/* One thread. */
template <int PANELS>
__device__ __forceinline__ void feed_wide(const gemm_params &p, const CUtensorMap &a, wide_shared<PANELS> &m)
{
    ring_place<wide_form<PANELS>::STAGES> at;
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, WIDE_TOKENS, PANELS);
        const int panels = min(PANELS, p.panels - t.panel);
        for (int part = 0, column = 0; part < p.parts; part++)
            for (int unit = 0; unit < p.units; unit++, column += UNIT) {
                m.stages.wait_free(at);
                const uint32_t bar = m.stages.expect(at, (uint32_t)(WIDE_TOKENS * 128 + panels * UNIT_BYTES));
                for (int g = 0; g < panels; g++)
                    copy_weights(p, m.b[at.stage][g], t.expert, t.panel + g, {unit, 1, column}, bar);
                tma_load(smem_address(m.a[at.stage]), a, bar, column, 0, (int)t.row0, 0);
                at.advance();
            }
    }
}

/* Half a unit's first operand: two products. */
template <typename T>
__device__ __forceinline__ void decode_half(uint32_t (&w)[2][4], uint32_t first, uint32_t second,
                                            uint32_t scales)
{
    decode_step<T>(w[0], first, scales, 0);
    decode_step<T>(w[1], second, scales, 1);
}

template <typename T>
__device__ __forceinline__ void multiply_half(float (&c)[WIDE_TOKENS / 8][4], const uint32_t (&w)[2][4],
                                              uint64_t tile)
{
    wg_start();
#pragma unroll
    for (int s = 0; s < 2; s++) wgmma_rs<T, WIDE_TOKENS>(c, w[s], wg_further(tile, s * 32));
    wg_commit();
}

/* Sums of EACH panels of a tile, from panel `first` on. */
template <typename T, int PANELS, int EACH>
__device__ __forceinline__ void sum_wide(float (&c)[EACH][WIDE_TOKENS / 8][4], const gemm_params &p,
                                         wide_shared<PANELS> &m, int first,
                                         ring_place<wide_form<PANELS>::STAGES> &at)
{
    const int steps = p.parts * p.units, thread = threadIdx.x % 128;
    ring_place<wide_form<PANELS>::STAGES> before = at;
    uint32_t w[2][2][4];
#pragma unroll
    for (int e = 0; e < EACH; e++) clear_sums(c[e]);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        m.stages.wait_full(at);
        const char *units = m.b[at.stage][first][0];
        const uint64_t tile = wg_fresh(wg_tile(smem_address(m.a) + at.stage * (WIDE_TOKENS * 128), 0));
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const uint4 codes = *(const uint4 *)(units + e * UNIT_BYTES + thread * 16);
            const uint2 scales = *(const uint2 *)(units + e * UNIT_BYTES + UNIT_CODES + thread / 4 * 8);
            decode_half<T>(w[0], codes.x, codes.y, scales.x);
            multiply_half<T>(c[e], w[0], tile);
            wg_wait<1>(c[e]);
            if (e == 0 && step > 0) {
                m.stages.give_back(before);
                before.advance();
            }
            decode_half<T>(w[1], codes.z, codes.w, scales.y);
            multiply_half<T>(c[e], w[1], wg_further(tile, 64));
            wg_wait<1>(c[e]);
        }
        at.advance();
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) wg_wait<0>(c[e]);
    m.stages.give_back(before);
}

template <typename T, int PANELS, int EACH>
__device__ __forceinline__ void multiply_wide(const gemm_params &p, wide_shared<PANELS> &m, int first)
{
    const int32_t tiles = m.tiles.count;
    ring_place<wide_form<PANELS>::STAGES> at;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float c[EACH][WIDE_TOKENS / 8][4];
        char *staged = m.out[threadIdx.x / 32 - 4];
        const tile_place t = tile_at(m.tiles, p, tile, WIDE_TOKENS, PANELS);
        sum_wide<T, PANELS, EACH>(c, p, m, first, at);
#pragma unroll
        for (int e = 0; e < EACH; e++)
            store_tile<WIDE_TOKENS>(c[e], p, t, first + e, staged, {weight_scale<T>(), weight_scale<T>()});
    }
}

template <typename T, int PANELS>
__global__ void __launch_bounds__(wide_form<PANELS>::THREADS, 1)
    grouped_gemm_sm90_wide(const __grid_constant__ gemm_params p, const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    typedef wide_form<PANELS> f;
    extern __shared__ __align__(1024) char memory[];
    wide_shared<PANELS> &m = *(wide_shared<PANELS> *)memory;
    if (threadIdx.x == 0) {
        tma_prefetch(a);
        m.stages.init(1, 256);
        mbar_init_done();
    }
    make_tiles(m.tiles, p, WIDE_TOKENS, p.panels, PANELS);
    finish_tail(m.tiles, p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<FEW_REGISTERS>();
        if (threadIdx.x == 0) feed_wide(p, a, m);
    } else if (role == 1) {
        registers_up<f::LOW_REGISTERS>();
        multiply_wide<T, PANELS, f::LOW>(p, m, 0);
    } else {
        registers_up<f::HIGH_REGISTERS>();
        multiply_wide<T, PANELS, PANELS - f::LOW>(p, m, f::LOW);
    }
#endif
}

template <typename T, int PANELS>
static quern_status launch_wide_kernel(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a)
{
    return launch_shared({(cudaStream_t)exec->stream, NULL}, grouped_gemm_sm90_wide<T, PANELS>,
                         dim3((unsigned)exec->multiprocessors), wide_form<PANELS>::THREADS,
                         sizeof(wide_shared<PANELS>), "grouped_gemm", p, a);
}

} // namespace sm90_gemm

#endif
