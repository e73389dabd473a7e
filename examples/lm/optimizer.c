/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * optimizer.c - Muon on the hidden matrices, AdamW on embeddings, norms, gates and head.
 *
 * Muon (momentum .95, Nesterov): the update is the momentum with its singular values pushed to about 1 by
 * five Newton-Schulz steps X <- a X + (b A + c A A) X, A = X X^T, times sqrt(max(1, out / in)). Each matrix
 * of a stack is one of its own.
 */
#include "lm.h"

#include <math.h>
#include <stdlib.h>

static bool newton_schulz(float *x, int64_t rows, int64_t cols)
{
    const bool wide = rows <= cols;
    const int64_t m = wide ? rows : cols, n = wide ? cols : rows;
    float *t = calloc((size_t)(m * n), 4), *a = malloc((size_t)(m * m) * 4), *b = malloc((size_t)(m * m) * 4),
          *y = malloc((size_t)(m * n) * 4);
    const bool ok = t != NULL && a != NULL && b != NULL && y != NULL;
    double norm = 0.0;
    for (int64_t i = 0; i < rows * cols; i++) norm += (double)x[i] * (double)x[i];
    const float scale = (float)(1.0 / (sqrt(norm) + 1e-7));
    for (int64_t r = 0; ok && r < rows; r++)
        for (int64_t c = 0; c < cols; c++) t[wide ? r * n + c : c * n + r] = x[r * cols + c] * scale;
    for (int step = 0; ok && step < 5; step++) {
        gemm(false, true, m, m, n, t, t, a, false);
        gemm(false, false, m, m, m, a, a, b, false);
        for (int64_t i = 0; i < m * m; i++) b[i] = -4.7750f * a[i] + 2.0315f * b[i];
        gemm(false, false, m, n, m, b, t, y, false);
        for (int64_t i = 0; i < m * n; i++) t[i] = 3.4445f * t[i] + y[i];
    }
    for (int64_t r = 0; ok && r < rows; r++)
        for (int64_t c = 0; c < cols; c++) x[r * cols + c] = t[wide ? r * n + c : c * n + r];
    free(t), free(a), free(b), free(y);
    return ok || failure("no memory for Muon's step of a matrix of %lld x %lld", (long long)rows,
                         (long long)cols) == 0;
}

static bool muon(lm_param *p, float rate)
{
    const int64_t n = p->rows * p->cols, rows = p->rows / p->stack;
    const float momentum = 0.95f, scale = rate * sqrtf(p->cols > rows ? (float)p->cols / (float)rows : 1.0f);
    for (int64_t i = 0; i < n; i++) {
        p->first[i] = momentum * p->first[i] + p->grad[i];
        p->grad[i] += momentum * p->first[i];
    }
    for (int64_t s = 0; s < p->stack; s++)
        if (!newton_schulz(p->grad + s * rows * p->cols, rows, p->cols)) return false;
    for (int64_t i = 0; i < n; i++) p->value[i] -= scale * p->grad[i];
    return true;
}

static void balance(lm_param *p, float rate)
{
    for (int64_t i = 0; i < p->rows * p->cols; i++)
        p->value[i] -= rate * (float)((p->grad[i] > 0.0f) - (p->grad[i] < 0.0f));
}

static void adamw(lm_param *p, float rate, int64_t step)
{
    const float b1 = 0.9f, b2 = 0.95f, decay = 0.01f, c1 = 1.0f / (1.0f - powf(b1, (float)step)),
                c2 = 1.0f / (1.0f - powf(b2, (float)step));
    const int64_t n = p->rows * p->cols;
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) {
        const float g = p->grad[i];
        p->first[i] = b1 * p->first[i] + (1.0f - b1) * g;
        p->second[i] = b2 * p->second[i] + (1.0f - b2) * g * g;
        p->value[i] -= rate * (p->first[i] * c1 / (sqrtf(p->second[i] * c2) + 1e-10f) + decay * p->value[i]);
    }
}

bool optimizer_step(lm_model *m, float schedule, lm_rates rates)
{
    m->step++;
    for (int32_t i = 0; i < m->param_count; i++) {
        lm_param *p = &m->params[i];
        if (p->value == NULL) continue;
        switch (p->rule) {
        case RULE_ADAMW: adamw(p, schedule * rates.adam * p->rate, m->step); break;
        case RULE_MUON:
            if (!muon(p, schedule * rates.muon)) return false;
            break;
        case RULE_BALANCE: balance(p, schedule * p->rate); break;
        }
    }
    return true;
}
