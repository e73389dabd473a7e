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
__device__ __forceinline__ void copy_tokens(const fp8_params &f, const CUtensorMap &a, shared &m,
                                            const tile_place &t, int step, ring_place<TOKEN_STAGES> &at)
{
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
template <bool REPACKED>
__device__ __forceinline__ void feed(const fp8_params &f, const CUtensorMap &a, shared &m)
{
    const gemm_params &p = f.p;
    ring_place<TOKEN_STAGES> tokens;
    ring_place<UNIT_STAGES> at;
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, GROUPS);
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
            if (REPACKED || threadIdx.x == 0) copy_tokens(f, a, m, t, step, tokens);
        }
    }
}

/* ---- weights ---- */

/* The bytes of two numbers, rounded. */
__device__ __forceinline__ uint32_t two_bytes(float x, float y)
{
    uint16_t bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(y), "f"(x));
    return bytes;
}

/* All threads of the block. */
__device__ __forceinline__ void make_table(shared &m)
{
    for (int i = threadIdx.x; i < POWERS * SCALES; i += THREADS) {
        const int scale = i % SCALES;
        const float s = is_scale(scale) ? e4m3_value(scale) * __int_as_float((142 - i / SCALES) << 23) : 0.0f;
        m.weights[i / SCALES][scale] =
            make_uint2(two_bytes(0.0f, 0.5f * s) | two_bytes(s, 1.5f * s) << 16,
                       two_bytes(2.0f * s, 3.0f * s) | two_bytes(4.0f * s, 6.0f * s) << 16);
    }
}

/* Where the table of a column's power of two stands. */
__device__ __forceinline__ uint32_t table_of(shared &m, float power)
{
    const int e = (int)(__float_as_uint(power) >> 23) - 112;
    return smem_address(m.weights) + min(max(e, 0), POWERS - 1) * (int)sizeof m.weights[0];
}

__device__ __forceinline__ uint2 table_entry(uint32_t table, uint32_t scale)
{
    uint2 x;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(table + scale * 8));
    return x;
}

/* Four weights of a column. Selectors stand in bytes 0 and 2 of `picks`, two a byte; signs
 * in the bits 7 of `signs`. */
__device__ __forceinline__ uint32_t pick(const uint2 &table, uint32_t picks, uint32_t signs)
{
    return __byte_perm(table.x, table.y, __byte_perm(picks, 0, 0x4420)) | signs;
}

/* What a thread that decodes reads and writes of its panel: of columns `column` and that + 8 the 16 of K
 * number `block` of each unit. Their codes are in the words `block` of four lanes; in turn j a thread
 * takes that of lane j ^ first, so that loads and stores meet no bank twice. */
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

/* Decodes a unit, the step's number NUMBER: registers 0 and 2 (column) and 1 and 3 (column + 8) of
 * weights.cuh. */
template <int NUMBER>
__device__ __forceinline__ void decode_unit(char *rows, const char *unit, const decode_place &at,
                                            uint32_t low, uint32_t high, bool real)
{
    const uint32_t scales = *(const uint32_t *)(unit + at.scales) >> at.shift;
    const uint2 low_table = table_entry(low, scales & 0xff),
                high_table = table_entry(high, scales >> 16 & 0xff);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t x = *(const uint32_t *)(unit + (at.codes ^ j * 16));
        uint32_t column = pick(low_table, (x & 0x00070007) | (x >> 2 & 0x00700070),
                               (x & 0x80008000) | (x >> 2 & 0x00800080)),
                 column8 =
                     pick(high_table, (x << 1 & 0x00700070) | (x >> 12 & 0x00060006) | (x >> 11 & 0x00010001),
                          (x << 3 & 0x80008000) | (x >> 3 & 0x00800080));
        if (NUMBER > 0 && !real) column = column8 = 0;
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

/* What the sums of this thread's columns stand for. */
__device__ __forceinline__ sm90_gemm::column_units powers_of(const fp8_params &f, const tile_place &t,
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

__device__ __forceinline__ void decode(const fp8_params &f, shared &m, int group)
{
    const gemm_params &p = f.p;
    const int32_t tiles = m.tiles.count;
    const decode_place here = decode_place_here();
    ring_place<UNIT_STAGES> from;
    ring_place<WEIGHT_STAGES> to;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, GROUPS);
        const sm90_gemm::column_units power = powers_of(f, t, group);
        const uint32_t low = table_of(m, power.low), high = table_of(m, power.high);
        for (int step = 0; step < f.groups; step++) {
            m.packed.wait_full(from);
            m.decoded.wait_free(to);
            char *rows = m.b[to.stage][group];
            const char *units = m.units[from.stage][group][0];
            /* Where a step has one unit, the other is no weights: a tensor core may mind, times zeros. */
            decode_unit<0>(rows, units, here, low, high, true);
            decode_unit<1>(rows, units + UNIT_BYTES, here, low, high, step * UNITS + 1 < p.units);
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
__device__ __forceinline__ void multiply_step(float (&part)[TOKENS / 8][4], const char *weights,
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
__device__ __forceinline__ void add_group(float (&c)[TOKENS / 8][4], const float (&part)[TOKENS / 8][4],
                                          const float *scale)
{
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        const float2 s = *(const float2 *)(scale + n * 8 + threadIdx.x % 4 * 2);
        c[n][0] = fmaf(s.x, part[n][0], c[n][0]);
        c[n][1] = fmaf(s.y, part[n][1], c[n][1]);
        c[n][2] = fmaf(s.x, part[n][2], c[n][2]);
        c[n][3] = fmaf(s.y, part[n][3], c[n][3]);
    }
}

__device__ __forceinline__ void multiply(const fp8_params &f, shared &m, int group)
{
    const gemm_params &p = f.p;
    const int32_t tiles = m.tiles.count;
    ring_place<TOKEN_STAGES> tokens;
    ring_place<WEIGHT_STAGES> weights;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, GROUPS);
        float c[TOKENS / 8][4], part[TOKENS / 8][4];
#pragma unroll
        for (int i = 0; i < TOKENS / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][e] = 0.0f;
        for (int step = 0; step < f.groups; step++) {
            m.tokens.wait_full(tokens);
            m.decoded.wait_full(weights);
            multiply_step(part, m.b[weights.stage][group], m.a[tokens.stage]);
            if (arrives()) m.decoded.give_back(weights);
            add_group(c, part, m.scale[tokens.stage]);
            if (arrives()) m.tokens.give_back(tokens);
            tokens.advance();
            weights.advance();
        }
        sm90_gemm::store_tile<TOKENS>(c, p, t, group, m.out[threadIdx.x / 32 % 4 + group * 4],
                                      powers_of(f, t, group));
    }
}

__global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_sm90_fp8(const __grid_constant__ fp8_params f, const __grid_constant__ CUtensorMap a,
                          bool bulk)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    const gemm_params &p = f.p;
    if (threadIdx.x == 0) {
        m.tokens.init(1, GROUPS * 4);
        m.packed.init(bulk ? 1 : 128, GROUPS * 4);
        m.decoded.init(GROUPS * 4, GROUPS * 4);
        mbar_init_done();
    }
    make_table(m);
    make_tiles(m.tiles, p, TOKENS, p.panels, GROUPS);
    finish_tail(p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<FEED_REGISTERS>();
        if (!bulk) feed<false>(f, a, m);
        else if (threadIdx.x == 0) feed<true>(f, a, m);
    } else if (role <= GROUPS) {
        registers_down<DECODE_REGISTERS>();
        decode(f, m, role - 1);
    } else {
        registers_up<MULTIPLY_REGISTERS>();
        multiply(f, m, role - 1 - GROUPS);
    }
#endif
}

} // namespace sm90_fp8

#endif
