/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * wide.cuh - the grouped product of many tokens by repacked weights: tiles of 128 tokens and PANELS panels,
 * an odd number, for widths that pairs of panels divide badly: N 288 has five panels.
 *
 * The two warpgroups that multiply have half of the tile each: (PANELS - 1) / 2 panels of all tokens, and the
 * last panel of 64 tokens. So neither waits for the other, and both run the same code, which is fetched once.
 * A stage is a unit of 64 of K. Weights are decoded 2.4 times as often as for 256 tokens: 90 instructions a
 * panel and unit beside 256 clocks of products.
 *
 * Registers of PANELS 5: 160 accumulators, two operands of two products each, of which one is decoded while
 * the products of the other run, and the codes of the next panel.
 */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_WIDE_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_WIDE_CUH

#include "grouped_gemm/sm90/kernel.cuh"

namespace sm90_gemm
{

template <int PANELS> struct wide_form {
    static_assert(PANELS % 2 == 1, "the warpgroups share the last panel");
    enum {
        EACH = PANELS / 2,              /* panels of a warpgroup */
        SHARE = WIDE_TOKENS / 2,        /* its tokens of the last panel */
        THREADS = 384,
        STAGES = 200 * 1024 / (WIDE_TOKENS * 128 + PANELS * UNIT_BYTES),
        FEED_REGISTERS = 24,
        MULTIPLY_REGISTERS = 240
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

/* A thread's codes and scales of a unit. */
struct packed_unit {
    uint4 codes;
    uint2 scales;
};
__device__ __forceinline__ packed_unit load_packed(const char *unit)
{
    const int thread = threadIdx.x % 128;
    return {*(const uint4 *)(unit + thread * 16), *(const uint2 *)(unit + UNIT_CODES + thread / 4 * 8)};
}

/* Half a unit's first operand: two products. */
template <typename T>
__device__ __forceinline__ void decode_half(uint32_t (&w)[2][4], uint32_t first, uint32_t second,
                                            uint32_t scales)
{
    decode_step<T>(w[0], first, scales, 0);
    decode_step<T>(w[1], second, scales, 1);
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply_half(float (&c)[TOKENS / 8][4], const uint32_t (&w)[2][4],
                                              uint64_t tile)
{
    wg_start();
#pragma unroll
    for (int s = 0; s < 2; s++) wgmma_rs<T, TOKENS>(c, w[s], wg_further(tile, s * 32));
    wg_commit();
}

/* A warpgroup's sums of a tile. */
template <int PANELS> struct wide_sums {
    float whole[wide_form<PANELS>::EACH][WIDE_TOKENS / 8][4];
    float shared[wide_form<PANELS>::SHARE / 8][4];
};

/* Adds the products of a tile. `first`: the warpgroup's first panel; `half`: which of the last panel's tokens
 * are its own. */
template <typename T, int PANELS>
__device__ __forceinline__ void sum_wide(wide_sums<PANELS> &c, const gemm_params &p, wide_shared<PANELS> &m,
                                         int first, int half, ring_place<wide_form<PANELS>::STAGES> &at)
{
    typedef wide_form<PANELS> f;
    const int steps = p.parts * p.units;
    ring_place<f::STAGES> before = at;
    uint32_t w[2][2][4];
    bool full = false; /* the stage to come */
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (!full) m.stages.wait_full(at);
        const char *units = m.b[at.stage][0][0];
        const uint64_t tile = wg_fresh(wg_tile(smem_address(m.a) + at.stage * (WIDE_TOKENS * 128), 0));
        packed_unit x = load_packed(units + first * UNIT_BYTES);
        at.advance();
#pragma unroll
        for (int e = 0; e <= f::EACH; e++) {
            const int next = e + 1 < f::EACH ? first + e + 1 : PANELS - 1;
            decode_half<T>(w[0], x.codes.x, x.codes.y, x.scales.x);
            if (e < f::EACH) multiply_half<T, WIDE_TOKENS>(c.whole[e < f::EACH ? e : 0], w[0], tile);
            else multiply_half<T, f::SHARE>(c.shared, w[0], wg_further(tile, half * f::SHARE * 128));
            const packed_unit after = e < f::EACH ? load_packed(units + next * UNIT_BYTES) : x;
            if (e == f::EACH) full = m.stages.test_full(at);
            wg_wait<1>(c.shared);
            if (e == 0 && step > 0) {
                m.stages.give_back(before);
                before.advance();
            }
            decode_half<T>(w[1], x.codes.z, x.codes.w, x.scales.y);
            if (e < f::EACH)
                multiply_half<T, WIDE_TOKENS>(c.whole[e < f::EACH ? e : 0], w[1], wg_further(tile, 64));
            else multiply_half<T, f::SHARE>(c.shared, w[1], wg_further(tile, half * f::SHARE * 128 + 64));
            wg_wait<1>(c.shared);
            x = after;
        }
    }
#pragma unroll
    for (int e = 0; e < f::EACH; e++) wg_wait<0>(c.whole[e]);
    wg_wait<0>(c.shared);
    m.stages.give_back(before);
}

/* One copy of the code stores all panels: each is fetched for a tile anew. */
template <int PANELS>
__device__ __forceinline__ void store_wide(wide_sums<PANELS> &c, const gemm_params &p, const tile_place &t,
                                           int first, int half, char *staged, float unit)
{
    typedef wide_form<PANELS> f;
#pragma unroll 1
    for (int e = 0; e < f::EACH; e++) {
        tile_place u = t;
        asm volatile("" : "+l"(u.row0)); /* addresses kept for all panels would take too many registers */
        store_tile<WIDE_TOKENS>(c.whole[0], p, u, first + e, staged, {unit, unit});
#pragma unroll
        for (int i = 0; i + 1 < f::EACH; i++)
#pragma unroll
            for (int n = 0; n < WIDE_TOKENS / 8; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) c.whole[i][n][k] = c.whole[i + 1][n][k];
    }
    store_tile<f::SHARE>(c.shared, p,
                         {t.expert, t.panel, t.rows - half * f::SHARE, t.row0 + half * f::SHARE}, PANELS - 1,
                         staged, {unit, unit});
}

template <typename T, int PANELS>
__device__ __forceinline__ void multiply_wide(const gemm_params &p, wide_shared<PANELS> &m, int half)
{
    const int32_t tiles = m.tiles.count;
    const int first = half * wide_form<PANELS>::EACH;
    ring_place<wide_form<PANELS>::STAGES> at;
    for (int32_t tile = before_first(tiles); tile < tiles; tile += gridDim.x) {
        wide_sums<PANELS> c;
#pragma unroll
        for (int e = 0; e < wide_form<PANELS>::EACH; e++) clear_sums(c.whole[e]);
        clear_sums(c.shared);
        if (tile >= 0) sum_wide<T>(c, p, m, first, half, at);
        store_wide(c, p, tile_or_empty(m.tiles, p, tile, WIDE_TOKENS, PANELS), first, half,
                   m.out[threadIdx.x / 32 - 4], weight_scale<T>());
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
        registers_down<wide_form<PANELS>::FEED_REGISTERS>();
        if (threadIdx.x == 0) feed_wide(p, a, m);
    } else {
        registers_up<wide_form<PANELS>::MULTIPLY_REGISTERS>();
        multiply_wide<T>(p, m, role - 1);
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
