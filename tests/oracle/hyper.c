/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.c - hyper-connections in double. */
#include "oracle/hyper.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

enum { MATRIX = ORACLE_COPIES * ORACLE_COPIES, STEPS = 2 * 64 };

static int64_t weights_of(const oracle_hyper *o)
{
    return o->head ? o->copies : o->copies * (o->copies + 2);
}

static double scale_of(const oracle_hyper *o, int64_t j)
{
    return o->scale[j < o->copies ? 0 : j < 2 * o->copies ? 1 : 2];
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* The sum of the row (or column) of entry (i, k). */
static double line_sum(const double *c, int64_t n, int rows, int64_t i, int64_t k)
{
    double sum = 0;
    for (int64_t l = 0; l < n; l++) sum += rows ? c[i * n + l] : c[l * n + k];
    return sum;
}

/* The softmax of a row's logits. */
static void soften(const double *z, int64_t n, double *p)
{
    double most = z[0], sum = 0;
    for (int64_t k = 1; k < n; k++)
        if (!(z[k] <= most)) most = z[k];
    for (int64_t k = 0; k < n; k++) sum += exp(z[k] - most);
    for (int64_t k = 0; k < n; k++) p[k] = exp(z[k] - most) / sum;
}

/* matrices[s] is what step s divides; matrices[2 iters - 1] the result. */
static void sinkhorn(const oracle_hyper *o, const double *soft, double matrices[STEPS][MATRIX])
{
    const int64_t n = o->copies;
    for (int64_t i = 0; i < n * n; i++) matrices[0][i] = soft[i] + o->eps;
    for (int s = 0; s < 2 * o->iters - 1; s++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < n; k++)
                matrices[s + 1][i * n + k] =
                    matrices[s][i * n + k] / (line_sum(matrices[s], n, s % 2 == 1, i, k) + o->eps);
}

void oracle_hyper_weights(const oracle_hyper *o, const double *sums, double mean_square, double *weights)
{
    static double matrices[STEPS][MATRIX];
    double logit[ORACLE_WEIGHTS], soft[MATRIX];
    const int64_t n = o->copies;
    const double root = sqrt(mean_square + o->rms_eps);
    for (int64_t j = 0; j < weights_of(o); j++) logit[j] = sums[j] / root * scale_of(o, j) + o->base[j];
    for (int64_t i = 0; i < n; i++) weights[i] = sigmoid(logit[i]) + o->eps;
    if (o->head) return;
    for (int64_t i = n; i < 2 * n; i++) weights[i] = 2 * sigmoid(logit[i]);
    for (int64_t i = 0; i < n; i++) soften(logit + 2 * n + i * n, n, soft + i * n);
    sinkhorn(o, soft, matrices);
    memcpy(weights + 2 * n, matrices[2 * o->iters - 1], sizeof(double) * (size_t)(n * n));
}

/* d: of the result of the steps, then of what they divide first. */
static void sinkhorn_backward(const oracle_hyper *o, double matrices[STEPS][MATRIX], double *d)
{
    const int64_t n = o->copies;
    for (int s = 2 * o->iters - 2; s >= 0; s--) {
        const int rows = s % 2 == 1;
        double product[MATRIX], before[MATRIX];
        for (int64_t e = 0; e < n * n; e++) product[e] = d[e] * matrices[s][e];
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < n; k++) {
                const double sum = line_sum(matrices[s], n, rows, i, k) + o->eps;
                before[i * n + k] = d[i * n + k] / sum - line_sum(product, n, rows, i, k) / (sum * sum);
            }
        memcpy(d, before, sizeof(double) * (size_t)(n * n));
    }
}

/* The gradient of the logits. */
static void logits_backward(const oracle_hyper *o, const double *logit, const double *d_weights, double *d)
{
    static double matrices[STEPS][MATRIX];
    double soft[MATRIX];
    const int64_t n = o->copies;
    for (int64_t i = 0; i < (o->head ? n : 2 * n); i++)
        d[i] = d_weights[i] * (i < n ? 1 : 2) * sigmoid(logit[i]) * sigmoid(-logit[i]);
    if (o->head) return;
    for (int64_t i = 0; i < n; i++) soften(logit + 2 * n + i * n, n, soft + i * n);
    sinkhorn(o, soft, matrices);
    memcpy(d + 2 * n, d_weights + 2 * n, sizeof(double) * (size_t)(n * n));
    sinkhorn_backward(o, matrices, d + 2 * n);
    for (int64_t i = 0; i < n; i++) {
        double *row = d + 2 * n + i * n, sum = 0;
        for (int64_t k = 0; k < n; k++) sum += row[k] * soft[i * n + k];
        for (int64_t k = 0; k < n; k++) row[k] = soft[i * n + k] * (row[k] - sum);
    }
}

double oracle_hyper_weights_backward(const oracle_hyper *o, const double *sums, double mean_square,
                                     const double *d_weights, double *d_sums, double *d_base, double *d_scale)
{
    double logit[ORACLE_WEIGHTS], d[ORACLE_WEIGHTS], d_root = 0;
    const int64_t n = o->copies;
    const double root = sqrt(mean_square + o->rms_eps);
    for (int64_t j = 0; j < weights_of(o); j++) logit[j] = sums[j] / root * scale_of(o, j) + o->base[j];
    logits_backward(o, logit, d_weights, d);
    for (int64_t j = 0; j < weights_of(o); j++) {
        d_base[j] += d[j];
        d_scale[j < n ? 0 : j < 2 * n ? 1 : 2] += d[j] * sums[j] / root;
        d_sums[j] += d[j] * scale_of(o, j) / root;
        d_root -= d[j] * scale_of(o, j) * sums[j] / (root * root);
    }
    return d_root / (2 * root);
}

/* A token's sums and mean square. */
static double sum_token(const oracle_hyper *o, const double *x, double *sums)
{
    const int64_t all = o->copies * o->width;
    double square = 0;
    for (int64_t c = 0; c < all; c++) square += x[c] * x[c];
    for (int64_t j = 0; j < weights_of(o); j++) {
        sums[j] = 0;
        for (int64_t c = 0; c < all; c++) sums[j] += o->fn[j * all + c] * x[c];
    }
    return square / (double)all;
}

static double collapsed(const oracle_hyper *o, const double *x, const double *p, int64_t c)
{
    double sum = 0;
    for (int64_t i = 0; i < o->copies; i++) sum += p[i] * x[i * o->width + c];
    return sum;
}

static void keep(double *to, int64_t token, const double *from, int64_t n)
{
    if (to != NULL) memcpy(to + token * n, from, sizeof(double) * (size_t)n);
}

void oracle_hyper_forward(const oracle_hyper *o, const oracle_hyper_out *out)
{
    const int64_t n = o->copies, width = o->width;
    for (int64_t t = 0; t < o->tokens; t++) {
        const double *x = o->x + t * n * width, *p = o->pre_in != NULL ? o->pre_in + t * n : NULL;
        double sums[ORACLE_WEIGHTS], w[ORACLE_WEIGHTS], square = 0;
        if (o->fn != NULL) square = sum_token(o, x, sums);
        if (o->fn != NULL) oracle_hyper_weights(o, sums, square, w);
        if (p == NULL) p = w;
        square = 0;
        for (int64_t c = 0; c < width; c++) square += pow(collapsed(o, x, p, c), 2);
        const double root = sqrt(square / (double)width + o->rms_eps);
        for (int64_t c = 0; c < width && out->h != NULL; c++)
            out->h[t * width + c] = collapsed(o, x, p, c) / root * o->norm_weight[c];
        if (o->fn == NULL || o->head) continue;
        keep(out->pre, t, w, n), keep(out->post, t, w + n, n), keep(out->comb, t, w + 2 * n, n * n);
        for (int64_t k = 0; k < n && o->f != NULL; k++)
            for (int64_t c = 0; c < width; c++) {
                double sum = w[n + k] * o->f[t * width + c];
                for (int64_t i = 0; i < n; i++) sum += w[2 * n + i * n + k] * x[i * width + c];
                out->x_new[(t * n + k) * width + c] = sum;
            }
    }
}

/* What d_h says of a token: adds to d_x, d_norm_weight and the weights on the way in. */
static void collapse_backward(const oracle_hyper *o, const oracle_hyper_grad *g, int64_t t, const double *p,
                              double *d_p)
{
    const int64_t n = o->copies, width = o->width;
    const double *x = o->x + t * n * width, *d_h = g->d_h + t * width;
    double square = 0, along = 0;
    for (int64_t c = 0; c < width; c++) {
        const double y = collapsed(o, x, p, c);
        square += y * y;
        along += d_h[c] * o->norm_weight[c] * y;
    }
    const double root = sqrt(square / (double)width + o->rms_eps);
    for (int64_t c = 0; c < width; c++) {
        const double y = collapsed(o, x, p, c),
                     d = d_h[c] * o->norm_weight[c] / root - y * along / ((double)width * pow(root, 3));
        g->d_norm_weight[c] += d_h[c] * y / root;
        for (int64_t i = 0; i < n; i++) {
            d_p[i] += d * x[i * width + c];
            g->d_x[(t * n + i) * width + c] += p[i] * d;
        }
    }
}

/* What d_new says: adds to d_x, d_f and the weights on the way out. */
static void expand_backward(const oracle_hyper *o, const oracle_hyper_grad *g, int64_t t, const double *w,
                            double *d_w)
{
    const int64_t n = o->copies, width = o->width;
    for (int64_t k = 0; k < n; k++)
        for (int64_t c = 0; c < width; c++) {
            const double d = g->d_new[(t * n + k) * width + c];
            d_w[n + k] += d * o->f[t * width + c];
            g->d_f[t * width + c] += d * w[n + k];
            for (int64_t i = 0; i < n; i++) {
                d_w[2 * n + i * n + k] += d * o->x[(t * n + i) * width + c];
                g->d_x[(t * n + i) * width + c] += d * w[2 * n + i * n + k];
            }
        }
}

static void add(double *to, const double *from, int64_t token, int64_t n)
{
    for (int64_t i = 0; from != NULL && i < n; i++) to[i] += from[token * n + i];
}

/* What the weights' gradient says of a token. */
static void mix_backward(const oracle_hyper *o, const oracle_hyper_grad *g, int64_t t, const double *sums,
                         double mean_square, const double *d_w)
{
    const int64_t all = o->copies * o->width;
    const double *x = o->x + t * all;
    double d_sums[ORACLE_WEIGHTS] = {0}, d_base[ORACLE_WEIGHTS] = {0}, d_scale[3] = {0};
    const double d_square = oracle_hyper_weights_backward(o, sums, mean_square, d_w, d_sums, d_base, d_scale);
    for (int64_t j = 0; j < weights_of(o); j++) {
        g->d_base[j] += d_base[j];
        g->base_squares[j] += d_base[j] * d_base[j];
        for (int64_t c = 0; c < all; c++) {
            g->d_fn[j * all + c] += d_sums[j] * x[c];
            g->d_x[t * all + c] += d_sums[j] * o->fn[j * all + c];
        }
    }
    for (int i = 0; i < (o->head ? 1 : 3); i++) {
        g->d_scale[i] += d_scale[i];
        g->scale_squares[i] += d_scale[i] * d_scale[i];
    }
    for (int64_t c = 0; c < all; c++) g->d_x[t * all + c] += d_square * 2 * x[c] / (double)all;
}

static void clear(double *x, int64_t n)
{
    if (x != NULL) memset(x, 0, sizeof *x * (size_t)n);
}

void oracle_hyper_backward(const oracle_hyper *o, const oracle_hyper_grad *g)
{
    const int64_t n = o->copies, width = o->width, j = weights_of(o);
    clear(g->d_x, o->tokens * n * width), clear(g->d_fn, j * n * width), clear(g->d_base, j);
    clear(g->d_scale, 3), clear(g->d_norm_weight, width), clear(g->d_f, o->tokens * width);
    clear(g->d_pre_in, o->tokens * n), clear(g->base_squares, j), clear(g->scale_squares, 3);
    for (int64_t t = 0; t < o->tokens; t++) {
        double sums[ORACLE_WEIGHTS], w[ORACLE_WEIGHTS], d_w[ORACLE_WEIGHTS] = {0}, square = 0;
        if (o->fn != NULL) square = sum_token(o, o->x + t * n * width, sums);
        if (o->fn != NULL) oracle_hyper_weights(o, sums, square, w);
        double *d_p = o->pre_in != NULL ? g->d_pre_in + t * n : d_w;
        if (g->d_h != NULL) collapse_backward(o, g, t, o->pre_in != NULL ? o->pre_in + t * n : w, d_p);
        if (g->d_new != NULL) expand_backward(o, g, t, w, d_w);
        add(d_w, g->d_pre, t, n), add(d_w + n, g->d_post, t, n), add(d_w + 2 * n, g->d_comb, t, n * n);
        if (o->fn != NULL) mix_backward(o, g, t, sums, square, d_w);
    }
}
