/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp4_bf16.cuh - blocks of 16 bf16 numbers to NVFP4 where many share a global: the bits of fp4.cuh without a
 * division, or a branch for values between two codes.
 *
 * A product by the reciprocal of scale and global is rounded towards zero to f16, near the least exponents of
 * which 0, 0.5, 1, 1.5, 2, 3, 4 and 6 are the numbers whose bits from 9 on are 0 to 7: half a step more, in
 * bytes of four values, makes the codes. Signs come along; only those of -0 must go, by adding 0.
 *
 * Which products leave the code open is known before any value is: a number of 8 bits is within 2^-16 of a
 * middle of two codes only where the nearest bf16 number is, and whether there is one depends on the bits of
 * the global, of the scale's three bits of mantissa and of the middle's, 1, 1.25, 1.5 or 1.75. So each lane
 * of a warp decides one of the 32 cases for all blocks, by the quotient, rounded once. The middles of
 * mantissa 1 and 1.25 have an even code below, the others an odd one. A block adds a little to its products,
 * or takes a little from them, and adds a little more to those of mantissa 1.5 and above where odd codes need
 * it: that brings all open values to their sides. Where middles of one parity want different sides, as those
 * of 1 mantissa in 200 of computed globals do, the block is done by fp4.cuh.
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
    float global, reciprocal; /* 1 / global */
    uint32_t sides;           /* four bits for each mantissa of the scale: bf16_side */
    int32_t most;             /* the largest magnitude's bits, -1 where the rule is of no use */
    bool by_parity;           /* some mantissa's side is */
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
    const uint32_t side = !even_down && !odd_down ? SIDE_UP
                          : !even_up && !odd_up   ? 0
                          : !even_up && !odd_down ? SIDE_BY_PARITY
                                                  : SIDE_OPEN;
    const bool usable = KIND == FP4_COMPRESSED ? global >= 1.0f && global <= 0x1p40f
                                               : global >= 0x1p-40f && global <= 1.0f;
    bf16_rule rule;
    rule.global = global;
    rule.reciprocal = __frcp_rn(global);
    rule.sides = __reduce_or_sync(~0u, side << 4 * mantissa);
    rule.most = usable ? __float_as_int(0x1p60f) : -1;
    asm volatile("" : "+r"(rule.most)); /* else each block compares the global */
    rule.by_parity = (rule.sides & 0x11111111 * SIDE_BY_PARITY) != 0;
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

/* The largest magnitude of 16 values, as f32's bits; those of infinity or more where one is not finite. */
__device__ __forceinline__ uint32_t largest_bf16(const uint32_t (&pair)[8])
{
    uint32_t both = larger_bf16x2(pair[0], pair[1]);
#pragma unroll
    for (int i = 2; i < 8; i++) both = larger_bf16x2(both, pair[i]);
    return larger_bf16x2(both, both << 16) & 0x7fff0000;
}

/* Numbers of which none is larger than `most`, of two halves that are the same; signs stay. */
__device__ __forceinline__ uint32_t at_most_bf16x2(uint32_t x, uint32_t most)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint32_t least;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(x), "r"(most));
    return least;
#else
    const uint32_t rest = 0x7fff7fff;
    uint32_t least;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(x & rest), "r"(most));
    return least | (x & ~rest);
#endif
}

/* Two f16 numbers, towards zero, x the low one. */
__device__ __forceinline__ uint32_t towards_zero(float x, float y)
{
    uint32_t both;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(y), "f"(x));
    return both;
}

__device__ __forceinline__ float near_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* How far products are moved, in 2^-23 of them: 40. Their own error is 5, and a value that is not open is 128
 * away. By parity they are first 80 larger, so that those at a middle have its leading bits; then those with
 * a one there get 128 of their power of two, and all lose the 80. */
#define BF16_ASIDE 0x1.4p-18f
#define BF16_AHEAD 0x1.4p-17f
enum { BF16_MORE = 22 - 7 };

/* The codes of eight values. PARITY: `inverse` is BF16_AHEAD larger, and `odd` the bit of a product that says
 * which middle is near, or 0; else products are moved by 2^-14, where f16's exponents end. */
template <bool PARITY>
__device__ __forceinline__ uint32_t bf16_codes(const uint32_t *pair, float inverse, uint32_t odd)
{
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float x = __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000 : pair[i / 2] << 16);
        y[i] = __fmaf_rn(x, inverse, 0.0f);
        if constexpr (PARITY) {
            const uint32_t bits = __float_as_uint(y[i]);
            y[i] = __uint_as_float(bits + ((bits & odd) >> BF16_MORE)) * (0x1p-14f * (1.0f - BF16_AHEAD));
        }
    }
    const uint32_t even_bytes =
                       __byte_perm(towards_zero(y[0], y[2]), towards_zero(y[4], y[6]), 0x7531),
                   odd_bytes = __byte_perm(towards_zero(y[1], y[3]), towards_zero(y[5], y[7]), 0x7531);
    const uint32_t low = ((even_bytes + 0x01010101) >> 1 & 0x07070707) | (even_bytes >> 4 & ~0x07070707),
                   high = ((odd_bytes * 8 + 0x08080808) & 0x70707070) | (odd_bytes & ~0x70707070);
    return (low & 0x0f0f0f0f) | (high & 0xf0f0f0f0);
}

/* Quantises a block; false where quantise_block() must. */
template <fp4_kind KIND>
__device__ __forceinline__ bool bf16_block(fp4_block &b, const bf16_rule &rule, uint32_t (&pair)[8])
{
    const uint32_t most = largest_bf16(pair);
    if ((int32_t)most > rule.most) return false;
    float a = __uint_as_float(most);
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
    const float scale = e4m3_value(b.scale);
    const uint32_t side = __funnelshift_r(rule.sides, rule.sides, __float_as_uint(scale) >> 18);
    if (side & SIDE_OPEN) return false;
    const float inverse = near_reciprocal(scale) * (KIND == FP4_COMPRESSED ? rule.global : rule.reciprocal) *
                          (side & SIDE_UP ? 1.0f + BF16_ASIDE : 1.0f - BF16_ASIDE);
    if ((uint32_t)b.scale - 4 >= 0x7e - 4) { /* quotients may be 7 and more: 6 is their code, too */
        const uint32_t six = __bfloat16_as_ushort(from_float<bf16>(6.0f * near_reciprocal(inverse)));
#pragma unroll
        for (int i = 0; i < 8; i++) pair[i] = at_most_bf16x2(pair[i], six * 0x10001);
    }
    if (rule.by_parity) {
        const float ahead = inverse * (1.0f + BF16_AHEAD);
        const uint32_t odd = side << 22 & 0x400000;
        b.codes[0] = bf16_codes<true>(pair, ahead, odd);
        b.codes[1] = bf16_codes<true>(pair + 4, ahead, odd);
    } else {
        b.codes[0] = bf16_codes<false>(pair, inverse * 0x1p-14f, 0);
        b.codes[1] = bf16_codes<false>(pair + 4, inverse * 0x1p-14f, 0);
    }
    return true;
}

#endif
