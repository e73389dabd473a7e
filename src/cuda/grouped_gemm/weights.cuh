/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * weights.cuh - NVFP4 weights in the order of the products' fragments, and their decoding in registers.
 *
 * Repacked layout, version 2: for each expert panels of 64 columns, in each panel units of 64 of K, 2304
 * bytes a unit. The columns of B are the rows of the product's first operand, of which a warp has 16: byte (w
 * * 32 + l) * 16 begins the four words of lane l of warp w, one for each 16 of K. A word holds what mma's A
 * fragment holds of that lane: registers 0 to 3, in each the codes of two neighbours in K. In each half of
 * the word, which is of one neighbour, stand
 *     register   sign                    exponent  mantissa
 *     0          9                       2..1      0
 *     1          3, in the other half    12..11    10
 *     2          13                      6..5      4
 *     3          15                      8..7      14
 * so that a shift, or a rotation, and a mask make bf16, over 2^126, of three of them, and two shifts that of
 * the last; and so that magnitudes of a column, registers 0 and 2 or 1 and 3, are selectors of a byte
 * permutation after a shift and a mask. After the 2048 bytes of codes stand the scales: 8 bytes for rows w *
 * 16 + r and that + 8, as [two of K's 16][row, row + 8][16 of the two].
 *
 * A scale byte that is no number is repacked as 0, and sets its bit of the status.
 */
#ifndef QUERN_CUDA_GROUPED_GEMM_WEIGHTS_CUH
#define QUERN_CUDA_GROUPED_GEMM_WEIGHTS_CUH

#include "common/decode.cuh"
#include "common/fp4.cuh"
#include "common/mma.cuh"
#include "common/rows.cuh"

enum { UNIT = 64, UNIT_STEPS = 4, UNIT_CODES = 2048, UNIT_BYTES = 2304 };

/* Experts' weights: repacked, or in one of the caller's layouts. */
struct weight_source {
    const uint8_t *repacked; /* NULL: the following */
    int64_t repacked_expert;
    uint8_t *codes, *scales;
    int64_t codes_expert, pair, column;         /* bytes to the next pair of K, column */
    int64_t scales_expert, block, scale_column; /* unless swizzled */
    bool swizzled;
    int32_t n, k, panels, units;
    int32_t *status;
};

static inline weight_source weight_source_of(const quern_tensor &repacked, const quern_tensor &codes,
                                             const quern_tensor &scales, bool k_major, scale_order order,
                                             int64_t n, int64_t k)
{
    weight_source w = {};
    w.n = (int32_t)n;
    w.k = (int32_t)k;
    w.panels = (int32_t)((n + UNIT - 1) / UNIT);
    w.units = (int32_t)((k + UNIT - 1) / UNIT);
    if (present(repacked)) {
        w.repacked = (const uint8_t *)repacked.data;
        w.repacked_expert = repacked.strides[0];
    }
    if (!present(codes)) return w;
    w.codes = (uint8_t *)codes.data;
    w.scales = (uint8_t *)scales.data;
    w.codes_expert = codes.strides[0];
    w.pair = k_major ? 1 : codes.strides[1];
    w.column = k_major ? codes.strides[1] : 1;
    w.scales_expert = scales.strides[0];
    w.swizzled = order == SCALES_SWIZZLED;
    if (!w.swizzled) {
        w.block = order == SCALES_K_MAJOR ? 1 : scales.strides[1];
        w.scale_column = order == SCALES_K_MAJOR ? scales.strides[1] : 1;
    }
    return w;
}

__device__ __forceinline__ uint8_t *scale_place(const weight_source &w, int64_t expert, int block, int column)
{
    uint8_t *base = w.scales + expert * w.scales_expert;
    if (!w.swizzled) return base + block * w.block + column * w.scale_column;
    const int64_t tiles = (w.k / FP4_BLOCK + 3) / 4;
    return base + (column / 128 * tiles + block / 4) * 512 + column % 32 * 16 + column % 128 / 32 * 4 +
           block % 4;
}

/* The bits of a word that are a register's code, of the neighbour `half`. */
__device__ __forceinline__ uint32_t code_to_word(uint32_t code, int reg, int half)
{
    const uint32_t size = code & 7, sign = code >> 3 & 1;
    if (reg == 1) return size << 10 << 16 * half | sign << 3 << 16 * (1 - half);
    const uint32_t bits = reg == 0   ? size | sign << 9
                          : reg == 2 ? size << 4 | sign << 13
                                     : (size & 6) << 6 | (size & 1) << 14 | sign << 15;
    return bits << 16 * half;
}
__device__ __forceinline__ uint32_t code_from_word(uint32_t word, int reg, int half)
{
    const uint32_t x = word >> 16 * half, other = word >> 16 * (1 - half);
    if (reg == 0) return (x & 7) | (x >> 6 & 8);
    if (reg == 1) return (x >> 10 & 7) | (other & 8);
    if (reg == 2) return (x >> 4 & 7) | (x >> 10 & 8);
    return (x >> 6 & 6) | (x >> 14 & 1) | (x >> 12 & 8);
}

/* The column of lane l of warp w for a register, and its pair of K within 16. */
__device__ __forceinline__ int column_of(int w, int lane, int reg)
{
    return w * 16 + lane / 4 + reg % 2 * 8;
}
__device__ __forceinline__ int pair_of(int lane, int reg)
{
    return lane % 4 + reg / 2 * 4;
}

/* A lane's part of a unit: four words of codes, and the 8 bytes of its rows' scales. */
struct unit_part {
    uint32_t codes[UNIT_STEPS], scales[2];
};

/* The same from the caller's layout: all loads, then what is made of them. What lies outside the matrix is
 * 0. */
__device__ __forceinline__ unit_part gather_unit(const weight_source &w, int64_t expert, int panel, int unit,
                                                 int warp, int lane)
{
    unit_part p = {};
    uint32_t byte[UNIT_STEPS][4], scale[UNIT_STEPS][2];
    const uint8_t *codes = w.codes + expert * w.codes_expert;
    bool bad = false;
#pragma unroll
    for (int s = 0; s < UNIT_STEPS; s++) {
        const int k0 = unit * UNIT + s * 16;
#pragma unroll
        for (int reg = 0; reg < 4; reg++) {
            const int column = panel * UNIT + column_of(warp, lane, reg), pair = k0 / 2 + pair_of(lane, reg);
            const bool here = column < w.n && k0 < w.k;
            byte[s][reg] = here ? __ldg(codes + pair * w.pair + column * w.column) : 0;
            if (reg < 2) scale[s][reg] = here ? __ldg(scale_place(w, expert, k0 / 16, column)) : 0;
        }
    }
#pragma unroll
    for (int s = 0; s < UNIT_STEPS; s++) {
#pragma unroll
        for (int reg = 0; reg < 4; reg++)
            p.codes[s] |= code_to_word(byte[s][reg] & 15, reg, 0) | code_to_word(byte[s][reg] >> 4, reg, 1);
#pragma unroll
        for (int high = 0; high < 2; high++) {
            bad = bad || !is_scale((int)scale[s][high]);
            p.scales[s / 2] |= (is_scale((int)scale[s][high]) ? scale[s][high] : 0)
                               << (s % 2 * 8 + high * 16);
        }
    }
    if (bad) raise_status(w.status, QUERN_STATUS_BAD_SCALE);
    return p;
}

/* A thread's part of a unit, of 128 threads, from either layout at any address. */
__device__ __forceinline__ unit_part load_part(const weight_source &w, int64_t expert, int panel, int unit)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (w.repacked == NULL) return gather_unit(w, expert, panel, unit, warp, lane);
    const uint8_t *from =
        w.repacked + expert * w.repacked_expert + ((int64_t)panel * w.units + unit) * UNIT_BYTES;
    const uint8_t *codes = from + threadIdx.x * 16, *scales = from + UNIT_CODES + (warp * 8 + lane / 4) * 8;
    unit_part part = {};
    if ((uintptr_t)from % 16 == 0) {
        const uint4 x = __ldg((const uint4 *)codes);
        const uint2 s = __ldg((const uint2 *)scales);
        return {{x.x, x.y, x.z, x.w}, {s.x, s.y}};
    }
    for (int b = 0; b < 16; b++) part.codes[b / 4] |= (uint32_t)codes[b] << b % 4 * 8;
    for (int b = 0; b < 8; b++) part.scales[b / 4] |= (uint32_t)scales[b] << b % 4 * 8;
    return part;
}

/* A step's four registers from its word, and its rows' scales from theirs. bf16 holds weights over 2^8, f16
 * over 2^7: so scales and products stay within their range, exactly. */
template <typename T> constexpr float weight_scale()
{
    return __is_same(T, bf16) ? 0x1p8f : 0x1p7f;
}

template <typename T> __device__ __forceinline__ uint32_t times2(uint32_t x, uint32_t y);
template <> __device__ __forceinline__ uint32_t times2<bf16>(uint32_t x, uint32_t y)
{
    return times_bf16x2(x, y);
}
template <> __device__ __forceinline__ uint32_t times2<__half>(uint32_t x, uint32_t y)
{
    const __half2 product = __hmul2(*(const __half2 *)&x, *(const __half2 *)&y);
    return *(const uint32_t *)&product;
}

/* One half of a word in both: as a product's operand it costs nothing. */
__device__ __forceinline__ uint32_t twice(uint32_t x, bool high)
{
    uint32_t both;
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(both) : "r"(high ? x >> 16 : x));
    return both;
}

template <typename T>
__device__ __forceinline__ void decode_step(uint32_t (&a)[4], uint32_t word, uint32_t scales, int step)
{
    uint32_t s;
    if constexpr (__is_same(T, bf16)) {
        s = (step % 2 == 0 ? scales << 4 : scales >> 4) & 0x07f007f0;
        s = times_bf16x2(times_bf16x2(s, 0x7b807b80), 0x7a807a80); /* 2^120, 2^118 */
    } else {
        s = (step % 2 == 0 ? scales << 7 : scales >> 1) & 0x3f803f80;
        s = times2<T>(s, 0x78007800); /* 2^15 */
    }
    const uint32_t low = twice(s, false), high = twice(s, true);
    uint32_t x[4];
    x[0] = word << 6 & 0x81c081c0;
    x[1] = __funnelshift_r(word, word, 4) & 0x81c081c0;
    x[2] = word << 2 & 0x81c081c0;
    x[3] = (word & 0x81808180) | (word >> 8 & 0x00400040);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (!__is_same(T, bf16)) x[i] = (x[i] & 0x80008000) | (x[i] << 3 & 0x0e000e00);
        a[i] = times2<T>(x[i], i % 2 == 0 ? low : high);
    }
}

#endif
