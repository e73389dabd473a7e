/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_index.c - the block indexer's scores in double. */
#include "nsa.h"

#include <math.h>

void oracle_nsa_index_choices(const oracle_nsa_index *a, const double *q, const double *k, int64_t list,
                              int64_t t, oracle_choice *choices)
{
    const quern_nsa_index_params *p = &a->params;
    const int64_t size = p->select_block, blocks = (a->s + size - 1) / size, keys = a->shared ? 1 : a->lists,
                  position = t + (p->query_offset >= 0 ? p->query_offset : a->s - a->n);
    for (int64_t j = 0; j < blocks; j++) {
        oracle_choice *c = &choices[j];
        const int64_t behind = position < 0 ? -1 : position / size - j; /* blocks before that of the query */
        *c = (oracle_choice){-INFINITY, position >= 0 && j * size <= position, false, true};
        c->forced = c->candidate && (j < p->forced_first || (behind >= 0 && behind < p->forced_local));
        for (int64_t s = j * size; s < (j + 1) * size && s < a->s && s <= position; s++) {
            const double *x = q + (t * a->lists + list) * a->d,
                         *y = k + (s * keys + (a->shared ? 0 : list)) * a->d;
            double dot = 0;
            for (int64_t i = 0; i < a->d; i++) dot += x[i] * y[i];
            if (isnan(dot) || isnan(c->score)) c->score = NAN;
            else if (dot > c->score) c->score = dot;
        }
    }
}
