/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* best.h - keeps the k best of scores that come in the order of their entries; ties go to the lowest index.
 */
#ifndef QUERN_CPU_BEST_H
#define QUERN_CPU_BEST_H

#include "cpu/indexer/indexer_kernels.h"

/* Room that keeps cuts rare: each takes in at least k scores anew. */
static inline int64_t best_room(int64_t k, int64_t panel)
{
    return 2 * k + 4 * panel;
}

static inline void best_reset(indexer_best *best)
{
    best->n = 0;
    best->least = INT32_MIN;
}

/* Drops all but the k best, which keep their order, and refuses from now on what ranks with the last of them.
 */
void best_cut(indexer_best *best, int64_t k);

#endif
