/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp4.cuh - a thread's block of 16 values to NVFP4 and back, bit for bit as the CPU's quantisers: every step
 * is one f32 rounding, products and sums are kept from becoming an FMA.
 *
 * Two exact divisions a value would take longer than memory. So codes come first from a product by the
 * reciprocal of scale and global, which is within 2^-20 of the quotient of quotients. That product is moved
 * to where f32's exponents end: over 2^126, the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 are f32 numbers
 * whose bits from 22 on are 0 to 7. One multiplication of integers then rounds: its high word is the code,
 * its low word the distance from the middle of two.
 *
 * Values in 8 bits are often just that middle, m, of two codes. There x / global, rounded, decides alone: the
 * quotient by the scale s is above, at or below m where x / global is above, at or below m s, a product of at
 * most 7 bits. (A step of x / global away from m s moves the quotient by more than half a step of m's.)
 * Blocks with values so small that a quotient may be 0 are done again by division.
 */
#ifndef QUERN_CUDA_FP4_CUH
#define QUERN_CUDA_FP4_CUH

#include "common/device.cuh"

enum { FP4_BLOCK = QUANTISE_BLOCK };

/* Which rule makes scale and codes. `reciprocal`: the global is R = 1 / G. */
enum fp4_kind { FP4_RNE, FP4_HALF_STEPS, FP4_FOUR_OVER_SIX, FP4_SEARCH, FP4_MODELOPT, FP4_COMPRESSED };
struct fp4_rule {
    fp4_kind kind;
    bool reciprocal;
};

static inline fp4_rule fp4_rule_of(quantise_profile profile, quantise_scales choice)
{
    const bool reciprocal = profile == QUANTISE_PROFILE_COMPRESSED_TENSORS;
    if (choice == QUANTISE_SCALES_FOUR_OVER_SIX) return {FP4_FOUR_OVER_SIX, reciprocal};
    if (choice == QUANTISE_SCALES_SEARCH) return {FP4_SEARCH, reciprocal};
    if (profile == QUANTISE_PROFILE_MODELOPT) return {FP4_MODELOPT, false};
    if (reciprocal) return {FP4_COMPRESSED, true};
    return {profile == QUANTISE_PROFILE_HALFSTEP ? FP4_HALF_STEPS : FP4_RNE, false};
}

/* The code of magnitudes in [0, 6]: an addition of the power of two around which f32 has the format's
 * steps. */
__device__ __forceinline__ int e2m1_of(float y)
{
    const float power = fmaxf(__uint_as_float(__float_as_uint(y) & 0x7f800000), 1.0f);
    const int bits = __float_as_int(power), magic = bits + (22 << 23);
    return __float_as_int(__fadd_rn(y, __int_as_float(magic))) - magic + ((bits - (127 << 23)) >> 22);
}

/* The byte of any magnitude: larger ones and NaN become the format's largest number. */
__device__ __forceinline__ int saturated_e4m3(float s)
{
    const float m = fminf(s, 448.0f);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(0.0f), "f"(m));
    return bytes;
#else
    const float power = fmaxf(__uint_as_float(__float_as_uint(m) & 0x7f800000), 0x1p-6f);
    const int bits = __float_as_int(power), magic = bits + (20 << 23);
    return __float_as_int(__fadd_rn(m, __int_as_float(magic))) - magic + ((bits - (121 << 23)) >> 20);
#endif
}

/* The bytes of two numbers, the first the low one. Magnitudes as above; signs stay. */
__device__ __forceinline__ uint16_t two_e4m3(float x, float y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t bytes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(y), "f"(x));
    return bytes;
#else
    const uint32_t low = saturated_e4m3(fabsf(x)) | (__float_as_uint(x) >> 24 & 0x80),
                   high = saturated_e4m3(fabsf(y)) | (__float_as_uint(y) >> 24 & 0x80);
    return (uint16_t)(low | high << 8);
#endif
}

/* a / 6, rounded once, of numbers that are not small: a quotient and its remainder's. */
__device__ __forceinline__ float sixth_of(float a)
{
    const float sixth = 1.0f / 6.0f, q = __fmul_rn(a, sixth);
    return __fmaf_rn(__fmaf_rn(q, -6.0f, a), sixth, q);
}

__device__ __forceinline__ float e4m3_value(int byte)
{
    return __int_as_float(byte << 20) * 0x1p120f;
}

/* Whether a scale's byte is a number: neither NaN nor negative. */
__device__ __forceinline__ bool is_scale(int byte)
{
    return byte < 0x7f;
}

/* The magnitude of a code in [0, 7]. */
__device__ __forceinline__ float e2m1_value(int code)
{
    return code > 1 ? __int_as_float((code << 22) + (126 << 23)) : code == 1 ? 0.5f : 0.0f;
}

__device__ __forceinline__ float signed_e2m1(int code)
{
    return __int_as_float(__float_as_int(e2m1_value(code & 7)) | (code & 8) << 28);
}

__device__ __forceinline__ int code_of(float y, bool half_steps)
{
    float m = fminf(fabsf(y), 6.0f);
    if (half_steps) m = __fmul_rn(__fadd_rn(__fadd_rn(__fadd_rn(m, m), 8388608.0f), -8388608.0f), 0.49999f);
    return e2m1_of(m) | (y < 0.0f ? 8 : 0);
}

/* Sum of the squared errors that scale s leaves, in the order of the index. */
static __device__ float error_of(const float (&xn)[FP4_BLOCK], float s)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) {
        const float y = fminf(fabsf(__fdiv_rn(xn[i], s)), 6.0f);
        const float difference = __fsub_rn(__fmul_rn(e2m1_value(e2m1_of(y)), s), fabsf(xn[i]));
        sum = __fadd_rn(sum, __fmul_rn(difference, difference));
    }
    return sum;
}

static __device__ int better_scale(const float (&xn)[FP4_BLOCK], float a, int nearest, bool search)
{
    float best = INFINITY;
    int chosen = nearest;
    if (!search) {
        const int four = saturated_e4m3(__fdiv_rn(a, 4.0f));
        const float six_error = error_of(xn, e4m3_value(nearest)),
                    four_error = error_of(xn, e4m3_value(four));
        best = six_error < INFINITY ? six_error : INFINITY;
        return four_error < best ? four : nearest;
    }
    for (int step = -3; step <= 8; step++) {
        const int byte = min(max(nearest + step, 1), 126);
        const float error = error_of(xn, e4m3_value(byte));
        if (error < best) {
            best = error;
            chosen = byte;
        }
    }
    return chosen;
}

struct fp4_block {
    uint32_t codes[2]; /* eight a word, the first in the low bits */
    int scale;
};

__device__ __forceinline__ void add_code(fp4_block &b, int i, int code)
{
    b.codes[i / 8] |= (uint32_t)code << 4 * (i % 8);
}

/* The signs of eight values, the bits 3 of eight codes. -0 has none. */
__device__ __forceinline__ uint32_t signs_of(const float *x)
{
    uint32_t top[8];
#pragma unroll
    for (int i = 0; i < 8; i++) top[i] = __float_as_uint(x[i] + 0.0f);
    const uint32_t even =
        __byte_perm(__byte_perm(top[0], top[2], 0x73), __byte_perm(top[4], top[6], 0x73), 0x5410);
    const uint32_t odd =
        __byte_perm(__byte_perm(top[1], top[3], 0x73), __byte_perm(top[5], top[7], 0x73), 0x5410);
    return (odd & 0x80808080) | (even >> 4 & 0x08080808);
}

/* What the codes of a block are made with: of x / first / second, or of x / first where second is 1. */
struct fp4_divisors {
    float first, second, inverse; /* 1 / (6 first second) */
};

enum : uint32_t { FP4_CLOSE = 1 << 14 }; /* 2^-18 of the step between two codes */

/* A magnitude's bits over 2^126, 6 at most. */
__device__ __forceinline__ uint32_t moved_bits(const fp4_divisors &by, float x)
{
    return __float_as_uint(__saturatef(fabsf(x) * by.inverse) * 0x1.8p-124f);
}
/* The code above 32 bits of the distance from the middle of two: 0 to 2 FP4_CLOSE where that is near. */
__device__ __forceinline__ uint64_t rounded_bits(uint32_t moved)
{
    return (uint64_t)moved * 1024 + (0x80000000u + FP4_CLOSE);
}

/* Whether a value near the middle of two codes, of which it has the upper one, gets the lower one: by its
 * quotient, rounded once, and at the middle by which of them is even. */
__device__ __forceinline__ bool is_below(const fp4_divisors &by, float reciprocal, float x)
{
    const uint32_t moved = moved_bits(by, x);
    const uint64_t rounded = rounded_bits(moved);
    const float middle = __uint_as_float((moved + 0x1000) & ~0x1fffu) * 0x1p126f * by.second,
                near = __fmul_rn(fabsf(x), reciprocal),
                quotient = __fmaf_rn(__fmaf_rn(-near, by.first, fabsf(x)), reciprocal, near);
    const bool odd = (rounded >> 32 & 1) != 0;
    return (uint32_t)rounded < 2 * FP4_CLOSE && (quotient < middle || (quotient == middle && odd));
}

/* Codes by the divisors; false where they need exact divisions. TINY: values may be so small that a quotient
 * is 0; others are at least 2^-133, and the divisors and their product at most 2^10. */
template <bool TINY>
__device__ __forceinline__ bool fast_codes(fp4_block &b, const float (&x)[FP4_BLOCK], float first,
                                           float second)
{
    enum { GROUP = 4 };
    const float divisor = __fmul_rn(first, second);
    const fp4_divisors by = {first, second, __frcp_rn(divisor) * (1.0f / 6.0f)};
    uint32_t nearest[FP4_BLOCK / GROUP], least = ~0u, codes[2] = {0, 0};
    if (!(divisor > 0x1p-60f && divisor <= 0x1p10f)) return false;
#pragma unroll
    for (int i = FP4_BLOCK - 1; i >= 0; i--) {
        const uint64_t rounded = rounded_bits(moved_bits(by, x[i]));
        nearest[i / GROUP] =
            i % GROUP == GROUP - 1 ? (uint32_t)rounded : min(nearest[i / GROUP], (uint32_t)rounded);
        codes[i / 8] = codes[i / 8] * 16 + (uint32_t)(rounded >> 32);
        if constexpr (TINY) least = min(least, (__float_as_uint(x[i]) << 1) - 1);
    }
    if (least < 0x20000000u) return false; /* 2^-95: zeros are above all */
#pragma unroll
    for (int g = 0; g < FP4_BLOCK / GROUP; g++) {
        if (nearest[g] >= 2 * FP4_CLOSE) continue;
        const float reciprocal = __frcp_rn(first);
        fp4_divisors again = by;
        asm volatile("" : "+f"(again.inverse)); /* else products of above stay in registers for this */
#pragma unroll
        for (int i = g * GROUP; i < (g + 1) * GROUP; i++)
            codes[i / 8] -= (uint32_t)is_below(again, reciprocal, x[i]) << 4 * (i % 8);
    }
    b.codes[0] = codes[0] | signs_of(x);
    b.codes[1] = codes[1] | signs_of(x + 8);
    return true;
}

/* The scale by a profile's rule from the largest magnitude of x, or of x / G. */
__device__ __forceinline__ int scale_of(fp4_kind kind, float global, float largest)
{
    if (kind == FP4_MODELOPT) {
        float p = __fdiv_rn(largest, __fmul_rn(6.0f, global));
        p = p == 0.0f ? 1.0f : p;
        return saturated_e4m3(p < 0x1p-9f ? 0x1p-9f : p);
    }
    if (kind == FP4_COMPRESSED) {
        const int byte = saturated_e4m3(__fmul_rn(global, __fdiv_rn(largest, 6.0f)));
        return byte == 0 ? 0x20 : byte;
    }
    return saturated_e4m3(sixth_of(largest)); /* at least 6 2^-9 */
}

/* Profiles whose codes are of x / divisor. */
template <bool TINY>
__device__ __forceinline__ fp4_block one_division(fp4_kind kind, float global, const float (&x)[FP4_BLOCK],
                                                  float largest)
{
    fp4_block b = {{0, 0}, scale_of(kind, global, largest)};
    const float s = e4m3_value(b.scale),
                divisor = kind == FP4_MODELOPT ? __fmul_rn(s, global) : __fdiv_rn(s, global);
    if ((kind == FP4_MODELOPT && divisor == 0.0f) || fast_codes<TINY>(b, x, divisor, 1.0f)) return b;
    b.codes[0] = b.codes[1] = 0;
    for (int i = 0; i < FP4_BLOCK; i++) add_code(b, i, code_of(__fdiv_rn(x[i], divisor), false));
    return b;
}

/* Quantises a block by `global`, G or R. largest: of the magnitudes. TINY: values may be below 2^-133. */
template <fp4_kind KIND, bool TINY>
__device__ __forceinline__ fp4_block quantise_block(float global, bool reciprocal,
                                                    const float (&x)[FP4_BLOCK], float largest)
{
    if (KIND == FP4_MODELOPT || KIND == FP4_COMPRESSED) return one_division<TINY>(KIND, global, x, largest);
    const float g = reciprocal ? __fdiv_rn(1.0f, global) : global, a = __fdiv_rn(largest, g);
    fp4_block b = {{0, 0}, 0};
    if (!(a >= 6 * 0x1p-9f)) return b;
    b.scale = scale_of(KIND, g, a);
    if (KIND == FP4_RNE && (TINY || g <= 0x1p10f) && fast_codes<TINY>(b, x, g, e4m3_value(b.scale))) return b;
    float xn[FP4_BLOCK];
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) xn[i] = __fdiv_rn(x[i], g);
    if (KIND == FP4_FOUR_OVER_SIX || KIND == FP4_SEARCH)
        b.scale = better_scale(xn, a, b.scale, KIND == FP4_SEARCH);
    const float s = e4m3_value(b.scale);
    b.codes[0] = b.codes[1] = 0;
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) add_code(b, i, code_of(__fdiv_rn(xn[i], s), KIND == FP4_HALF_STEPS));
    return b;
}

/* The value of a code. */
__device__ __forceinline__ float fp4_value(bool reciprocal, float global, int code, float scale)
{
    const float value = signed_e2m1(code);
    return reciprocal ? __fmul_rn(value, __fdiv_rn(scale, global))
                      : __fmul_rn(__fmul_rn(value, scale), global);
}

/* The global of a profile from the largest magnitude: G, or R. */
__device__ __forceinline__ float global_from_largest(quantise_profile profile, float amax)
{
    if (profile == QUANTISE_PROFILE_MODELOPT)
        return amax == 0.0f ? 1.0f : fmaxf(__fdiv_rn(amax, 2688.0f), 0x1p-149f);
    if (profile == QUANTISE_PROFILE_COMPRESSED_TENSORS) {
        const float r = __fmul_rn(__fdiv_rn(1.0f, amax), 2688.0f);
        return isfinite(r) ? r : 1.0f;
    }
    return __fdiv_rn(fmaxf(amax, 1e-8f), 2688.0f);
}

/* A block as it stands in memory: sixteen values of a row that starts at `row`, from column c on; zeros past
 * column n. `wide`: rows allow 16-byte loads. */
template <typename T> struct raw_block {
    uint4 words[sizeof(T)];

    __device__ __forceinline__ void load(const T *row, int64_t c, int64_t n, bool wide)
    {
        if (wide && c + FP4_BLOCK <= n) {
#pragma unroll
            for (unsigned i = 0; i < sizeof(T); i++) words[i] = __ldcs((const uint4 *)(row + c) + i);
        } else {
#pragma unroll
            for (int i = 0; i < FP4_BLOCK; i++)
                ((T *)words)[i] = c + i < n ? row[c + i] : from_float<T>(0.0f);
        }
    }
    __device__ __forceinline__ void values(float (&x)[FP4_BLOCK]) const
    {
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i++) x[i] = to_float<T>(((const T *)words)[i]);
    }
};

/* The largest magnitude's bits; at least those of infinity where one is not finite. */
__device__ __forceinline__ uint32_t largest_bits(const float (&x)[FP4_BLOCK])
{
    float most = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < FP4_BLOCK; i++) asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(fabsf(x[i])));
    return __float_as_uint(most);
}

enum : uint32_t { INFINITE_BITS = 0x7f800000 };

/* The largest magnitude of a block, in which what is not finite becomes 0; *bad says that there was some. */
__device__ __forceinline__ float largest_finite(float (&x)[FP4_BLOCK], bool *bad)
{
    const uint32_t most = largest_bits(x);
    *bad = most >= INFINITE_BITS;
    if (!*bad) return __uint_as_float(most);
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) x[i] = isfinite(x[i]) ? x[i] : 0.0f;
    return __uint_as_float(largest_bits(x));
}

/* Whether a global scale is one: finite and above 0. */
__device__ __forceinline__ bool is_global(float g)
{
    return g > 0.0f && g < INFINITY;
}

#endif
