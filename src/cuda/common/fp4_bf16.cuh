/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp4_bf16.cuh - blocks of 16 bf16 numbers to NVFP4 where many share a global: the bits of fp4.cuh without a
 * division, or a branch for values between two codes.
 *
 * Codes come from the same product. Which of them it leaves open is known before any value is: a number of 8
 * bits is within 2^-16 of a middle of two codes only where the nearest bf16 number is, and whether there is
 * one depends on the bits of the global, of the scale's three bits of mantissa and of the middle's, 1, 1.25,
 * 1.5 or 1.75. So each lane of a warp decides one of the 32 cases for all blocks, by the quotient, rounded
 * once. The middles of mantissa 1 and 1.25 have an even code below, the others an odd one. A block adds a
 * little to its products, or takes a little from them, and a little more for odd codes: that brings all open
 * values to their sides. Where middles of one parity want different sides, as those of 1 mantissa in 200 of
 * computed globals do, the block is done by fp4.cuh.
 */
#ifndef QUERN_CUDA_FP4_BF16_CUH
#define QUERN_CUDA_FP4_BF16_CUH

#include "common/fp4.cuh"

template <typename T, fp4_kind KIND> constexpr bool has_bf16_rule()
{
    return __is_same(T, bf16) && (KIND == FP4_RNE || KIND == FP4_MODELOPT || KIND == FP4_COMPRESSED);
}

/* What blocks of one global are made with. */
struct bf16_rule {
    float global, reciprocal, sixth; /* 1 / global; 1 / (6 times what x is divided by, but for the scale) */
    uint32_t sides;                  /* four bits for each mantissa of the scale: bf16_side */
    bool usable;
};

enum bf16_side { SIDE_BY_PARITY = 1, SIDE_UP = 2, SIDE_OPEN = 4 };

/* All lanes of a warp call, with the same global. */
template <fp4_kind KIND> __device__ __forceinline__ bf16_rule bf16_rule_of(float global)
{
    const int lane = threadIdx.x % 32, mantissa = lane % 8;
    const float scale = __int_as_float((127 << 23) + (mantissa << 20)),
                half = __int_as_float((127 << 23) + (lane / 8 << 21)),
                first = KIND == FP4_RNE        ? global
                        : KIND == FP4_MODELOPT ? __fmul_rn(scale, global)
                                               : __fdiv_rn(scale, global),
                middle = KIND == FP4_RNE ? __fmul_rn(half, scale) : half, product = __fmul_rn(middle, first),
                x = to_float<bf16>(from_float<bf16>(product)), quotient = __fdiv_rn(x, first);
    const bool open = fabsf(x - product) <= x * 0x1p-16f, odd = lane >= 16;
    const uint32_t all = __ballot_sync(~0u, open) >> mantissa,
                   above = __ballot_sync(~0u, open && (odd ? quotient >= middle : quotient > middle)) >>
                           mantissa,
                   below = all & ~above;
    const bool even_up = above & 0x101, even_down = below & 0x101, odd_up = above & 0x1010000,
               odd_down = below & 0x1010000;
    const uint32_t side =
        (even_up && even_down) || (odd_up && odd_down) || (even_up && odd_down) ? SIDE_OPEN
        : even_up                                                               ? SIDE_UP
        : odd_down                                                              ? 0
                                                                                : SIDE_BY_PARITY;
    bf16_rule rule;
    rule.global = global;
    rule.reciprocal = __frcp_rn(global);
    rule.sixth = (KIND == FP4_COMPRESSED ? global : rule.reciprocal) * (1.0f / 6.0f);
    rule.sides = __reduce_or_sync(~0u, side << 4 * mantissa);
    rule.usable = KIND == FP4_COMPRESSED ? global >= 1.0f && global <= 0x1p40f
                                         : global >= 0x1p-40f && global <= 1.0f;
    return rule;
}

/* The larger magnitudes of two pairs, NaN where one is; signs are of no use. */
__device__ __forceinline__ uint32_t larger_bf16x2(uint32_t x, uint32_t y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x), "r"(y));
    return larger;
#else
    const uint32_t rest = 0x7fff7fff;
    uint32_t larger;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(x & rest), "r"(y & rest));
    return larger;
#endif
}

/* A pair in which -0 is 0. */
__device__ __forceinline__ uint32_t without_minus_zero(uint32_t x)
{
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0x3f803f80), "r"(0));
    return y;
}

/* The signs of eight values, the bits 3 of eight codes. */
__device__ __forceinline__ uint32_t bf16_signs(const uint32_t *pair)
{
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = without_minus_zero(pair[i]);
    const uint32_t even = __byte_perm(__byte_perm(x[0], x[1], 0x51), __byte_perm(x[2], x[3], 0x51), 0x5410),
                   odd = __byte_perm(__byte_perm(x[0], x[1], 0x73), __byte_perm(x[2], x[3], 0x73), 0x5410);
    return (odd & 0x80808080) | (even >> 4 & 0x08080808);
}

__device__ __forceinline__ float near_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The codes of eight values but for their signs. A product's code ends 6 bits below the top of `rounded`, and
 * moves into the codes from there. */
__device__ __forceinline__ uint32_t bf16_codes(const uint32_t *pair, float inverse, uint32_t parity,
                                               uint32_t half)
{
    uint32_t codes = 0;
#pragma unroll
    for (int i = 7; i >= 0; i--) {
        const float x = __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000 : pair[i / 2] << 16);
        const uint32_t moved = __float_as_uint(__saturatef(fabsf(x) * inverse) * 0x1.8p-124f),
                       rounded = (moved + ((moved & parity) >> 17)) * 64 + half;
        codes = __funnelshift_l(rounded, codes, 4);
    }
    return codes;
}

/* Quantises a block; false where quantise_block() must. */
template <fp4_kind KIND>
__device__ __forceinline__ bool bf16_block(fp4_block &b, const bf16_rule &rule, const uint32_t (&pair)[8])
{
    enum : uint32_t { MOST = 0x5d80 /* 2^60 */ };
    uint32_t both = larger_bf16x2(pair[0], pair[1]);
#pragma unroll
    for (int i = 2; i < 8; i++) both = larger_bf16x2(both, pair[i]);
    const uint32_t most = max(both & 0x7fff, both >> 16 & 0x7fff);
    if (!rule.usable || most > MOST) return false;
    float a = __uint_as_float(most << 16);
    b.codes[0] = b.codes[1] = 0;
    b.scale = 0;
    if constexpr (KIND == FP4_RNE) {
        const float x = a;
        a = __fmul_rn(x, rule.reciprocal); /* and x / global, rounded once, by two remainders */
        a = __fmaf_rn(__fmaf_rn(-a, rule.global, x), rule.reciprocal, a);
        a = __fmaf_rn(__fmaf_rn(-a, rule.global, x), rule.reciprocal, a);
        if (!(a >= 6 * 0x1p-9f)) return true;
    }
    b.scale = scale_of(KIND, rule.global, a);
    const float scale = e4m3_value(b.scale), inverse = near_reciprocal(scale) * rule.sixth;
    const uint32_t side = __funnelshift_r(rule.sides, rule.sides, __float_as_uint(scale) >> 18),
                   parity = side << 22 & 0x400000;
    const uint32_t half = 0x08000000 - FP4_CLOSE / 16 + (side & SIDE_UP) * (FP4_CLOSE / 16);
    if (side & SIDE_OPEN) return false;
    b.codes[0] = bf16_codes(pair, inverse, parity, half) | bf16_signs(pair);
    b.codes[1] = bf16_codes(pair + 4, inverse, parity, half) | bf16_signs(pair + 4);
    return true;
}

#endif
