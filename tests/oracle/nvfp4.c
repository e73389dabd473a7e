/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4.c - the format and its quantisers, by definition. */
#include "oracle/nvfp4.h"

#include <math.h>

static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};

float oracle_e2m1(int code)
{
    return code < 8 ? magnitudes[code] : -magnitudes[code - 8];
}

float oracle_e4m3(int byte)
{
    const int exponent = byte / 8, mantissa = byte % 8;
    const float eighths = (float)(exponent == 0 ? mantissa : 8 + mantissa);
    return exponent == 0 ? eighths * 0x1p-9f : eighths * 0x1p-10f * (float)(1 << exponent);
}

/* Between neighbours a and b of the list: which one x rounds to. Ties go to the even index. */
static bool rounds_up(double x, double a, double b, int index)
{
    const double middle = (a + b) / 2;
    return x > middle || (x == middle && index % 2 == 1);
}

int oracle_e2m1_nearest(float magnitude)
{
    int code = 0;
    while (code < 7 && rounds_up(magnitude, magnitudes[code], magnitudes[code + 1], code)) code++;
    return code;
}

int oracle_e4m3_nearest(float x)
{
    int byte = 0;
    while (byte < 126 && rounds_up(x, oracle_e4m3(byte), oracle_e4m3(byte + 1), byte)) byte++;
    return byte;
}

float oracle_nvfp4_global(oracle_profile profile, float amax)
{
    if (profile == ORACLE_MODELOPT) {
        if (amax == 0) return 1;
        const float g = amax / 2688.0f;
        return g > 0 ? g : 0x1p-149f;
    }
    if (profile == ORACLE_COMPRESSED) {
        const float inverse = 1.0f / amax, r = inverse * 2688.0f;
        return isfinite(r) ? r : 1;
    }
    return (amax > 1e-8f ? amax : 1e-8f) / 2688.0f;
}

static float clip6(float magnitude)
{
    return magnitude < 6 ? magnitude : 6;
}

static uint8_t code_of(oracle_profile profile, float y)
{
    static const int half_steps[13] = {0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 7, 7};
    const float magnitude = clip6(fabsf(y));
    const int code =
        profile == ORACLE_HALFSTEP ? half_steps[(int)rintf(2 * magnitude)] : oracle_e2m1_nearest(magnitude);
    return (uint8_t)(code + (y < 0 ? 8 : 0));
}

static float largest(const float x[16])
{
    float a = 0;
    for (int i = 0; i < 16; i++)
        if (fabsf(x[i]) > a) a = fabsf(x[i]);
    return a;
}

static int block_modelopt(float global, const float x[16], uint8_t codes[16])
{
    float p = largest(x) / (6 * global);
    if (p == 0) p = 1;
    if (p < 0x1p-9f) p = 0x1p-9f;
    const int byte = oracle_e4m3_nearest(p > 448 ? 448 : p);
    const float divisor = oracle_e4m3(byte) * global;
    for (int i = 0; i < 16; i++) codes[i] = divisor == 0 ? 0 : code_of(ORACLE_MODELOPT, x[i] / divisor);
    return byte;
}

static int block_compressed(float r, const float x[16], uint8_t codes[16])
{
    const float p = r * (largest(x) / 6);
    int byte = oracle_e4m3_nearest(p > 448 ? 448 : p);
    if (byte == 0) byte = 0x20; /* 0.125 */
    const float divisor = oracle_e4m3(byte) / r;
    for (int i = 0; i < 16; i++) codes[i] = code_of(ORACLE_COMPRESSED, x[i] / divisor);
    return byte;
}

/* Sum of squared errors of a candidate, in f32 and in the order of the index. */
static float error_of(const float xn[16], int byte)
{
    const float s = oracle_e4m3(byte);
    float sum = 0;
    for (int i = 0; i < 16; i++) {
        const float product = oracle_e2m1(code_of(ORACLE_RNE, xn[i] / s)) * s;
        const float difference = product - xn[i];
        const float square = difference * difference;
        sum += square;
    }
    return sum;
}

/* The scale byte that the choice makes of a normalised block whose largest magnitude is a. */
static int choose(oracle_scales scales, const float xn[16], float a)
{
    const int nearest = oracle_e4m3_nearest(a / 6);
    float best = INFINITY;
    int chosen = nearest;
    if (scales == ORACLE_SCALES_RNE) return nearest;
    if (scales == ORACLE_SCALES_FOUR_OVER_SIX) {
        const int four = oracle_e4m3_nearest(a / 4);
        const float six_error = error_of(xn, nearest), four_error = error_of(xn, four);
        if (!isfinite(four_error)) return nearest;
        return !isfinite(six_error) || four_error < six_error ? four : nearest;
    }
    for (int byte = nearest - 3; byte <= nearest + 8; byte++) {
        if (byte < 1 || byte > 126) continue;
        const float error = error_of(xn, byte);
        if (isfinite(error) && error < best) {
            best = error;
            chosen = byte;
        }
    }
    return chosen;
}

int oracle_nvfp4_block(oracle_profile profile, oracle_scales scales, float global, const float x[16],
                       uint8_t codes[16])
{
    float xn[16];
    if (scales == ORACLE_SCALES_RNE && profile == ORACLE_MODELOPT) return block_modelopt(global, x, codes);
    if (scales == ORACLE_SCALES_RNE && profile == ORACLE_COMPRESSED)
        return block_compressed(global, x, codes);
    const float g = profile == ORACLE_COMPRESSED ? 1.0f / global : global;
    for (int i = 0; i < 16; i++) xn[i] = x[i] / g;
    const float a = largest(xn);
    for (int i = 0; i < 16; i++) codes[i] = 0;
    if (a < 6 * 0x1p-9f) return 0;
    const int byte = choose(scales, xn, a);
    const float s = oracle_e4m3(byte);
    for (int i = 0; i < 16; i++)
        codes[i] = code_of(profile == ORACLE_HALFSTEP ? ORACLE_HALFSTEP : ORACLE_RNE, xn[i] / s);
    return byte;
}

float oracle_nvfp4_value(oracle_profile profile, float global, int scale, int code)
{
    if (profile == ORACLE_COMPRESSED) {
        const float s = oracle_e4m3(scale) / global;
        return oracle_e2m1(code) * s;
    }
    const float scaled = oracle_e2m1(code) * oracle_e4m3(scale);
    return scaled * global;
}

static bool all_zero(const uint8_t codes[32])
{
    for (int i = 0; i < 32; i++)
        if (codes[i] % 8 != 0) return false;
    return true;
}

int64_t oracle_nvfp4_from_mxfp4(uint8_t *codes, const uint8_t *exponents, int64_t blocks, uint8_t *scales,
                                float *global)
{
    int largest_exponent = -1;
    int64_t rounded = 0;
    for (int64_t b = 0; b < blocks; b++)
        if (!all_zero(codes + 32 * b) && exponents[b] > largest_exponent) largest_exponent = exponents[b];
    *global = largest_exponent < 0 ? 1 : ldexpf(1, largest_exponent - 127 - 8);
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *c = codes + 32 * b;
        const int power = exponents[b] - largest_exponent + 8; /* of the scale */
        const bool zero = all_zero(c), below = !zero && power < -9;
        scales[2 * b] = zero ? 0 : below ? 1 : (uint8_t)oracle_e4m3_nearest(ldexpf(1, power));
        scales[2 * b + 1] = scales[2 * b];
        if (!below) continue;
        rounded++;
        for (int i = 0; i < 32; i++)
            c[i] = (uint8_t)(oracle_e2m1_nearest(ldexpf(oracle_e2m1(c[i] % 8), power + 9)) + (c[i] & 8));
    }
    return rounded;
}

int64_t oracle_swizzled_at(int64_t row, int64_t column, int64_t columns)
{
    const int64_t tiles = (columns + 3) / 4;
    return (row / 128 * tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

int64_t oracle_interleaved_at(int64_t i, bool up, int64_t granularity)
{
    return i / granularity * 2 * granularity + i % granularity + (up ? granularity : 0);
}
