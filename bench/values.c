/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "values.h"

#include "core/half.h"
#include "team.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t value_count(const quern_tensor *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return 0; /* whatever the others are */
    for (int32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

double value_at(const quern_tensor *t, int64_t i)
{
    switch (t->dtype) {
    case QUERN_F16: return (double)float_from_f16(((const uint16_t *)t->data)[i]);
    case QUERN_BF16: return (double)float_from_bf16(((const uint16_t *)t->data)[i]);
    case QUERN_F64: return ((const double *)t->data)[i];
    default: return (double)((const float *)t->data)[i];
    }
}

void value_set(const quern_tensor *t, int64_t i, float v)
{
    if (t->dtype == QUERN_F32) ((float *)t->data)[i] = v;
    else if (t->dtype == QUERN_F16) ((uint16_t *)t->data)[i] = f16_from_float(v);
    else ((uint16_t *)t->data)[i] = bf16_from_float(v);
}

/* SplitMix64's finaliser: a counter becomes 64 random bits. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Two N(0,1) values by Box and Muller. */
static void normal_pair(uint64_t seed, int64_t pair, float out[2])
{
    const uint64_t bits = mix(seed * 0x9e3779b97f4a7c15u + (uint64_t)pair * 0xd1342543de82ef95u + 1);
    const float u = ((float)(bits >> 40) + 1.0f) * 0x1p-24f,
                angle = (float)(bits & 0xffffff) * (6.2831853f * 0x1p-24f);
    const float radius = sqrtf(-2.0f * logf(u));
    out[0] = radius * cosf(angle);
    out[1] = radius * sinf(angle);
}

void fill_normal(const quern_tensor *t, uint64_t seed)
{
    const int64_t n = value_count(t);
    const int team = openmp_team(0);
    (void)team; /* unused without OpenMP */
#pragma omp parallel for num_threads(team)
    for (int64_t i = 0; i < n; i += 2) {
        float pair[2];
        normal_pair(seed, i / 2, pair);
        value_set(t, i, pair[0]);
        if (i + 1 < n) value_set(t, i + 1, pair[1]);
    }
}

bool fill_smooth(const quern_tensor *t, uint64_t seed, double sigma)
{
    enum { REACH_MAX = 256 };
    const int reach = (int)(4 * sigma) < REACH_MAX ? (int)(4 * sigma) : REACH_MAX;
    const int64_t batch = t->shape[0], n = t->shape[1],
                  width = value_count(t) / (batch * n > 0 ? batch * n : 1);
    float weight[2 * REACH_MAX + 1] = {0};
    double square = 0;
    for (int i = -reach; i <= reach; i++) {
        const double w = exp(-0.5 * i * i / (sigma * sigma));
        weight[i + reach] = (float)w;
        square += w * w;
    }
    for (int i = 0; i <= 2 * reach; i++) weight[i] = (float)((double)weight[i] / sqrt(square));
    /* noise[0] belongs to token -reach, so that the first and last tokens have as many neighbours as the
     * others */
    const int64_t rows = n + 2 * reach;
    float *noise = malloc((size_t)(rows * width + 1) * sizeof *noise);
    if (noise == NULL) return false;
    const int team = openmp_team(0);
    (void)team;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t shape[] = {rows, width};
        const quern_tensor view = quern_tensor_contiguous(noise, QUERN_F32, 2, shape);
        fill_normal(&view, seed + 1000003u * (uint64_t)b);
#pragma omp parallel for num_threads(team)
        for (int64_t i = 0; i < n; i++) {
            float sum[64];
            for (int64_t c0 = 0; c0 < width; c0 += 64) {
                const int64_t c1 = c0 + 64 < width ? c0 + 64 : width;
                memset(sum, 0, sizeof sum);
                for (int r = 0; r <= 2 * reach; r++)
                    for (int64_t c = c0; c < c1; c++) sum[c - c0] += weight[r] * noise[(i + r) * width + c];
                for (int64_t c = c0; c < c1; c++) value_set(t, (b * n + i) * width + c, sum[c - c0]);
            }
        }
    }
    free(noise);
    return true;
}
