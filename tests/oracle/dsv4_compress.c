/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_compress.c - the compressors of DeepSeek-V4 and their gradients. */
#include "dsv4.h"

#include <math.h>
#include <stdlib.h>

/* One position that a block's softmax takes in. The d_ pointers are NULL where no gradient is wanted. */
typedef struct term {
    double value, logit;
    double *d_value, *d_logit, *d_bias;
} term;

static double *moved(double *p, int64_t by)
{
    return p != NULL ? p + by : NULL;
}

/* The positions of block i for channel ch: the series b of the block before, then its own. Returns how many.
 */
static int64_t terms_of(const oracle_compressor *c, const oracle_compress_arrays *x, int64_t i, int64_t ch,
                        term *terms)
{
    const int64_t r = c->ratio, width = c->width, columns = (c->overlap ? 4 : 2) * width;
    int64_t count = 0;
    for (int64_t j = 0; c->overlap && j < r; j++) {
        const int64_t bias = j * width + ch;
        if (i > 0) {
            const int64_t at = (c->start_token + (i - 1) * r + j) * columns + 2 * width + ch;
            terms[count++] = (term){x->proj[at], x->proj[at + width] + x->b_b[bias], moved(x->d_proj, at),
                                    moved(x->d_proj, at + width), moved(x->d_b_b, bias)};
        } else if (x->prev_b != NULL) {
            const int64_t at = j * 2 * width + ch;
            terms[count++] =
                (term){x->prev_b[at], x->prev_b[at + width] + x->b_b[bias], moved(x->d_prev_b, at),
                       moved(x->d_prev_b, at + width), moved(x->d_b_b, bias)};
        }
    }
    for (int64_t j = 0; j < r; j++) {
        const int64_t bias = j * width + ch, at = (c->start_token + i * r + j) * columns + ch;
        terms[count++] = (term){x->proj[at], x->proj[at + width] + x->b_a[bias], moved(x->d_proj, at),
                                moved(x->d_proj, at + width), moved(x->d_b_a, bias)};
    }
    return count;
}

/* Replaces each logit by its share; all -inf: zeros. */
static void softmax(term *terms, int64_t count)
{
    double most = -INFINITY, sum = 0;
    for (int64_t n = 0; n < count; n++)
        if (terms[n].logit > most || isnan(terms[n].logit)) most = terms[n].logit;
    for (int64_t n = 0; n < count; n++) {
        terms[n].logit = terms[n].logit == -INFINITY ? 0 : exp(terms[n].logit - most);
        sum += terms[n].logit;
    }
    for (int64_t n = 0; n < count; n++) terms[n].logit = sum == 0 ? 0 : terms[n].logit / sum;
}

static double weighted(const term *terms, int64_t count)
{
    double sum = 0;
    for (int64_t n = 0; n < count; n++)
        if (terms[n].logit != 0) sum += terms[n].logit * terms[n].value;
    return sum;
}

void oracle_dsv4_pool(const oracle_compressor *c, const oracle_compress_arrays *x)
{
    term *terms = malloc((size_t)(2 * c->ratio) * sizeof *terms);
    for (int64_t i = 0; terms != NULL && i < c->blocks; i++) {
        for (int64_t ch = 0; ch < c->width; ch++) {
            const int64_t count = terms_of(c, x, i, ch, terms);
            softmax(terms, count);
            x->pooled[i * c->width + ch] = weighted(terms, count);
        }
    }
    free(terms);
}

void oracle_dsv4_rotate(double *row, int64_t width, const double *cos_sin, int64_t dim, int64_t position,
                        bool inverse)
{
    for (int64_t m = 0; m < dim / 2; m++) {
        double *pair = row + width - dim + 2 * m;
        const double cosine = cos_sin[position * dim + m],
                     sine = (inverse ? -1 : 1) * cos_sin[position * dim + dim / 2 + m];
        const double first = pair[0] * cosine - pair[1] * sine;
        pair[1] = pair[0] * sine + pair[1] * cosine;
        pair[0] = first;
    }
}

/* Entry (i, j) of the Sylvester matrix is -1 to the number of bits that i and j share. */
static void hadamard(double *row, int64_t n)
{
    double *in = malloc((size_t)n * sizeof *in);
    if (in == NULL) return;
    for (int64_t i = 0; i < n; i++) in[i] = row[i];
    for (int64_t i = 0; i < n; i++) {
        row[i] = 0;
        for (int64_t j = 0; j < n; j++)
            row[i] += (__builtin_parityll((unsigned long long)(i & j)) ? -1 : 1) * in[j];
        row[i] /= sqrt((double)n);
    }
    free(in);
}

static double inverse_rms(const oracle_compressor *c, const double *row)
{
    double sum = 0;
    for (int64_t ch = 0; ch < c->width; ch++) sum += row[ch] * row[ch];
    return 1 / sqrt(sum / (double)c->width + c->eps);
}

static int64_t position_of(const oracle_compressor *c, int64_t i)
{
    return c->start_abs_pos + i * c->ratio + (c->rope_last ? c->ratio - 1 : 0);
}

void oracle_dsv4_finish(const oracle_compressor *c, const oracle_compress_arrays *x)
{
    for (int64_t i = 0; i < c->blocks; i++) {
        const double *in = x->pooled + i * c->width;
        double *row = x->out + i * c->width;
        const double scale = x->norm_weight != NULL ? inverse_rms(c, in) : 1;
        for (int64_t ch = 0; ch < c->width; ch++)
            row[ch] = in[ch] * scale * (x->norm_weight != NULL ? x->norm_weight[ch] : 1);
        oracle_dsv4_rotate(row, c->width, x->cos_sin, c->rope_dim, position_of(c, i), false);
        if (c->hadamard) hadamard(row, c->width);
    }
}

/* The gradient of a block's pooled row from that of its output. */
static void finish_backward(const oracle_compressor *c, const oracle_compress_arrays *x, int64_t i, double *d)
{
    const double *in = x->pooled + i * c->width;
    for (int64_t ch = 0; ch < c->width; ch++) d[ch] = x->d_out[i * c->width + ch];
    if (c->hadamard) hadamard(d, c->width); /* symmetric */
    oracle_dsv4_rotate(d, c->width, x->cos_sin, c->rope_dim, position_of(c, i), true);
    if (x->norm_weight == NULL) return;
    const double scale = inverse_rms(c, in);
    double dot = 0;
    for (int64_t ch = 0; ch < c->width; ch++) {
        if (x->d_norm_weight != NULL) x->d_norm_weight[ch] += d[ch] * in[ch] * scale;
        dot += d[ch] * x->norm_weight[ch] * in[ch];
    }
    for (int64_t ch = 0; ch < c->width; ch++)
        d[ch] = scale * (d[ch] * x->norm_weight[ch] - in[ch] * scale * scale * dot / (double)c->width);
}

void oracle_dsv4_compress_backward(const oracle_compressor *c, const oracle_compress_arrays *x)
{
    term *terms = malloc((size_t)(2 * c->ratio) * sizeof *terms);
    double *d = malloc((size_t)c->width * sizeof *d);
    for (int64_t i = 0; terms != NULL && d != NULL && i < c->blocks; i++) {
        finish_backward(c, x, i, d);
        for (int64_t ch = 0; ch < c->width; ch++) {
            const int64_t count = terms_of(c, x, i, ch, terms);
            softmax(terms, count);
            const double pooled = weighted(terms, count);
            for (int64_t n = 0; n < count; n++) {
                if (terms[n].logit == 0) continue;
                const double d_logit = terms[n].logit * (terms[n].value - pooled) * d[ch];
                if (terms[n].d_value != NULL) *terms[n].d_value += terms[n].logit * d[ch];
                if (terms[n].d_logit != NULL) *terms[n].d_logit += d_logit;
                if (terms[n].d_bias != NULL) *terms[n].d_bias += d_logit;
            }
        }
    }
    free(terms);
    free(d);
}

void oracle_dsv4_multiply(const double *x, const double *w, int64_t rows, int64_t k, int64_t n, double *y)
{
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < n; j++) y[i * n + j] = 0;
        for (int64_t p = 0; p < k; p++)
            for (int64_t j = 0; j < n; j++) y[i * n + j] += x[i * k + p] * w[p * n + j];
    }
}

void oracle_dsv4_rope_table(int64_t max_pos, int64_t dim, float base, float factor, float length,
                            float beta_fast, float beta_slow, double *table)
{
    const double turn = 6.283185307179586;
    float low = 0, high = 0;
    if (factor != 0) {
        const double per = 2 * log((double)base);
        low = (float)floor((double)dim * log((double)length / (turn * (double)beta_fast)) / per);
        high = (float)ceil((double)dim * log((double)length / (turn * (double)beta_slow)) / per);
        if (low < 0) low = 0;
        if (high > (float)(dim - 1)) high = (float)(dim - 1);
        if (low == high) high += 0.001f;
    }
    for (int64_t m = 0; m < dim / 2; m++) {
        const float exponent = (float)(2 * m) / (float)dim,
                    power = (float)pow((double)base, (double)exponent);
        float inverse = 1.0f / power;
        if (factor != 0) {
            float ramp = ((float)m - low) / (high - low);
            ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
            const float stretched = inverse / factor, slow = stretched * ramp, rest = 1.0f - ramp,
                        fast = inverse * rest;
            inverse = slow + fast;
        }
        for (int64_t p = 0; p < max_pos; p++) {
            const float angle = (float)p * inverse;
            table[p * dim + m] = (double)(float)cos((double)angle);
            table[p * dim + dim / 2 + m] = (double)(float)sin((double)angle);
        }
    }
}
