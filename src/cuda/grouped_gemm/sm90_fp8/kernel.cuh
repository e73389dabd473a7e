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
    const int64_t scales = scale_place_of(f.p.ends, t.expert, t.row0 - f.p.ends.first_of(t.expert));
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
        float low[PANELS], high[PANELS];
#pragma unroll
        for (int i = 0; i < PANELS; i++) {
            const sm90_gemm::column_scales power = powers_of(f, t, first + i * STRIDE);
            low[i] = factor_of(power.low);
            high[i] = factor_of(power.high);
        }
        for (int step = 0; step < f.groups; step++) {
            packed_part x[PANELS][UNITS];
            m.packed.wait_full(from);
            m.decoded.wait_free(to);
#pragma unroll
            for (int i = 0; i < PANELS * UNITS; i++)
                load_codes(x[i / UNITS][i % UNITS],
                           m.units[from.stage][first + i / UNITS * STRIDE][i % UNITS], here);
            const bool second = step * UNITS + 1 < p.units;
#pragma unroll
            for (int i = 0; i < PANELS; i++) {
                char *rows = m.b[to.stage][first + i * STRIDE];
                decode_unit<0>(rows, x[i][0], low[i], high[i], true, here);
                decode_unit<1>(rows, x[i][1], low[i], high[i], second, here);
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
    for (int n = 0; n < PART / 8; n += 2) {
        const float4 s = *(const float4 *)(scale + n * 8 + threadIdx.x % 4 * 4);
        c[n][0] = fmaf(s.x, part[n][0], c[n][0]);
        c[n][1] = fmaf(s.y, part[n][1], c[n][1]);
        c[n][2] = fmaf(s.x, part[n][2], c[n][2]);
        c[n][3] = fmaf(s.y, part[n][3], c[n][3]);
        c[n + 1][0] = fmaf(s.z, part[n + 1][0], c[n + 1][0]);
        c[n + 1][1] = fmaf(s.w, part[n + 1][1], c[n + 1][1]);
        c[n + 1][2] = fmaf(s.z, part[n + 1][2], c[n + 1][2]);
        c[n + 1][3] = fmaf(s.w, part[n + 1][3], c[n + 1][3]);
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
        bool full = false; /* the stage to come: a wait takes long even where it is full */
        for (int step = 0; step < steps; step++) {
            const ring_place<form<PARTS>::STAGES> here = at;
            if (!full) {
                m.tokens.wait_full(here);
                m.decoded.wait_full(here);
            }
            at.advance();
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                float part[PART / 8][4];
                multiply_step(part, m.b[here.stage][group], m.a[here.stage] + i * PART * 128);
                if (i == PARTS - 1) {
                    if (arrives()) m.decoded.give_back(here);
                    full = m.tokens.test_full(at) && m.decoded.test_full(at);
                }
                add_group(c[i], part, m.scale[here.stage] + i * PART);
            }
            if (arrives()) m.tokens.give_back(here);
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
