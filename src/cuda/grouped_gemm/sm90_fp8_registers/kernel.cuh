/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroup that fills the stages, those that decode and multiply, and the kernel. */
#ifndef QUERN_CUDA_SM90_FP8_REGISTERS_GROUPED_GEMM_KERNEL_CUH
#define QUERN_CUDA_SM90_FP8_REGISTERS_GROUPED_GEMM_KERNEL_CUH

#include "grouped_gemm/sm90_fp8_registers/shared.cuh"

namespace sm90_fp8_registers
{

using sm90_gemm::stage_units;

/* ---- feeding ---- */

/* The units of a step. */
__device__ __forceinline__ stage_units units_at(const gemm_params &p, int step)
{
    return {step * UNITS, min((int)UNITS, p.units - step * UNITS), step * UNITS * UNIT};
}

/* Repacked weights, by one thread. */
template <int TOKENS>
__device__ __forceinline__ void copy_units(const gemm_params &p, shared<TOKENS> &m, const tile_place &t,
                                           int panels, int step, int stage, uint32_t bar)
{
    for (int g = 0; g < panels; g++)
        sm90_gemm::copy_weights(p, m.units[stage][g], t.expert, t.panel + g, units_at(p, step), bar);
}

/* Weights in the caller's layout, or out of line: each thread of the warpgroup loads a lane's part. */
template <int TOKENS>
__device__ __forceinline__ void load_units(const gemm_params &p, shared<TOKENS> &m, const tile_place &t,
                                           int panels, int step, int stage)
{
    const stage_units u = units_at(p, step);
    for (int g = 0; g < panels; g++)
#pragma unroll 1
        for (int i = 0; i < u.count; i++)
            sm90_gemm::put_part(m.units[stage][g][i], load_part(p.b, t.expert, t.panel + g, u.unit + i));
}

template <int TOKENS, bool BULK>
__device__ __forceinline__ void feed(const fp8_params &f, const CUtensorMap &a, shared<TOKENS> &m)
{
    const gemm_params &p = f.p;
    ring_place<form<TOKENS>::STAGES> at;
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, GROUPS);
        const int panels = min((int)GROUPS, p.panels - t.panel);
        const int64_t scales = scales_of(p.ends, t.expert) + t.row0 - p.ends.first_of(t.expert);
        for (int step = 0; step < f.groups; step++) {
            m.stages.wait_free(at);
            if (BULK || threadIdx.x == 0) {
                const int units = BULK ? units_at(p, step).count * panels : 0;
                const uint32_t bar = m.stages.expect(
                    at, (uint32_t)(TOKENS * (128 + sizeof(float)) + (size_t)units * UNIT_BYTES));
                if (BULK) copy_units(p, m, t, panels, step, at.stage, bar);
                tma_load(smem_address(m.a[at.stage]), a, bar, step * (FP8_GROUP / 2), 0, (int)t.row0, 0);
                bulk_load(smem_address(m.scale[at.stage]), f.row_scale + step * f.scale_stride + scales,
                          TOKENS * sizeof(float), bar);
            }
            if (!BULK) {
                load_units(p, m, t, panels, step, at.stage);
                m.stages.give(at);
            }
            at.advance();
        }
    }
}

/* ---- weights ---- */

/* All threads of the block. */
template <int TOKENS> __device__ __forceinline__ void make_table(shared<TOKENS> &m)
{
    for (int i = threadIdx.x; i < POWERS * SCALES; i += THREADS) {
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

/* The entry of the scale byte that begins at a bit of `scales`. A table's address has zeros where an entry's
 * offset has bits. */
template <int BIT> __device__ __forceinline__ uint2 table_entry(uint32_t table, uint32_t scales)
{
    const uint32_t at = table | ((BIT < 3 ? scales << (3 - BIT) : scales >> (BIT - 3)) & 0x3f8);
    uint2 x;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
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

/* A lane's weights of 16 of K, from its word: registers 0 and 2 (column) and 1 and 3 (column + 8) of
 * weights.cuh. */
__device__ __forceinline__ void decode_word(uint32_t &column, uint32_t &column8, uint32_t x, const uint2 &low,
                                            const uint2 &high)
{
    column = pick(low, x & 0x00770077);
    column8 = pick(high, (x >> 10 & 0x00170017) | (x >> 2 & 0x00600060));
    column = joined<0x80008000>(joined<0x00800080>(column, x >> 2), x << 2);
    column8 = joined<0x80008000>(joined<0x00800080>(column8, __funnelshift_r(x, x, 12)), x);
}

/* The tables of a thread's columns. */
struct column_tables {
    uint32_t low, high;
};

/* Fragments of 32 of K, from the two words and the scales that they share. */
__device__ __forceinline__ void decode_pair(uint32_t (&w)[4], uint32_t first, uint32_t second,
                                            uint32_t scales, const column_tables &table)
{
    decode_word(w[0], w[1], first, table_entry<0>(table.low, scales), table_entry<16>(table.high, scales));
    decode_word(w[2], w[3], second, table_entry<8>(table.low, scales), table_entry<24>(table.high, scales));
}

/* The first operand of a step. Of a unit that is none (real false) the codes are taken for zeros. */
__device__ __forceinline__ void decode_step(uint32_t (&w)[4][4], const char (&units)[UNITS][UNIT_BYTES],
                                            const column_tables &table, bool real)
{
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        const uint4 codes = *(const uint4 *)(units[i] + thread * 16);
        const uint2 read = *(const uint2 *)(units[i] + UNIT_CODES + thread / 4 * 8),
                    scales = i == 0 || real ? read : make_uint2(0, 0);
        decode_pair(w[2 * i], codes.x, codes.y, scales.x, table);
        decode_pair(w[2 * i + 1], codes.z, codes.w, scales.y, table);
    }
}

/* What the sums of this thread's columns stand for. */
__device__ __forceinline__ sm90_gemm::column_units powers_of(const fp8_params &f, const tile_place &t,
                                                             int group)
{
    const int column = (t.panel + group) * UNIT + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    return {power_at(f, t.expert, column), power_at(f, t.expert, column + 8)};
}

/* ---- products ---- */

/* C[64][N] (+)= A[64][32] B[32][N] of e4m3, A in registers, B in shared memory with the 32 in a row. */
template <int N, bool ADD>
__device__ __forceinline__ void wgmma_rs_e4m3(float (&c)[N / 8][4], const uint32_t (&a)[4], uint64_t b)
{
    static_assert(N == 64 || N == 128, "an instance a width");
#ifdef QUERN_WGMMA
    if constexpr (N == 64)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "
                     "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
                     "{" WG_LIST_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1; }"
                     : WG_TILES_32(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0; "
                     "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                     "{" WG_LIST_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1; }"
                     : WG_TILES_64(c)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD));
#endif
}

/* Begins the products of 128 of K. */
template <int PART>
__device__ __forceinline__ void multiply_step(float (&part)[PART / 8][4], const uint32_t (&w)[4][4],
                                              const char *tokens)
{
    const uint64_t b = wg_fresh(wg_tile(smem_address(tokens), 0));
    wg_start();
    wgmma_rs_e4m3<PART, false>(part, w[0], b);
#pragma unroll
    for (int s = 1; s < 4; s++) wgmma_rs_e4m3<PART, true>(part, w[s], wg_further(b, s * 32));
    wg_commit();
}

/* c += scale part. */
template <int PART>
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

/* A warp's arrival: one for all its lanes. */
template <int TOKENS>
__device__ __forceinline__ void give_back(shared<TOKENS> &m, ring_place<form<TOKENS>::STAGES> &at)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) m.stages.give_back(at);
    at.advance();
}

/* Sums of a tile, whose parts follow one another: they share weights and the sums that leave the tensor
 * cores. `turns`: the other warpgroup has a panel of the tile, too, so each has its turn of a step's
 * products. */
template <int TOKENS>
__device__ __forceinline__ void
sum_tile(float (&c)[form<TOKENS>::PARTS][form<TOKENS>::PART / 8][4], const fp8_params &f, shared<TOKENS> &m,
         ring_place<form<TOKENS>::STAGES> &at, int group, const column_tables &table, bool turns)
{
    enum { PART = form<TOKENS>::PART, PARTS = form<TOKENS>::PARTS };
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[i / (PART / 8)][i % (PART / 8)][e] = 0.0f;
    for (int step = 0; step < f.groups; step++) {
        uint32_t w[4][4];
        m.stages.wait_full(at);
        decode_step(w, m.units[at.stage][group], table, step * UNITS + 1 < f.p.units);
        if (turns) named_sync(TURN + group, GROUPS * 128);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            float part[PART / 8][4];
            multiply_step<PART>(part, w, m.a[at.stage] + i * PART * 128);
            if (i == PARTS - 1 && turns) named_arrive(TURN + 1 - group, GROUPS * 128);
            wg_wait<0>(part);
            add_group<PART>(c[i], part, m.scale[at.stage] + i * PART);
        }
        give_back(m, at);
    }
}

template <int TOKENS>
__device__ __forceinline__ void multiply(const fp8_params &f, shared<TOKENS> &m, int group)
{
    enum { PART = form<TOKENS>::PART, PARTS = form<TOKENS>::PARTS };
    const gemm_params &p = f.p;
    ring_place<form<TOKENS>::STAGES> at;
    if (group == 1) named_arrive(TURN, GROUPS * 128); /* the other one begins */
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int panels = min((int)GROUPS, p.panels - tile_at(m.tiles, p, tile, TOKENS, GROUPS).panel);
        if (group >= panels) {
            for (int step = 0; step < f.groups; step++) {
                m.stages.wait_full(at);
                give_back(m, at);
            }
            continue;
        }
        float c[PARTS][PART / 8][4];
        {
            const sm90_gemm::column_units power =
                powers_of(f, tile_at(m.tiles, p, tile, TOKENS, GROUPS), group);
            const uint32_t tables = smem_address(m.weights);
            sum_tile(c, f, m, at, group, {table_of(tables, power.low), table_of(tables, power.high)},
                     panels == GROUPS);
        }
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, GROUPS);
        const sm90_gemm::column_units power = powers_of(f, t, group);
#pragma unroll
        for (int i = 0; i < PARTS; i++)
            sm90_gemm::store_tile<PART>(c[i], p, {t.expert, t.panel, t.rows - i * PART, t.row0 + i * PART},
                                        group, m.out[threadIdx.x / 32 - 4], power);
    }
}

/* bulk: weights are repacked, and bulk copies can read them; always where tiles have 256 tokens. */
template <int TOKENS>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_sm90_fp8_registers(const __grid_constant__ fp8_params f,
                                    const __grid_constant__ CUtensorMap a, bool bulk)
{
#ifdef QUERN_WGMMA
    typedef form<TOKENS> form;
    extern __shared__ __align__(1024) char memory[];
    shared<TOKENS> &m = *(shared<TOKENS> *)memory;
    const gemm_params &p = f.p;
    if (threadIdx.x == 0) {
        m.stages.init(bulk ? 1 : 129, GROUPS * 4);
        mbar_init_done();
    }
    make_table<TOKENS>(m);
    make_tiles(m.tiles, p, TOKENS, p.panels, GROUPS);
    finish_tail(p);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<form::FEED_REGISTERS>();
        if (TOKENS < 256 && !bulk) feed<TOKENS, false>(f, a, m);
        else if (threadIdx.x == 0) feed<TOKENS, true>(f, a, m);
    } else {
        registers_up<form::MULTIPLY_REGISTERS>();
        multiply<TOKENS>(f, m, role - 1);
    }
#endif
}

} // namespace sm90_fp8_registers_registers

#endif
