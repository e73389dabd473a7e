/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that fill the stages, decode weights and multiply, and the kernel. */
#ifndef QUERN_CUDA_SM90_FP8_GROUPED_GEMM_KERNEL_CUH
#define QUERN_CUDA_SM90_FP8_GROUPED_GEMM_KERNEL_CUH

#include "grouped_gemm/sm90_fp8/shared.cuh"

namespace sm90_fp8
{

using sm90_gemm::stage_units;

/* ---- feeding ---- */

/* The units of a step. */
__device__ __forceinline__ stage_units units_at(const gemm_params &p, int step)
{
    return {step * UNITS, min((int)UNITS, p.units - step * UNITS), step * UNITS * UNIT};
}

/* Tokens and their scales; one thread. */
template <int PARTS>
__device__ __forceinline__ void copy_tokens(const fp8_params &f, const CUtensorMap &a, shared<PARTS> &m,
                                            const tile_place &t, int step,
                                            ring_place<form<PARTS>::STAGES> &at)
{
    enum { TOKENS = form<PARTS>::TOKENS };
    const int64_t scales = scales_of(f.p.ends, t.expert) + t.row0 - f.p.ends.first_of(t.expert);
    m.tokens.wait_free(at);
    const uint32_t bar = m.tokens.expect(at, TOKENS * (128 + sizeof(float)));
    tma_load(smem_address(m.a[at.stage]), a, bar, step * (FP8_GROUP / 2), 0, (int)t.row0, 0);
    bulk_load(smem_address(m.scale[at.stage]), f.row_scale + step * f.scale_stride + scales,
              TOKENS * sizeof(float), bar);
    at.advance();
}

/* REPACKED: all by one thread. Else weights stand in the caller's layout, or out of line, and each thread of
 * the warpgroup loads a lane's part. */
template <int PARTS, bool REPACKED>
__device__ __forceinline__ void feed(const fp8_params &f, const CUtensorMap &a, shared<PARTS> &m)
{
    const gemm_params &p = f.p;
    ring_place<form<PARTS>::STAGES> tokens;
    ring_place<form<PARTS>::UNIT_STAGES> at;
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, form<PARTS>::TOKENS, GROUPS);
        const int panels = min((int)GROUPS, p.panels - t.panel);
        for (int step = 0; step < f.groups; step++) {
            const stage_units u = units_at(p, step);
            m.packed.wait_free(at);
            if (REPACKED) {
                const uint32_t bar = m.packed.expect(at, (uint32_t)(u.count * panels * UNIT_BYTES));
                for (int g = 0; g < panels; g++)
                    sm90_gemm::copy_weights(p, m.units[at.stage][g], t.expert, t.panel + g, u, bar);
            } else {
                for (int g = 0; g < panels; g++)
#pragma unroll 1
                    for (int i = 0; i < u.count; i++)
                        sm90_gemm::put_part(m.units[at.stage][g][i],
                                            load_part(p.b, t.expert, t.panel + g, u.unit + i));
                m.packed.give(at);
            }
            at.advance();
            if (REPACKED || threadIdx.x == 0) copy_tokens<PARTS>(f, a, m, t, step, tokens);
        }
    }
}

/* ---- weights ---- */

/* All threads of the block. */
template <int PARTS> __device__ __forceinline__ void make_table(shared<PARTS> &m)
{
    for (int i = threadIdx.x; i < POWERS * SCALES; i += form<PARTS>::THREADS) {
        const int scale = i % SCALES;
        const float s = is_scale(scale) ? e4m3_value(scale) * __int_as_float((142 - i / SCALES) << 23) : 0.0f;
        m.weights[i / SCALES][scale] =
            make_uint2(two_e4m3(0.0f, 0.5f * s) | two_e4m3(s, 1.5f * s) << 16,
                       two_e4m3(2.0f * s, 3.0f * s) | two_e4m3(4.0f * s, 6.0f * s) << 16);
    }
}

/* Where the table of a column's power of two stands. */
__device__ __forceinline__ uint32_t table_of(uint32_t tables, float power)
{
    const int e = (int)(__float_as_uint(power) >> 23) - 112;
    return tables + min(max(e, 0), POWERS - 1) * (int)(SCALES * sizeof(uint2));
}

__device__ __forceinline__ uint2 table_entry(uint32_t table, uint32_t scale)
{
    uint2 x;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(table + scale * 8));
    return x;
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

/* Magnitudes of four weights of a column. Selectors stand in bytes 0 and 2 of `picks`, two a byte. */
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
    uint2 low, high;
};

__device__ __forceinline__ void load_codes(packed_part &x, const char *unit, const decode_place &at)
{
    x.scales = *(const uint32_t *)(unit + at.scales) >> at.shift;
#pragma unroll
    for (int j = 0; j < 4; j++) x.codes[j] = *(const uint32_t *)(unit + (at.codes ^ j * 16));
}

/* Of a unit that is none (real false) the codes are taken for zeros. */
__device__ __forceinline__ void load_tables(packed_part &x, uint32_t low, uint32_t high, bool real)
{
    const uint32_t scales = real ? x.scales : 0;
    x.low = table_entry(low, scales & 0xff);
    x.high = table_entry(high, scales >> 16 & 0xff);
}

/* Decodes a unit, the step's number NUMBER: registers 0 and 2 (column) and 1 and 3 (column + 8) of
 * weights.cuh. */
template <int NUMBER>
__device__ __forceinline__ void decode_unit(char *rows, const packed_part &unit, const decode_place &at)
{
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t x = unit.codes[j];
        uint32_t column = pick(unit.low, x & 0x00770077),
                 column8 = pick(unit.high, (x >> 10 & 0x00170017) | (x >> 2 & 0x00600060));
        column = joined<0x80008000>(joined<0x00800080>(column, x >> 2), x << 2);
        column8 = joined<0x80008000>(joined<0x00800080>(column8, __funnelshift_r(x, x, 12)), x);
        char *to = rows + (at.rows ^ (NUMBER * 64 + j * 4));
        *(uint32_t *)to = column;
        *(uint32_t *)(to + 8 * 128) = column8;
    }
}

/* Where a tile's column of this thread stands in its panel; the other is 8 further. */
__device__ __forceinline__ int column_here()
{
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
}

/* The factors of the sums of this thread's columns. */
__device__ __forceinline__ sm90_gemm::column_scales powers_of(const fp8_params &f, const tile_place &t,
                                                              int group)
{
    const int column = min(t.panel + group, f.p.panels - 1) * UNIT + column_here();
    return {power_at(f, t.expert, column), power_at(f, t.expert, column + 8)};
}

/* A warp's arrivals: one for all its lanes. */
__device__ __forceinline__ bool arrives()
{
    __syncwarp();
    return threadIdx.x % 32 == 0;
}

/* Decodes every DECODERS-th of a tile's panels, from `first` on. */
template <int PARTS> __device__ __forceinline__ void decode(const fp8_params &f, shared<PARTS> &m, int first)
{
    enum { STRIDE = form<PARTS>::DECODERS, PANELS = GROUPS / STRIDE };
    const gemm_params &p = f.p;
    const int32_t tiles = m.tiles.count;
    const decode_place here = decode_place_here();
    ring_place<form<PARTS>::UNIT_STAGES> from;
    ring_place<form<PARTS>::STAGES> to;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, form<PARTS>::TOKENS, GROUPS);
        uint32_t low[PANELS], high[PANELS];
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const sm90_gemm::column_scales power = powers_of(f, t, first + i * STRIDE);
            low[i] = table_of(smem_address(m.weights), power.low);
            high[i] = table_of(smem_address(m.weights), power.high);
        }
        for (int step = 0; step < f.groups; step++) {
            packed_part x[PANELS][UNITS];
            m.packed.wait_full(from);
            m.decoded.wait_free(to);
#pragma unroll
            for (int i = 0; i < PANELS * UNITS; i++)
                load_codes(x[i / UNITS][i % UNITS],
                           m.units[from.stage][first + i / UNITS * STRIDE][i % UNITS], here);
#pragma unroll
            for (int i = 0; i < PANELS * UNITS; i++)
                load_tables(x[i / UNITS][i % UNITS], low[i / UNITS], high[i / UNITS],
                            i % UNITS == 0 || step * UNITS + 1 < p.units);
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                decode_unit<0>(m.b[to.stage][first + i * STRIDE], x[i][0], here);
                decode_unit<1>(m.b[to.stage][first + i * STRIDE], x[i][1], here);
            }
            wg_show();
            if (arrives()) {
                m.decoded.give(to);
                m.packed.give_back(from);
            }
            from.advance();
            to.advance();
        }
    }
}

/* ---- products ---- */

/* The products of 128 of K. */
__device__ __forceinline__ void multiply_step(float (&part)[PART / 8][4], const char *weights,
                                              const char *tokens)
{
    const uint64_t a = wg_fresh(wg_tile(smem_address(weights), 0)),
                   b = wg_fresh(wg_tile(smem_address(tokens), 0));
    wg_start();
    wgmma_ss_e4m3<false>(part, a, b);
#pragma unroll
    for (int s = 1; s < 4; s++) wgmma_ss_e4m3<true>(part, wg_further(a, s * 32), wg_further(b, s * 32));
    wg_commit();
    wg_wait<0>(part);
}

/* c += scale part. */
__device__ __forceinline__ void add_group(float (&c)[PART / 8][4], const float (&part)[PART / 8][4],
                                          const float *scale)
{
#pragma unroll
    for (int n = 0; n < PART / 8; n++) {
        const float2 s = *(const float2 *)(scale + n * 8 + threadIdx.x % 4 * 2);
        c[n][0] = fmaf(s.x, part[n][0], c[n][0]);
        c[n][1] = fmaf(s.y, part[n][1], c[n][1]);
        c[n][2] = fmaf(s.x, part[n][2], c[n][2]);
        c[n][3] = fmaf(s.y, part[n][3], c[n][3]);
    }
}

/* Multiplies the parts of a tile one after the other, with the same weights and registers of `part`. Tokens
 * and weights have as many stages, and one place. */
template <int PARTS>
__device__ __forceinline__ void multiply(const fp8_params &f, shared<PARTS> &m, int group)
{
    const gemm_params &p = f.p;
    const int32_t tiles = m.tiles.count;
    ring_place<form<PARTS>::STAGES> at;
    for (int32_t tile = before_first(tiles); tile < tiles; tile += gridDim.x) {
        float c[PARTS][PART / 8][4];
#pragma unroll
        for (int i = 0; i < PARTS; i++) clear_sums(c[i]);
        const int steps = tile >= 0 ? f.groups : 0;
        for (int step = 0; step < steps; step++) {
            m.tokens.wait_full(at);
            m.decoded.wait_full(at);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                float part[PART / 8][4];
                multiply_step(part, m.b[at.stage][group], m.a[at.stage] + i * PART * 128);
                if (i == PARTS - 1 && arrives()) m.decoded.give_back(at);
                add_group(c[i], part, m.scale[at.stage] + i * PART);
            }
            if (arrives()) m.tokens.give_back(at);
            at.advance();
        }
        const tile_place t = tile_or_empty(m.tiles, p, tile, form<PARTS>::TOKENS, GROUPS);
        const sm90_gemm::column_scales power = powers_of(f, t, group);
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            sm90_gemm::store_tile<PART>(c[i], p, {t.expert, t.panel, t.rows - i * PART, t.row0 + i * PART},
                                        group, m.out[threadIdx.x / 32 % 4 + group * 4], power);
    }
}

/* bulk: weights are repacked, and bulk copies can read them; always where tiles have two parts. */
template <int PARTS>
__global__ void __launch_bounds__(form<PARTS>::THREADS, 1)
    grouped_gemm_sm90_fp8(const __grid_constant__ fp8_params f, const __grid_constant__ CUtensorMap a,
                          bool bulk)
{
#ifdef QUERN_WGMMA
    typedef form<PARTS> form;
    extern __shared__ __align__(1024) char memory[];
    shared<PARTS> &m = *(shared<PARTS> *)memory;
    const gemm_params &p = f.p;
    if (threadIdx.x == 0) {
        tma_prefetch(a);
        m.tokens.init(1, GROUPS * 4);
        m.packed.init(bulk ? 1 : 128, form::DECODERS * 4);
        m.decoded.init(form::DECODERS * 4, GROUPS * 4);
        mbar_init_done();
    }
    make_table<PARTS>(m);
    wait_for_before();
    make_tiles(m.tiles, p, form::TOKENS, p.panels, GROUPS);
    finish_tail(m.tiles, p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<form::FEED_REGISTERS>();
        if (PARTS == 1 && !bulk) feed<PARTS, false>(f, a, m);
        else if (threadIdx.x == 0) feed<PARTS, true>(f, a, m);
    } else if (role <= form::DECODERS) {
        registers_down<form::DECODE_REGISTERS>();
        decode<PARTS>(f, m, role - 1);
    } else {
        registers_up<form::MULTIPLY_REGISTERS>();
        multiply<PARTS>(f, m, role - 1 - form::DECODERS);
    }
#endif
}

} // namespace sm90_fp8

#endif
