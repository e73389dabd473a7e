/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_formats.c - the row formats of DeepSeek-V4's caches by search among the values that a code can have.
 */
#include "dsv4.h"

#include <math.h>
#include <string.h>

static double e4m3_value(int code)
{
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent == 0 ? mantissa * 0x1p-9 : (8 + mantissa) * 0x1p-10 * (1 << exponent);
    return code & 128 ? -size : size;
}

static double e2m1_value(int code)
{
    static const double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return (code & 8 ? -1 : 1) * sizes[code & 7];
}

/* The code of 0 ... last whose value is nearest to |x|; of two, the even one; beyond the last, the last. */
static int nearest(double (*value)(int), int last, double x)
{
    int below = 0, above = last + 1; /* value(below) <= |x| < value(above) */
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        if (value(middle) <= fabs(x)) below = middle;
        else above = middle;
    }
    if (above > last) return last;
    const double gain = fabs(x) - value(below) - (value(above) - fabs(x));
    return gain > 0 || (gain == 0 && above % 2 == 0) ? above : below;
}

static unsigned char e4m3_code(float x)
{
    return (unsigned char)(nearest(e4m3_value, 126, (double)x) | (signbit(x) ? 128 : 0));
}

/* The largest absolute value, -1 where one is NaN or infinite. */
static float largest(const float *row, int64_t n)
{
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(row[i])) return -1;
        if (fabsf(row[i]) > most) most = fabsf(row[i]);
    }
    return most;
}

/* The exponent of the least power of two that is not below x > 0. */
static int power_above(float x)
{
    int exponent;
    return frexpf(x, &exponent) == 0.5f ? exponent - 1 : exponent;
}

bool oracle_dsv4_quantise_fp8(const float *row, int64_t n, bool power_of_two, unsigned char *bytes)
{
    const float most = largest(row, n);
    if (most < 0) return false;
    float scale = (most > 1e-4f ? most : 1e-4f) / 448.0f;
    if (power_of_two) scale = ldexpf(1, power_above(scale));
    for (int64_t i = 0; i < n; i++) {
        const float quotient = row[i] / scale;
        bytes[i] = e4m3_code(quotient);
    }
    memcpy(bytes + n, &scale, 4);
    return true;
}

bool oracle_dsv4_quantise_fp4(const float *row, int64_t n, unsigned char *bytes)
{
    if (largest(row, n) < 0) return false;
    float most = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i % 32 == 0) most = largest(row + i, 32);
        const int exponent = power_above((most > 6 * 0x1p-126f ? most : 6 * 0x1p-126f) / 6.0f);
        const int code = nearest(e2m1_value, 7, ldexp((double)row[i], -exponent)) + (row[i] < 0 ? 8 : 0);
        bytes[i / 2] = (unsigned char)(i % 2 == 0 ? code : bytes[i / 2] | code << 4);
        bytes[n / 2 + i / 32] = (unsigned char)(exponent + 127);
    }
    return true;
}

bool oracle_dsv4_quantise_row584(const float *row, unsigned char bytes[584])
{
    if (largest(row, 512) < 0) return false;
    float most = 0;
    for (int i = 0; i < 448; i++) {
        if (i % 64 == 0) most = largest(row + i, 64);
        const int exponent = power_above((most > 1e-4f ? most : 1e-4f) / 448.0f);
        bytes[i] = e4m3_code((float)ldexp((double)row[i], -exponent));
        bytes[576 + i / 64] = (unsigned char)(exponent + 127);
    }
    for (int i = 0; i < 64; i++) { /* bf16: 8 bits of mantissa, in steps of the last one */
        const double x = (double)row[448 + i];
        int exponent;
        frexp(x, &exponent);
        const int last = exponent < -125 ? -133 : exponent - 8;
        const float rounded = (float)ldexp(nearbyint(ldexp(x, -last)), last);
        uint32_t bits;
        memcpy(&bits, &rounded, 4);
        bytes[448 + 2 * i] = (unsigned char)(bits >> 16 & 255);
        bytes[449 + 2 * i] = (unsigned char)(bits >> 24);
    }
    bytes[583] = 0;
    return true;
}

void oracle_dsv4_widen_fp8(const unsigned char *bytes, int64_t n, double *row)
{
    float scale;
    memcpy(&scale, bytes + n, 4);
    for (int64_t i = 0; i < n; i++) row[i] = e4m3_value(bytes[i]) * (double)scale;
}

void oracle_dsv4_widen_fp4(const unsigned char *bytes, int64_t n, double *row)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = ldexp(e2m1_value(bytes[i / 2] >> (i % 2 * 4) & 15), bytes[n / 2 + i / 32] - 127);
}

void oracle_dsv4_widen_row584(const unsigned char bytes[584], double *row)
{
    for (int i = 0; i < 448; i++) row[i] = ldexp(e4m3_value(bytes[i]), bytes[576 + i / 64] - 127);
    for (int i = 0; i < 64; i++) {
        const uint32_t bits = (uint32_t)bytes[448 + 2 * i] << 16 | (uint32_t)bytes[449 + 2 * i] << 24;
        float x;
        memcpy(&x, &bits, 4);
        row[448 + i] = (double)x;
    }
}

void oracle_dsv4_widen_weight(const unsigned char *codes, const unsigned char *powers, const float *scales,
                              int64_t n, int64_t k, double *w)
{
    const int64_t across = (k + 127) / 128;
    for (int64_t row = 0; row < n; row++) {
        for (int64_t column = 0; column < k; column++) {
            const int64_t block = row / 128 * across + column / 128;
            const double scale = scales != NULL ? (double)scales[block] : ldexp(1, powers[block] - 127);
            w[column * n + row] = e4m3_value(codes[row * k + column]) * scale;
        }
    }
}
