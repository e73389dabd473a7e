/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that fill the stages, decode weights and multiply, and the kernel. */
#ifndef QUERN_CUDA_SM90_FP8_GROUPED_GEMM_KERNEL_CUH
#define QUERN_CUDA_SM90_FP8_GROUPED_GEMM_KERNEL_CUH

#include "grouped_gemm/sm90_fp8/shared.cuh"

namespace sm90_fp8
{

using sm90_gemm::stage_units;

/* ---- tiles ---- */

/* The tiles of a block: those of its cluster, of which it has the tokens from PARTS * PART * rank on. */
template <int PARTS, int SHARE> struct tile_walk {
    typedef form<PARTS, SHARE> f;
    int32_t tiles, first, stride, rank;

    __device__ __forceinline__ tile_walk(const shared<PARTS, SHARE> &m)
        : tiles(m.tiles.count), first((int32_t)blockIdx.x / SHARE), stride((int32_t)gridDim.x / SHARE),
          rank((int32_t)blockIdx.x % SHARE)
    {
    }
    /* `rows` is 0 or less where the block has none: it then multiplies the cluster's first tokens. */
    __device__ __forceinline__ tile_place at(const shared<PARTS, SHARE> &m, const gemm_params &p,
                                             int32_t tile) const
    {
        tile_place t = tile_at(m.tiles, p, tile, f::TOKENS * SHARE, GROUPS);
        if (SHARE > 1 && t.rows > rank * f::TOKENS) t.row0 += rank * f::TOKENS;
        t.rows -= rank * f::TOKENS;
        return t;
    }
};

/* ---- feeding ---- */

/* The units of a step. */
__device__ __forceinline__ stage_units units_at(const gemm_params &p, int step)
{
    return {step * UNITS, min((int)UNITS, p.units - step * UNITS), step * UNITS * UNIT};
}

/* Tokens and their scales; one thread. */
template <int PARTS, int SHARE>
__device__ __forceinline__ void copy_tokens(const fp8_params &f, const CUtensorMap &a,
                                            shared<PARTS, SHARE> &m, const tile_place &t, int64_t scales,
                                            int step, ring_place<form<PARTS, SHARE>::STAGES> &at)
{
    enum { TOKENS = form<PARTS, SHARE>::TOKENS };
    m.tokens.wait_free(at);
    const uint32_t bar = m.tokens.expect(at, TOKENS * (128 + sizeof(float)));
    tma_load(smem_address(m.a[at.stage]), a, bar, step * (FP8_GROUP / 2), 0, (int)t.row0, 0);
    bulk_load(smem_address(m.scale[at.stage]), f.row_scale + step * f.scale_stride + scales,
              TOKENS * sizeof(float), bar);
    at.advance();
}

/* REPACKED: all by one thread. Else weights stand in the caller's layout, or out of line, and each thread of
 * the warpgroup loads a lane's part. Of panels that blocks share each loads its own. */
template <int PARTS, int SHARE, bool REPACKED>
__device__ __forceinline__ void feed(const fp8_params &f, const CUtensorMap &a, shared<PARTS, SHARE> &m)
{
    typedef form<PARTS, SHARE> form;
    const gemm_params &p = f.p;
    const tile_walk<PARTS, SHARE> walk(m);
    ring_place<form::STAGES> tokens;
    ring_place<form::UNIT_STAGES> at;
    for (int32_t tile = walk.first; tile < walk.tiles; tile += walk.stride) {
        const tile_place t = walk.at(m, p, tile);
        const int panel = t.panel + (SHARE > 1 ? walk.rank : 0),
                  panels = max(min((int)form::PANELS, p.panels - panel), 0);
        const int64_t scales = scale_place_of(p.ends, t.expert, t.row0 - p.ends.first_of(t.expert));
        for (int step = 0; step < f.groups; step++) {
            const stage_units u = units_at(p, step);
            m.packed.wait_free(at);
            if (REPACKED) {
                const uint32_t bar = m.packed.expect(at, (uint32_t)(u.count * panels * UNIT_BYTES));
                for (int g = 0; g < panels; g++)
                    sm90_gemm::copy_weights(p, m.units[at.stage][g], t.expert, panel + g, u, bar);
            } else {
                for (int g = 0; g < panels; g++)
#pragma unroll 1
                    for (int i = 0; i < u.count; i++)
                        sm90_gemm::put_part(m.units[at.stage][g][i],
                                            load_part(p.b, t.expert, panel + g, u.unit + i));
                m.packed.give(at);
            }
            at.advance();
            if (REPACKED || threadIdx.x == 0) copy_tokens<PARTS, SHARE>(f, a, m, t, scales, step, tokens);
        }
    }
}

/* ---- weights ---- */

/* 2^104 over a column's power of two. */
__device__ __forceinline__ float factor_of(float power)
{
    return __uint_as_float((358u << 23) - __float_as_uint(power));
}

/* The bytes of magnitudes 0 to 7 of a block's codes, by the byte of its scale, which is 2^120 times a number
 * whose exponent and mantissa it is. */
__device__ __forceinline__ uint2 magnitudes(uint32_t scale, float factor)
{
    const float s = __uint_as_float(scale << 20) * factor; /* over 2^16 */
    return make_uint2(two_e4m3(0.0f, 0x1p15f * s) | two_e4m3(0x1p16f * s, 0x1.8p16f * s) << 16,
                      two_e4m3(0x1p17f * s, 0x1.8p17f * s) | two_e4m3(0x1p18f * s, 0x1.8p18f * s) << 16);
}

/* The bytes that four selectors name, each of three bits with a zero above. */
__device__ __forceinline__ uint32_t permuted(uint32_t low, uint32_t high, uint32_t selectors)
{
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

/* x | (y & MASK) in one operation, which the compiler would not find where two follow one another. */
template <uint32_t MASK> __device__ __forceinline__ uint32_t joined(uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("lop3.b32 %0, %1, %2, %3, 0xf8;" : "=r"(z) : "r"(x), "r"(y), "n"(MASK));
    return z;
}

/* Four weights of a column. Selectors stand in bytes 0 and 2 of `picks`, two a byte. */
__device__ __forceinline__ uint32_t pick(const uint2 &table, uint32_t picks)
{
    return permuted(table.x, table.y, permuted(picks, 0, 0x4420));
}

/* What a thread that decodes reads and writes of its panel: of columns `column` and that + 8 the 16 of K
 * number `block` of each unit. Their codes are in the words `block` of four lanes; in step j a thread
 * takes that of lane j ^ first, so that neither loads nor stores have bank conflicts. */
struct decode_place {
    int codes, scales, shift, rows; /* bytes into a unit, two times; bits; bytes into the rows */
};

__device__ __forceinline__ decode_place decode_place_here()
{
    const int warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, block = threadIdx.x % 4,
              first = (g & 2) | ((g ^ g >> 2) & 1);
    return {(warp * 32 + g * 4 + first) * 16 + block * 4, UNIT_CODES + (warp * 8 + g) * 8 + block / 2 * 4,
            block % 2 * 8, (warp * 16 + g) * 128 + ((block ^ g) << 4) + first * 4};
}

/* A thread's part of a unit as it is packed, and what decodes it. Stores to shared memory keep the compiler
 * from moving loads up, so all that a step reads is loaded before any of it is decoded. */
struct packed_part {
    uint32_t codes[4], scales;
};

__device__ __forceinline__ void load_codes(packed_part &x, const char *unit, const decode_place &at)
{
    x.scales = *(const uint32_t *)(unit + at.scales) >> at.shift;
#pragma unroll
    for (int j = 0; j < 4; j++) x.codes[j] = *(const uint32_t *)(unit + (at.codes ^ j * 16));
}

/* Decodes a unit, the step's number NUMBER: registers 0 and 2 (column) and 1 and 3 (column + 8) of
 * weights.cuh. Of a unit that is none (real false) the codes are taken for zeros. */
template <int NUMBER>
__device__ __forceinline__ void decode_unit(char *rows, const packed_part &unit, float factor, float factor8,
                                            bool real, const decode_place &at)
{
    const uint32_t scales = real ? unit.scales : 0;
    const uint2 table = magnitudes(scales & 0xff, factor), table8 = magnitudes(scales >> 16 & 0xff, factor8);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t x = unit.codes[j];
        uint32_t column = pick(table, x & 0x00770077),
                 column8 = pick(table8, (x >> 10 & 0x00170017) | (x >> 2 & 0x00600060));
        column = joined<0x80008000>(joined<0x00800080>(column, x >> 2), x << 2);
        column8 = joined<0x80008000>(joined<0x00800080>(column8, __funnelshift_r(x, x, 12)), x);
        char *to = rows + (at.rows ^ (NUMBER * 64 + j * 4));
        *(uint32_t *)to = column;
        *(uint32_t *)(to + 8 * 128) = column8;
    }
}

/* `bytes` in a row to another block's shared memory, where `bar` counts them; all multiples of 16. */
__device__ __forceinline__ void bulk_copy(uint32_t to, uint32_t from, uint32_t bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            to),
        "r"(from), "r"(bytes), "r"(bar)
        : "memory");
}
/* An arrival at a barrier of another block, for what this thread's products have read. */
__device__ __forceinline__ void arrive_there(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

/* The place in its panel of a column of this thread; the other is 8 further. */
__device__ __forceinline__ int column_here()
{
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}

/* A warp's arrivals: one for all its lanes. */
__device__ __forceinline__ bool arrives()
{
    __syncwarp();
    return threadIdx.x % 32 == 0;
}

/* Shows a warp's 16 rows of decoded weights to the products, of all blocks that share them. */
template <int PARTS, int SHARE>
__device__ __forceinline__ void give_rows(shared<PARTS, SHARE> &m, int stage, int panel, uint32_t other)
{
    enum { BYTES = 16 * 128 };
    wg_show();
    if (!arrives()) return;
    if constexpr (SHARE > 1) {
        const uint32_t rows = smem_address(m.b) + (stage * GROUPS + panel) * (UNIT * 128) +
                              threadIdx.x / 32 % 4 * BYTES,
                       full = smem_address(m.decoded.full) + stage * 8;
        bulk_copy(cluster_address(rows, other), rows, BYTES, cluster_address(full, other));
        mbar_expect(full, BYTES);
    } else mbar_arrive(smem_address(m.decoded.full) + stage * 8);
}

/* Decodes every DECODERS-th of a tile's panels, from `first` on, or of panels that blocks share the block's
 * own; and tells what tiles' columns are multiplied by. */
template <int PARTS, int SHARE>
__device__ __forceinline__ void decode(const fp8_params &f, shared<PARTS, SHARE> &m, int first)
{
    typedef form<PARTS, SHARE> form;
    enum { STRIDE = form::DECODERS, PANELS = form::PANELS / STRIDE };
    const gemm_params &p = f.p;
    const tile_walk<PARTS, SHARE> walk(m);
    const decode_place here = decode_place_here();
    const int own = SHARE > 1 ? walk.rank : first;
    ring_place<form::UNIT_STAGES> from;
    ring_place<form::STAGES> to;
    ring_place<2> table;
    bool ready = false; /* the stages to come: a wait takes long even where it ends at once */
    for (int32_t tile = walk.first; tile < walk.tiles; tile += walk.stride) {
        const tile_place t = walk.at(m, p, tile);
        if (first == 0) {
            m.table.wait_free(table);
            sm90_gemm::fill_columns(m.columns[table.stage], p, t.expert, t.panel * UNIT, threadIdx.x % 128,
                                    128, [&](int column) { return power_at(f, t.expert, column); });
            m.table.give(table);
            table.advance();
        }
        float low[PANELS], high[PANELS];
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const int column = min(t.panel + own + i * STRIDE, p.panels - 1) * UNIT + column_here();
            low[i] = factor_of(power_at(f, t.expert, column));
            high[i] = factor_of(power_at(f, t.expert, column + 8));
        }
        for (int step = 0; step < f.groups; step++) {
            packed_part x[PANELS][UNITS];
            if (!ready) {
                m.packed.wait_full(from);
                m.decoded.wait_free(to);
            }
#pragma unroll
            for (int i = 0; i < PANELS * UNITS; i++)
                load_codes(x[i / UNITS][i % UNITS],
                           m.units[from.stage][SHARE > 1 ? 0 : first + i / UNITS * STRIDE][i % UNITS], here);
            const bool second = step * UNITS + 1 < p.units;
            const int used = from.stage, given = to.stage;
            from.advance();
            to.advance();
            ready = m.packed.test_full(from) &&
                    mbar_test(smem_address(m.decoded.free) + to.stage * 8, to.parity ^ 1);
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                char *rows = m.b[given][own + i * STRIDE];
                decode_unit<0>(rows, x[i][0], low[i], high[i], true, here);
                decode_unit<1>(rows, x[i][1], low[i], high[i], second, here);
            }
            give_rows(m, given, own, walk.rank ^ 1);
            if (threadIdx.x % 32 == 0) m.packed.give_back(used);
        }
    }
}

/* ---- products ---- */

/* A warp gives back a stage's tokens and weights. */
template <int PARTS, int SHARE>
__device__ __forceinline__ void give_back_stage(shared<PARTS, SHARE> &m, int stage, uint32_t other)
{
    if (!arrives()) return;
    m.decoded.give_back(stage);
    if constexpr (SHARE > 1) arrive_there(other + stage * 8);
    m.tokens.give_back(stage);
}

/* The sums of a tile's tokens, PARTS times 64 of them from those of GROUP on. `other`: where the barriers of
 * free stages of the block are that shares weights. */
template <int PARTS, int SHARE, int GROUP>
__device__ __forceinline__ void sum_tokens(float (&c)[PARTS][EIGHTS][4], shared<PARTS, SHARE> &m, int steps,
                                           uint32_t other, ring_place<form<PARTS, SHARE>::STAGES> &at)
{
    enum { FIRST = GROUP * PARTS * 64, TOKENS = form<PARTS, SHARE>::TOKENS };
    const int lane = threadIdx.x % 32,
              place = FIRST + threadIdx.x / 32 % 4 * 16 + lane / 8 * 4 + lane / 4 % 2; /* fp8.cuh */
    bool full = false; /* the stage to come: a wait takes long even where it is full */
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const ring_place<form<PARTS, SHARE>::STAGES> here = at;
        if (!full) {
            m.tokens.wait_full(here);
            m.decoded.wait_full(here);
        }
        at.advance();
        const uint64_t tokens = wg_tile(smem_address(m.a) + here.stage * (TOKENS * 128) + FIRST * 128, 0),
                       weights = wg_tile(smem_address(m.b) + here.stage * (GROUPS * UNIT * 128), 0);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            float part[EIGHTS][4];
            const float *scale = m.scale[here.stage] + place + i * 64;
            const float low = scale[0], high = scale[2];
            wg_start();
            wgmma_ss_e4m3<false>(part, wg_further(tokens, i * 64 * 128), weights);
#pragma unroll
            for (int s = 1; s < 4; s++)
                wgmma_ss_e4m3<true>(part, wg_further(tokens, i * 64 * 128 + s * 32),
                                    wg_further(weights, s * 32));
            wg_commit();
            if (i == PARTS - 1) full = m.tokens.test_full(at) && m.decoded.test_full(at);
            wg_wait<0>(part);
            if (i == PARTS - 1) give_back_stage(m, here.stage, other);
            add_scaled_rows(c[i], part, low, high);
        }
    }
}

template <int PARTS, int SHARE>
__device__ __forceinline__ void multiply(const fp8_params &f, shared<PARTS, SHARE> &m, int group)
{
    const gemm_params &p = f.p;
    const tile_walk<PARTS, SHARE> walk(m);
    const uint32_t other =
        SHARE > 1 ? cluster_address(smem_address(m.decoded.free), (uint32_t)walk.rank ^ 1) : 0;
    ring_place<form<PARTS, SHARE>::STAGES> at;
    ring_place<2> table;
    /* The first tile has no rows: until tokens come there is nothing to do, and storing none brings the code
     * that runs once a tile. */
    for (int32_t tile = walk.first < walk.tiles ? walk.first - walk.stride : walk.tiles; tile < walk.tiles;
         tile += walk.stride) {
        float c[PARTS][EIGHTS][4];
#pragma unroll
        for (int i = 0; i < PARTS; i++) clear_sums(c[i]);
        const int steps = tile >= 0 ? f.groups : 0;
        if (group == 0) sum_tokens<PARTS, SHARE, 0>(c, m, steps, other, at);
        else sum_tokens<PARTS, SHARE, 1>(c, m, steps, other, at);
        tile_place t = walk.at(m, p, tile >= 0 ? tile : walk.first);
        if (tile >= 0) m.table.wait_full(table);
        else t.rows = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            sm90_gemm::store_tokens(c[i], p, t, (group * PARTS + i) * 64, t.panel * UNIT,
                                    m.columns[table.stage], m.out[threadIdx.x / 32 % 4 + group * 4]);
        if (tile < 0) continue;
        if (arrives()) m.table.give_back(table);
        table.advance();
    }
}

/* bulk: weights are repacked, and bulk copies can read them; always where tiles have two parts. */
template <int PARTS, int SHARE>
__global__ void __launch_bounds__(form<PARTS, SHARE>::THREADS, 1)
    grouped_gemm_sm90_fp8(const __grid_constant__ fp8_params f, const __grid_constant__ CUtensorMap a,
                          bool bulk)
{
#ifdef QUERN_WGMMA
    typedef form<PARTS, SHARE> form;
    extern __shared__ __align__(1024) char memory[];
    shared<PARTS, SHARE> &m = *(shared<PARTS, SHARE> *)memory;
    const gemm_params &p = f.p;
    if (threadIdx.x == 0) {
        tma_prefetch(a);
        m.tokens.init(1, GROUPS * 4);
        m.packed.init(bulk ? 1 : 128, form::DECODERS * 4);
        m.decoded.init(form::DECODERS * 4, SHARE * GROUPS * 4);
        m.table.init(128, GROUPS * 4);
        mbar_init_done();
    }
    if (SHARE > 1) {
        cluster_sync_arrive();
        cluster_sync_wait();
    }
    wait_for_before();
    make_tiles(m.tiles, p, form::TOKENS * SHARE, p.panels, GROUPS);
    finish_tail(m.tiles, p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<form::FEED_REGISTERS>();
        if (PARTS == 1 && !bulk) feed<PARTS, SHARE, false>(f, a, m);
        else if (threadIdx.x == 0) feed<PARTS, SHARE, true>(f, a, m);
    } else if (role <= form::DECODERS) {
        registers_down<form::DECODE_REGISTERS>();
        decode<PARTS, SHARE>(f, m, role - 1);
    } else {
        registers_up<form::MULTIPLY_REGISTERS>();
        multiply<PARTS, SHARE>(f, m, role - 1 - form::DECODERS);
    }
    if (SHARE > 1) { /* the other block still writes here, or arrives */
        cluster_sync_arrive();
        cluster_sync_wait();
    }
#endif
}

} // namespace sm90_fp8

#endif
