/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* best.c - selects the k best. Four histograms, of eight bits each, find the rank of the k-th; the time does
 * not depend on the scores. */
#include "cpu/indexer/best.h"

#include <string.h>

static uint32_t ordered(int32_t rank)
{
    return (uint32_t)rank ^ 0x80000000u;
}

/* The k-th largest rank; *equal: how many of that rank are among the k. */
static uint32_t kth(const indexer_best *best, int64_t k, int64_t *equal)
{
    uint32_t prefix = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        uint32_t digit = 255;
        for (int64_t i = 0; i < best->n; i++) {
            const uint32_t rank = ordered(best->rank[i]);
            if ((rank & mask) == prefix) count[rank >> shift & 255]++;
        }
        for (; k > count[digit]; digit--) k -= count[digit];
        prefix |= digit << shift;
        mask |= 255u << shift;
    }
    *equal = k;
    return prefix;
}

void best_cut(indexer_best *best, int64_t k)
{
    if (best->n <= k) return;
    int64_t equal, n = 0;
    const uint32_t last = kth(best, k, &equal);
    for (int64_t i = 0; i < best->n; i++) {
        const uint32_t rank = ordered(best->rank[i]);
        if (rank < last || (rank == last && equal-- <= 0)) continue;
        best->rank[n] = best->rank[i];
        best->index[n++] = best->index[i];
    }
    best->n = n;
    best->least = (int32_t)(last ^ 0x80000000u);
}
