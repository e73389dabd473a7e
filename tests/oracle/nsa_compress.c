/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_compress.c - sizes, and the compression of tokens to entries with its gradient. */
#include "nsa.h"

#include <math.h>

int64_t oracle_nsa_stride(const oracle_nsa *a)
{
    return a->params.stride > 0 ? a->params.stride : a->params.block_size;
}

int64_t oracle_nsa_select_block(const oracle_nsa *a)
{
    return a->params.select_block > 0 ? a->params.select_block : a->params.block_size;
}

int64_t oracle_nsa_entries(const oracle_nsa *a)
{
    return a->n < a->params.block_size ? 0 : (a->n - a->params.block_size) / oracle_nsa_stride(a) + 1;
}

int64_t oracle_nsa_blocks(const oracle_nsa *a)
{
    return (a->n + oracle_nsa_select_block(a) - 1) / oracle_nsa_select_block(a);
}

int64_t oracle_nsa_tiles(const oracle_nsa *a)
{
    return (a->n + a->params.tile - 1) / a->params.tile;
}

int64_t oracle_nsa_lists(const oracle_nsa *a)
{
    return a->params.scope == QUERN_NSA_SCOPE_HEAD ? a->h : a->hkv;
}

/* Where x, pe and w hold element (p, c) of entry i's block for one head. */
typedef struct places {
    int64_t x, pe, w;
} places;

static places place(const oracle_nsa *a, int64_t dim, int64_t head, int64_t i, int64_t p, int64_t c)
{
    const int64_t l = a->params.block_size;
    const places at = {((i * oracle_nsa_stride(a) + p) * a->hkv + head) * dim + c, (head * l + p) * dim + c,
                       ((head * l + p) * dim + c) * dim};
    return at;
}

static double mean_of(const oracle_nsa *a, int64_t dim, const double *x, int64_t head, int64_t i, int64_t c)
{
    double sum = 0;
    for (int64_t p = 0; p < a->params.block_size; p++) sum += x[place(a, dim, head, i, p, c).x];
    return sum / (double)a->params.block_size;
}

void oracle_nsa_compress(const oracle_nsa *a, int64_t dim, const double *x, const double *w, const double *pe,
                         double *y)
{
    const bool linear = a->params.compress == QUERN_NSA_COMPRESS_LINEAR;
    for (int64_t i = 0; i < oracle_nsa_entries(a); i++) {
        for (int64_t head = 0; head < a->hkv; head++) {
            double *out = y + (i * a->hkv + head) * dim;
            for (int64_t e = 0; e < dim; e++) out[e] = 0;
            for (int64_t c = 0; c < dim; c++) {
                if (!linear) {
                    const double mean = mean_of(a, dim, x, head, i, c);
                    if (w == NULL) out[c] = mean;
                    for (int64_t e = 0; w != NULL && e < dim; e++)
                        out[e] += mean * w[(head * dim + c) * dim + e];
                }
                for (int64_t p = 0; linear && p < a->params.block_size; p++) {
                    const places at = place(a, dim, head, i, p, c);
                    const double value = x[at.x] + (pe != NULL ? pe[at.pe] : 0);
                    for (int64_t e = 0; e < dim; e++) out[e] += value * w[at.w + e];
                }
            }
        }
    }
}

static void mean_backward(const oracle_nsa *a, int64_t dim, const double *x, const double *w,
                          const double *d_y, double *d_x, double *d_w, int64_t head, int64_t i)
{
    const double *g = d_y + (i * a->hkv + head) * dim;
    for (int64_t c = 0; c < dim; c++) {
        double d_mean = w == NULL ? g[c] : 0;
        const double mean = mean_of(a, dim, x, head, i, c);
        for (int64_t e = 0; w != NULL && e < dim; e++) {
            d_mean += w[(head * dim + c) * dim + e] * g[e];
            if (d_w != NULL) d_w[(head * dim + c) * dim + e] += mean * g[e];
        }
        for (int64_t p = 0; p < a->params.block_size; p++)
            d_x[place(a, dim, head, i, p, c).x] += d_mean / (double)a->params.block_size;
    }
}

void oracle_nsa_compress_backward(const oracle_nsa *a, int64_t dim, const double *x, const double *w,
                                  const double *pe, const double *d_y, double *d_x, double *d_w, double *d_pe,
                                  double *pe_terms)
{
    for (int64_t i = 0; i < oracle_nsa_entries(a); i++) {
        for (int64_t head = 0; head < a->hkv; head++) {
            if (a->params.compress == QUERN_NSA_COMPRESS_MEAN) {
                mean_backward(a, dim, x, w, d_y, d_x, d_w, head, i);
                continue;
            }
            const double *g = d_y + (i * a->hkv + head) * dim;
            for (int64_t p = 0; p < a->params.block_size; p++) {
                for (int64_t c = 0; c < dim; c++) {
                    const places at = place(a, dim, head, i, p, c);
                    const double value = x[at.x] + (pe != NULL ? pe[at.pe] : 0);
                    double d_value = 0, terms = 0;
                    for (int64_t e = 0; e < dim; e++) {
                        d_value += w[at.w + e] * g[e];
                        terms += fabs(w[at.w + e] * g[e]);
                        if (d_w != NULL) d_w[at.w + e] += value * g[e];
                    }
                    d_x[at.x] += d_value;
                    if (d_pe != NULL) d_pe[at.pe] += d_value;
                    if (pe_terms != NULL) pe_terms[at.pe] += terms;
                }
            }
        }
    }
}
