/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* best.h - keeps the k best of scores that come in the order of their entries; ties go to the lowest index.
 */
#ifndef QUERN_CPU_BEST_H
#define QUERN_CPU_BEST_H

#include "cpu/indexer/indexer_kernels.h"

/* Room for so many scores that at least k new ones come between two cuts. */
static inline int64_t best_room(int64_t k, int64_t panel)
{
    return 2 * k + 4 * panel;
}

static inline void best_reset(indexer_best *best)
{
    best->n = 0;
    best->least = INT32_MIN;
}

#endif
