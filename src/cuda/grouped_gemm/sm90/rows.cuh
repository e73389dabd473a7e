/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * rows.cuh - the grouped product of many tokens by repacked weights, with tokens as the products' rows: tiles
 * of 256 tokens and EIGHTS times eight columns, for widths that pairs of panels divide badly: N 288 is two
 * tiles of 144.
 *
 *   feed      one thread copies tokens and the panels that have a tile's columns, a unit of 64 of K a stage
 *   decode    six warps of two warpgroups, half of 16 columns' unit a turn, to rows of 64 in shared memory;
 *             they also tell what a tile's columns are multiplied by
 *   multiply  two warpgroups of 128 tokens: both operands from shared memory
 *
 * Registers: EIGHTS * 8 accumulators. Limit: a unit takes 64 EIGHTS clocks of products, and of shared memory
 * 54 EIGHTS + 340.
 */
#ifndef QUERN_CUDA_SM90_GROUPED_GEMM_ROWS_CUH
#define QUERN_CUDA_SM90_GROUPED_GEMM_ROWS_CUH

#include "grouped_gemm/sm90/feed.cuh"
#include "grouped_gemm/sm90/store_rows.cuh"
#include "hopper/epilogue.cuh"

namespace sm90_gemm
{

enum {
    ROWS_TOKENS = 256,
    ROWS_DECODERS = 6, /* warps: of two neighbours each has half of a unit's K */
    ROWS_AT_ONCE = ROWS_DECODERS / 2 /* sixteens of columns */
};

template <int EIGHTS> struct rows_form {
    static_assert(EIGHTS % 2 == 0, "weights are decoded by 16 columns");
    enum {
        COLUMNS = EIGHTS * 8,
        SIXTEENS = EIGHTS / 2,
        PANELS = 3,                   /* at most, that have a tile's columns */
        PARTS = ROWS_TOKENS / 2 / 64, /* products of a warpgroup */
        THREADS = 512,
        STAGES = EIGHTS > 18 ? 3 : 4, /* of tokens: products hold two */
        DECODED_STAGES = 3,           /* of weights: likewise */
        UNIT_STAGES = 6 - STAGES,     /* of weights as they are packed */
        FEED_REGISTERS = 40,
        MULTIPLY_REGISTERS = 216
    };
};

template <int EIGHTS> struct rows_shared {
    typedef rows_form<EIGHTS> f;
    char a[f::STAGES][ROWS_TOKENS * 128]; /* first, and then b: tiles are aligned to 1024 bytes */
    char b[f::DECODED_STAGES][f::COLUMNS * 128];
    char units[f::UNIT_STAGES][f::PANELS][1][UNIT_BYTES];
    column_table<EIGHTS> columns[2];
    char out[8][2][STORE_BYTES]; /* a warp's results on their way to C */
    ring<f::STAGES> tokens;
    ring<f::DECODED_STAGES> decoded;
    ring<f::UNIT_STAGES> packed;
    ring<2> table; /* of columns */
    tile_list tiles;
};

/* One thread. */
template <int EIGHTS>
__device__ __forceinline__ void feed_rows(const gemm_params &p, const CUtensorMap &a, rows_shared<EIGHTS> &m)
{
    typedef rows_form<EIGHTS> f;
    ring_place<f::STAGES> tokens;
    ring_place<f::UNIT_STAGES> at;
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, ROWS_TOKENS, 1);
        const int sixteen = t.panel * f::SIXTEENS, panel = sixteen / 4,
                  panels = min((sixteen + f::SIXTEENS + 3) / 4, p.panels) - panel;
        for (int part = 0, column = 0; part < p.parts; part++)
            for (int unit = 0; unit < p.units; unit++, column += UNIT) {
                m.packed.wait_free(at);
                uint32_t bar = m.packed.expect(at, (uint32_t)(panels * UNIT_BYTES));
                for (int g = 0; g < panels; g++)
                    copy_weights(p, m.units[at.stage][g], t.expert, panel + g, {unit, 1, column}, bar);
                at.advance();
                m.tokens.wait_free(tokens);
                bar = m.tokens.expect(tokens, ROWS_TOKENS * 128);
                tma_load(smem_address(m.a[tokens.stage]), a, bar, column, 0, (int)t.row0, 0);
                tokens.advance();
            }
    }
}

/* Decodes half of the K of every ROWS_AT_ONCE-th 16 columns of a tile; warp number `first`. What it reads of
 * a unit is loaded before any is stored: a load behind a store waits for it. A fragment's matrices of 8 x 8
 * are stored as they are. */
template <typename T, int EIGHTS>
__device__ __forceinline__ void decode_rows(const gemm_params &p, rows_shared<EIGHTS> &m, int first)
{
    typedef rows_form<EIGHTS> f;
    enum { OWN = (f::SIXTEENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE };
    const int lane = threadIdx.x % 32, row = lane / 8 % 2 * 8 + lane % 8, half = first % 2;
    const int32_t tiles = m.tiles.count, steps = p.parts * p.units;
    ring_place<f::UNIT_STAGES> from;
    ring_place<f::DECODED_STAGES> to;
    ring_place<2> table;
    bool ready = false;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, ROWS_TOKENS, 1);
        const int sixteen = t.panel * f::SIXTEENS % 4;
        m.table.wait_free(table);
        fill_columns(m.columns[table.stage], p, t.expert, t.panel * f::COLUMNS, first * 32 + lane,
                     ROWS_DECODERS * 32, [](int) { return weight_scale<T>(); });
        m.table.give(table);
        table.advance();
        for (int step = 0; step < steps; step++) {
            if (!ready) {
                m.packed.wait_full(from);
                m.decoded.wait_free(to);
            }
            uint2 codes[OWN];
            uint32_t scales[OWN];
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int of = sixteen + min(first / 2 + i * ROWS_AT_ONCE, f::SIXTEENS - 1);
                const char *unit = m.units[from.stage][of / 4][0];
                codes[i] = *(const uint2 *)(unit + of % 4 * 512 + lane * 16 + half * 8);
                scales[i] = *(const uint32_t *)(unit + UNIT_CODES + of % 4 * 64 + lane / 4 * 8 + half * 4);
            }
            const uint32_t rows = smem_address(m.b) + to.stage * (f::COLUMNS * 128) + row * 128;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const int of = first / 2 + i * ROWS_AT_ONCE;
                if (i == OWN - 1 && f::SIXTEENS % ROWS_AT_ONCE != 0 && of >= f::SIXTEENS) break;
                uint32_t w[2][4];
                decode_step<T>(w[0], codes[i].x, scales[i], 0);
                decode_step<T>(w[1], codes[i].y, scales[i], 1);
#pragma unroll
                for (int s = 0; s < 2; s++)
                    stmatrix4(rows + of * 2048 + (((half * 4 + s * 2 + lane / 16) ^ (row & 7)) << 4), w[s]);
            }
            const int given = to.stage, back = from.stage;
            from.advance();
            to.advance();
            ready = m.packed.test_full(from) &&
                    mbar_test(smem_address(m.decoded.free) + to.stage * 8, to.parity ^ 1);
            wg_show();
            __syncwarp();
            if (lane == 0) {
                mbar_arrive(smem_address(m.decoded.full) + given * 8);
                m.packed.give_back(back);
            }
        }
    }
}

#define WG_LIST_72 WG_LIST_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WG_LIST_80 WG_LIST_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_TILES_72(c) WG_TILES_64(c), WG4(c[16]), WG4(c[17])
#define WG_TILES_80(c) WG_TILES_72(c), WG4(c[18]), WG4(c[19])

/* C[64][8 EIGHTS] += A[64][16] B[8 EIGHTS][16]^T. */
template <typename T, int EIGHTS>
__device__ __forceinline__ void add_product(float (&c)[EIGHTS][4], uint64_t a, uint64_t b)
{
#ifdef QUERN_WGMMA
    enum { ADD = 1 };
    constexpr bool B16 = __is_same(T, bf16);
    static_assert(EIGHTS == 18 || EIGHTS == 20, "an instance a width");
    if constexpr (EIGHTS == 18 && B16) WG_SS("bf16", 144, 72, 72, 73, 74, 0);
    else if constexpr (EIGHTS == 18) WG_SS("f16", 144, 72, 72, 73, 74, 0);
    else if constexpr (B16) WG_SS("bf16", 160, 80, 80, 81, 82, 0);
    else WG_SS("f16", 160, 80, 80, 81, 82, 0);
#endif
}

/* Where a unit's tokens and weights are. */
template <int EIGHTS> struct row_stages {
    ring_place<rows_form<EIGHTS>::STAGES> tokens;
    ring_place<rows_form<EIGHTS>::DECODED_STAGES> weights;
};

/* A warp gives them back. */
template <int EIGHTS>
__device__ __forceinline__ void give_back_rows(rows_shared<EIGHTS> &m, const row_stages<EIGHTS> &of)
{
    if (threadIdx.x % 32 != 0) return;
    m.tokens.give_back(of.tokens);
    m.decoded.give_back(of.weights);
}

/* The sums of 128 tokens of a tile, those from `first` on. */
template <typename T, int EIGHTS>
__device__ __forceinline__ void sum_rows(float (&c)[rows_form<EIGHTS>::PARTS][EIGHTS][4],
                                         rows_shared<EIGHTS> &m, int steps, int first,
                                         row_stages<EIGHTS> &at)
{
    typedef rows_form<EIGHTS> f;
    bool full = false; /* the stages to come */
    row_stages<EIGHTS> before;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (!full) {
            m.tokens.wait_full(at.tokens);
            m.decoded.wait_full(at.weights);
        }
        const uint64_t tokens = wg_fresh(wg_tile(
                           smem_address(m.a) + at.tokens.stage * (ROWS_TOKENS * 128) + first * 128, 0)),
                       weights = wg_fresh(
                           wg_tile(smem_address(m.b) + at.weights.stage * (f::COLUMNS * 128), 0));
        wg_start();
#pragma unroll
        for (int s = 0; s < UNIT_STEPS; s++)
#pragma unroll
            for (int i = 0; i < f::PARTS; i++)
                add_product<T>(c[i], wg_further(tokens, i * 64 * 128 + s * 32), wg_further(weights, s * 32));
        wg_commit();
        const row_stages<EIGHTS> here = at;
        at.tokens.advance();
        at.weights.advance();
        full = m.tokens.test_full(at.tokens) && m.decoded.test_full(at.weights);
        wg_wait<1>(c[0]);
        if (step > 0) give_back_rows(m, before);
        before = here;
    }
#pragma unroll
    for (int i = 0; i < f::PARTS; i++) wg_wait<0>(c[i]);
    if (steps > 0) give_back_rows(m, before);
}

template <typename T, int EIGHTS>
__device__ __forceinline__ void multiply_by_rows(const gemm_params &p, rows_shared<EIGHTS> &m, int group)
{
    typedef rows_form<EIGHTS> f;
    const int32_t tiles = m.tiles.count;
    row_stages<EIGHTS> at;
    ring_place<2> table;
    for (int32_t tile = before_first(tiles); tile < tiles; tile += gridDim.x) {
        float c[f::PARTS][EIGHTS][4];
#pragma unroll
        for (int i = 0; i < f::PARTS; i++) clear_sums(c[i]);
        sum_rows<T, EIGHTS>(c, m, tile >= 0 ? p.parts * p.units : 0, group * (f::PARTS * 64), at);
        const tile_place t = tile_or_empty(m.tiles, p, tile, ROWS_TOKENS, 1);
        if (tile >= 0) m.table.wait_full(table);
#pragma unroll 1
        for (int i = 0; i < f::PARTS; i++) {
            store_tokens(c[0], p, t, (group * f::PARTS + i) * 64, t.panel * f::COLUMNS,
                         m.columns[table.stage], m.out[threadIdx.x / 32 - 8]);
#pragma unroll
            for (int n = 0; n < EIGHTS; n++)
#pragma unroll
                for (int k = 0; k < 4; k++) c[0][n][k] = c[1][n][k];
        }
        if (tile < 0) continue;
        __syncwarp();
        if (threadIdx.x % 32 == 0) m.table.give_back(table);
        table.advance();
    }
}

template <typename T, int EIGHTS>
__global__ void __launch_bounds__(rows_form<EIGHTS>::THREADS, 1)
    grouped_gemm_sm90_rows(const __grid_constant__ gemm_params p, const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    typedef rows_form<EIGHTS> f;
    extern __shared__ __align__(1024) char memory[];
    rows_shared<EIGHTS> &m = *(rows_shared<EIGHTS> *)memory;
    if (threadIdx.x == 0) {
        tma_prefetch(a);
        m.tokens.init(1, 8);
        m.packed.init(1, ROWS_DECODERS);
        m.decoded.init(ROWS_DECODERS, 8);
        m.table.init(ROWS_DECODERS * 32, 8);
        mbar_init_done();
    }
    make_tiles(m.tiles, p, ROWS_TOKENS, (p.width + f::COLUMNS - 1) / f::COLUMNS, 1);
    finish_tail(m.tiles, p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (role < 2) {
        registers_down<f::FEED_REGISTERS>();
        if (warp > 0 && warp <= ROWS_DECODERS) decode_rows<T>(p, m, warp - 1);
        else if (threadIdx.x == 0) feed_rows(p, a, m);
    } else {
        registers_up<f::MULTIPLY_REGISTERS>();
        multiply_by_rows<T>(p, m, role - 2);
    }
#endif
}

template <typename T, int EIGHTS>
static quern_status launch_rows_kernel(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a)
{
    return launch_shared({(cudaStream_t)exec->stream, NULL}, grouped_gemm_sm90_rows<T, EIGHTS>,
                         dim3((unsigned)exec->multiprocessors), rows_form<EIGHTS>::THREADS,
                         sizeof(rows_shared<EIGHTS>), "grouped_gemm", p, a);
}

} // namespace sm90_gemm

#endif
