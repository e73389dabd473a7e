/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_index_loss.c - the block indexer's loss in double. */
#include "dot.h"
#include "nsa.h"

#include <math.h>
#include <stdlib.h>

/* Whether row t sees token s under list j. */
static bool sees(const oracle_index_loss *a, int64_t j, int64_t t, int64_t s)
{
    const int64_t position = t + (a->query_offset >= 0 ? a->query_offset : a->s - a->n);
    const int32_t *list = a->blocks + (j * a->list_rows + t) * a->length;
    for (int64_t e = 0; s <= position && e < a->length; e++)
        if (list[e] >= 0 && list[e] == s / a->block_size) return true;
    return false;
}

bool oracle_index_loss_counts(const oracle_index_loss *a, int64_t t)
{
    for (int64_t j = 0; j < a->lists; j++)
        for (int64_t s = 0; s < a->s; s++)
            if (sees(a, j, t, s)) return true;
    return false;
}

/* x[i] becomes its softmax; returns the logarithm of the sum. */
static double softmax(double *x, int64_t n)
{
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || x[i] > most || isnan(x[i])) most = x[i];
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - most);
    for (int64_t i = 0; i < n; i++) x[i] = exp(x[i] - most) / sum;
    return most + log(sum);
}

void oracle_index_loss_rows(const oracle_index_loss *a, double factor, double *row_loss, double *row_size,
                            double *d_q, double *d_k)
{
    const size_t most = (size_t)(a->s > 0 ? a->s : 1);
    const int64_t group = a->lists > 0 ? a->heads / a->lists : 1, keys = a->shared ? 1 : a->lists;
    double *teacher = malloc(most * sizeof(double)), *head = malloc(most * sizeof(double)),
           *student = malloc(most * sizeof(double)), *logit = malloc(most * sizeof(double));
    int64_t *token = malloc(most * sizeof(int64_t));
    if (teacher == NULL || head == NULL || student == NULL || logit == NULL || token == NULL) abort();
    for (int64_t t = 0; t < a->n; t++)
        for (int64_t j = 0; j < a->lists; j++) {
            const int64_t at = (t * a->lists + j) * a->d_index;
            int64_t n = 0;
            double loss = 0, size = 0;
            for (int64_t s = 0; s < a->s; s++)
                if (sees(a, j, t, s)) token[n++] = s;
            for (int64_t i = 0; i < n; i++) teacher[i] = 0;
            for (int64_t h = j * group; h < (j + 1) * group && n > 0; h++) {
                for (int64_t i = 0; i < n; i++)
                    head[i] = a->scale * oracle_dot(a->q + (t * a->heads + h) * a->d,
                                                    a->k + (token[i] * a->lists + j) * a->d, a->d);
                softmax(head, n);
                for (int64_t i = 0; i < n; i++) teacher[i] += head[i] / (double)group;
            }
            for (int64_t i = 0; i < n; i++)
                student[i] = logit[i] =
                    a->scale_index *
                    oracle_dot(a->q_index + at,
                               a->k_index + (token[i] * keys + (a->shared ? 0 : j)) * a->d_index, a->d_index);
            const double lse = n > 0 ? softmax(student, n) : 0;
            for (int64_t i = 0; i < n; i++) {
                const int64_t key = (token[i] * keys + (a->shared ? 0 : j)) * a->d_index;
                const double g = factor * (student[i] - teacher[i]) * a->scale_index;
                const double term = teacher[i] * (log(fmax(teacher[i], 1e-10)) - (logit[i] - lse));
                loss += term;
                size = hypot(size, term);
                for (int64_t c = 0; c < a->d_index; c++) {
                    d_q[at + c] += g * a->k_index[key + c];
                    d_k[key + c] += g * a->q_index[at + c];
                }
            }
            row_loss[j * a->list_rows + t] = loss;
            row_size[j * a->list_rows + t] = size;
        }
    free(teacher), free(head), free(student), free(logit), free(token);
}
