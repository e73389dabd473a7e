/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layers.c - everything of the model that is neither a matrix product nor attention, forward and backward.
 * Rows are independent, so OpenMP splits them; sums over rows run in fixed slices, so that a run repeats bit
 * by bit. */
#include "lm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLICES = 16 };

void norm_forward(const float *x, const float *w, float *y, float *inverse, int64_t rows, int64_t cols)
{
#pragma omp parallel for if (rows > FEW_ROWS)
    for (int64_t r = 0; r < rows; r++) {
        const float *p = x + r * cols;
        float sum = 0.0f;
        for (int64_t c = 0; c < cols; c++) sum += p[c] * p[c];
        const float inv = 1.0f / sqrtf(sum / (float)cols + 1e-6f);
        if (inverse != NULL) inverse[r] = inv;
        for (int64_t c = 0; c < cols; c++) y[r * cols + c] = p[c] * inv * (w != NULL ? w[c] : 1.0f);
    }
}

bool norm_backward(const float *x, const float *w, const float *inverse, const float *d_y, float *d_x,
                   float *d_w, int64_t rows, int64_t cols)
{
    float *part = w != NULL ? calloc((size_t)(SLICES * cols), sizeof *part) : NULL;
    if (w != NULL && part == NULL) return failure("no memory for the gradient of a norm") == 0;
    const int64_t slice = (rows + SLICES - 1) / SLICES;
#pragma omp parallel for schedule(static)
    for (int64_t s = 0; s < SLICES; s++)
        for (int64_t r = s * slice; r < (s + 1) * slice && r < rows; r++) {
            const float *p = x + r * cols, *g = d_y + r * cols, inv = inverse[r];
            float dot = 0.0f;
            for (int64_t c = 0; c < cols; c++) dot += p[c] * g[c] * (w != NULL ? w[c] : 1.0f);
            const float k = dot * inv * inv * inv / (float)cols;
            for (int64_t c = 0; c < cols; c++)
                d_x[r * cols + c] += g[c] * (w != NULL ? w[c] : 1.0f) * inv - p[c] * k;
            if (part != NULL)
                for (int64_t c = 0; c < cols; c++) part[s * cols + c] += g[c] * p[c] * inv;
        }
    if (part == NULL) return true;
    memset(d_w, 0, (size_t)cols * sizeof *d_w);
    for (int64_t s = 0; s < SLICES; s++)
        for (int64_t c = 0; c < cols; c++) d_w[c] += part[s * cols + c];
    free(part);
    return true;
}

void rope_apply(float *x, const float *table, int64_t tokens, int64_t heads, int64_t dim, int64_t rotated,
                float sign)
{
#pragma omp parallel for if (tokens > FEW_ROWS)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            float *p = x + (t * heads + h + 1) * dim - rotated;
            for (int64_t m = 0; m < rotated / 2; m++) {
                const float c = table[t * rotated + m], s = sign * table[t * rotated + rotated / 2 + m],
                            a = p[2 * m], b = p[2 * m + 1];
                p[2 * m] = a * c - b * s;
                p[2 * m + 1] = a * s + b * c;
            }
        }
}

void swiglu_forward(const float *gate, const float *up, float *divisor, float *y, int64_t rows, int64_t cols)
{
    const int64_t n = rows * cols;
#pragma omp parallel for if (rows > FEW_ROWS)
    for (int64_t i = 0; i < n; i++) {
        divisor[i] = 1.0f + expf(-gate[i]);
        y[i] = gate[i] / divisor[i] * up[i];
    }
}

void swiglu_backward(const float *gate, const float *up, const float *divisor, const float *d_y,
                     float *d_gate, float *d_up, int64_t n)
{
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        const float s = 1.0f / divisor[i], d = d_y[i];
        d_up[i] = d * gate[i] * s;
        d_gate[i] = d * up[i] * s * (1.0f + gate[i] * (1.0f - s));
    }
}

double cross_entropy(float *logits, const uint8_t *target, int64_t rows, bool gradient)
{
    double part[SLICES] = {0.0}, total = 0.0;
    const int64_t slice = (rows + SLICES - 1) / SLICES;
#pragma omp parallel for schedule(static)
    for (int64_t s = 0; s < SLICES; s++)
        for (int64_t r = s * slice; r < (s + 1) * slice && r < rows; r++) {
            float *p = logits + r * BYTES, top = p[0], sum = 0.0f;
            for (int c = 1; c < BYTES; c++) top = p[c] > top ? p[c] : top;
            const float at = p[target[r]];
            for (int c = 0; c < BYTES; c++) {
                const float e = expf(p[c] - top);
                sum += e;
                if (gradient) p[c] = e;
            }
            part[s] += (double)(logf(sum) + top - at);
            if (!gradient) continue;
            for (int c = 0; c < BYTES; c++) p[c] = p[c] / sum / (float)rows;
            p[target[r]] -= 1.0f / (float)rows;
        }
    for (int s = 0; s < SLICES; s++) total += part[s];
    return total / (double)rows;
}

/* Rows of the three tables for position t; what precedes the text counts as zeros. Hashes are multiplicative:
 * the upper 14 of 32 bits, for HASH_ROWS. */
static void rows_of(const uint8_t *text, int64_t t, int64_t row[3])
{
    const uint32_t a = text[t], b = t > 0 ? text[t - 1] : 0, c = t > 1 ? text[t - 2] : 0;
    row[0] = a;
    row[1] = (a | b << 8) * 2654435761u >> 18;
    row[2] = ((a | b << 8 | c << 16) * 2246822519u ^ 0x9e3779b9u) * 2654435761u >> 18;
}

void embed_forward(const lm_param *params, const uint8_t *text, int64_t position, float *x, int64_t n,
                   int64_t width)
{
#pragma omp parallel for if (n > FEW_ROWS)
    for (int64_t t = 0; t < n; t++) {
        int64_t row[3];
        rows_of(text, position + t, row);
        for (int64_t c = 0; c < width; c++)
            x[t * width + c] = params[P_BYTE].value[row[0] * width + c] +
                               params[P_PAIR].value[row[1] * width + c] +
                               params[P_TRIPLE].value[row[2] * width + c];
    }
}

void embed_backward(lm_param *params, const uint8_t *text, const float *d_x, int64_t n, int64_t width)
{
#pragma omp parallel for
    for (int table = 0; table < 3; table++) {
        float *grad = params[P_BYTE + table].grad;
        memset(grad, 0, (size_t)(params[P_BYTE + table].rows * width) * sizeof *grad);
        for (int64_t t = 0; t < n; t++) {
            int64_t row[3];
            rows_of(text, t, row);
            for (int64_t c = 0; c < width; c++) grad[row[table] * width + c] += d_x[t * width + c];
        }
    }
}
