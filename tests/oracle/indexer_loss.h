/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_loss.h - the loss of DeepSeek-V4's indexer in double, and its gradients. */
#ifndef QUERN_ORACLE_INDEXER_LOSS_H
#define QUERN_ORACLE_INDEXER_LOSS_H

#include <stdint.h>

/* Shapes as dsv4.h has them; sink and idx may be NULL. */
typedef struct oracle_indexer_loss {
    int64_t batch, queries, index_heads, width, entries, heads, dim, listed, ratio, start;
    double lambda;
    const double *q_index, *k_index, *w, *q, *kv_cmp, *lse_win, *sink;
    const int32_t *idx;
    int sizes; /* all are sums of their terms' magnitudes instead, P and T apart */
} oracle_indexer_loss;

/* Returns the loss; row_loss [B][T] and the gradients may be NULL. */
double oracle_indexer_loss_of(const oracle_indexer_loss *o, double *row_loss, double *d_q_index,
                              double *d_k_index, double *d_w);

#endif
