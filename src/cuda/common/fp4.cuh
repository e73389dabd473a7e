/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp4.cuh - a thread's block of 16 values to NVFP4 and back, bit for bit as the CPU's quantisers: every step
 * is one f32 rounding, products and sums are kept from becoming an FMA.
 *
 * Two exact divisions a value would take longer than memory. So codes come first from a product by the
 * reciprocal of scale and global, which is within 2^-20 of the quotient of quotients; where one of a block's
 * values is that close to the middle of two codes, or so small that a quotient may be 0, the block is done
 * again by division.
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
    const float m = fminf(s, 448.0f),
                power = fmaxf(__uint_as_float(__float_as_uint(m) & 0x7f800000), 0x1p-6f);
    const int bits = __float_as_int(power), magic = bits + (20 << 23);
    return __float_as_int(__fadd_rn(m, __int_as_float(magic))) - magic + ((bits - (121 << 23)) >> 20);
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

/* Codes of x / first / second (second 0: of x / first); false where they need exact divisions. */
__device__ __forceinline__ bool fast_codes(fp4_block &b, const float (&x)[FP4_BLOCK], float divisor)
{
    const float inverse = __frcp_rn(divisor), round = 12582912.0f;
    float off = 0.0f;
    uint32_t least = 0xffffffff;
    uint32_t codes[2] = {0, 0};
    if (!(divisor > 0x1p-60f && divisor < 0x1p20f)) return false;
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) {
        /* Codes rise with the magnitude y as the least of the lines 2 y, y + 2, y / 2 + 4 and 7, and are the
         * integer nearest to it, ties to even. */
        const float y = fabsf(x[i]) * inverse;
        const float line = fminf(fminf(y + y, y + 2.0f), fminf(fmaf(y, 0.5f, 4.0f), 7.0f));
        const float rounded = line + round;
        off = fmaxf(off, fabsf(line - (rounded - round)));
        const uint32_t bits = __float_as_uint(x[i] + 0.0f);
        least = min(least, bits + bits - 1);
        codes[i / 8] |= ((__float_as_uint(rounded) & 7) | (bits >> 28 & 8)) << 4 * (i % 8);
    }
    if (off > 0.5f - 0x1p-16f || least < 0x20000000u) return false; /* 2^-95: zeros are above all */
    b.codes[0] = codes[0];
    b.codes[1] = codes[1];
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
    return saturated_e4m3(__fdiv_rn(largest, 6.0f));
}

/* Profiles whose codes are of x / divisor. */
__device__ __forceinline__ fp4_block one_division(fp4_kind kind, float global, const float (&x)[FP4_BLOCK],
                                                  float largest)
{
    fp4_block b = {{0, 0}, scale_of(kind, global, largest)};
    const float s = e4m3_value(b.scale),
                divisor = kind == FP4_MODELOPT ? __fmul_rn(s, global) : __fdiv_rn(s, global);
    if ((kind == FP4_MODELOPT && divisor == 0.0f) || fast_codes(b, x, divisor)) return b;
    b.codes[0] = b.codes[1] = 0;
    for (int i = 0; i < FP4_BLOCK; i++) add_code(b, i, code_of(__fdiv_rn(x[i], divisor), false));
    return b;
}

/* Quantises a block by `global`, G or R. largest: of the magnitudes. */
template <fp4_kind KIND>
__device__ __forceinline__ fp4_block quantise_block(float global, bool reciprocal,
                                                    const float (&x)[FP4_BLOCK], float largest)
{
    if (KIND == FP4_MODELOPT || KIND == FP4_COMPRESSED) return one_division(KIND, global, x, largest);
    const float g = reciprocal ? __fdiv_rn(1.0f, global) : global, a = __fdiv_rn(largest, g);
    fp4_block b = {{0, 0}, 0};
    if (!(a >= 6 * 0x1p-9f)) return b;
    b.scale = scale_of(KIND, g, a);
    if (KIND == FP4_RNE && fast_codes(b, x, __fmul_rn(g, e4m3_value(b.scale)))) return b;
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

/* Sixteen values of a row that starts at `row`, from column c on; zeros past column n. `wide`: rows allow
 * 16-byte loads. */
template <typename T>
__device__ __forceinline__ void load_block(float (&x)[FP4_BLOCK], const T *row, int64_t c, int64_t n,
                                           bool wide)
{
    if (wide && c + FP4_BLOCK <= n) {
        uint4 raw[sizeof(T)];
#pragma unroll
        for (unsigned i = 0; i < sizeof(T); i++) raw[i] = __ldcs((const uint4 *)(row + c) + i);
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i++) x[i] = to_float<T>(((const T *)raw)[i]);
    } else {
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i++) x[i] = c + i < n ? to_float<T>(row[c + i]) : 0.0f;
    }
}

/* The largest magnitude's bits; at least those of infinity where one is not finite. */
__device__ __forceinline__ uint32_t largest_bits(const float (&x)[FP4_BLOCK])
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < FP4_BLOCK; i++) most = max(most, __float_as_uint(x[i]) & 0x7fffffff);
    return most;
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
