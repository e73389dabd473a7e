/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_lists.c - cleans a tile's list of blocks and inverts a chunk's lists. Lists may come from a caller,
 * so every entry is checked before it is used. */
#include "cpu/kernels/attend/attend.h"
#include "cpu/rows_at.h"

#include <string.h>

void attend_list_sort(int32_t *list, int64_t n)
{
    for (int64_t gap = n / 2; gap > 0; gap /= 2)
        for (int64_t i = gap; i < n; i++) {
            const int32_t x = list[i];
            int64_t j = i;
            for (; j >= gap && list[j - gap] > x; j -= gap) list[j] = list[j - gap];
            list[j] = x;
        }
}

int64_t attend_list_length(const attend_plan *plan)
{
    return plan->args->list.ndim > 0 ? plan->args->list.shape[3] : 0;
}

static int64_t block_count(const attend_plan *plan, int64_t keys)
{
    return mask_blocks(keys, plan->list_block);
}

void attend_lists_carve(const attend_plan *plan, int64_t chunk_rows, arena *a, attend_lists *lists)
{
    const size_t length = (size_t)attend_list_length(plan);
    *lists = (attend_lists){NULL, NULL, NULL, NULL};
    if (length == 0) return;
    const size_t blocks = (size_t)block_count(plan, plan->args->seqs.n_kv);
    const size_t tiles = (size_t)(chunk_rows / (plan->args->tile * plan->hs) + 1);
    lists->start = arena_take(a, (blocks + 2) * sizeof *lists->start);
    lists->stamps = arena_take(a, (blocks + 1) * sizeof *lists->stamps);
    lists->entries = arena_take(a, tiles * length * sizeof *lists->entries);
    lists->list = arena_take(a, length * sizeof *lists->list);
}

void attend_lists_reset(const attend_plan *plan, const attend_sequence *seq, attend_lists *lists)
{
    memset(lists->stamps, 0, (size_t)(block_count(plan, seq->nk) + 1) * sizeof *lists->stamps);
}

int32_t attend_list_clean(const attend_plan *plan, const attend_sequence *seq, int32_t unit, int64_t tile,
                          int64_t hi, int32_t stamp, attend_lists *lists)
{
    const quern_tensor *t = &plan->args->list;
    const int32_t *list = row_at(t, seq->view_b, unit, seq->list_row0 + tile);
    const int64_t blocks = block_count(plan, seq->nk);
    int32_t n = 0;
    for (int64_t e = 0; e < t->shape[3]; e++) {
        const int32_t x = list[e];
        if (x < 0 || x >= blocks || x * plan->list_block >= hi || lists->stamps[x] == stamp) continue;
        lists->stamps[x] = stamp;
        lists->list[n++] = x;
    }
    return n;
}

int64_t attend_lists_invert(const attend_plan *plan, const attend_sequence *seq, int32_t unit, int64_t row0,
                            int32_t rows, const int32_t *hi, attend_lists *lists)
{
    const int64_t per_tile = plan->args->tile * plan->hs, blocks = block_count(plan, seq->nk);
    const int64_t tile0 = row0 / per_tile, tiles = (rows + per_tile - 1) / per_tile;
    int32_t *start = lists->start;
    memset(start, 0, (size_t)(blocks + 2) * sizeof *start);
    /* Counting sort: count into start[x + 2], sum, fill through start[x + 1]. start[x] is then where block x
     * begins. */
    for (int pass = 0; pass < 2; pass++) {
        attend_lists_reset(plan, seq, lists);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t last = (i + 1) * per_tile < rows ? (i + 1) * per_tile - 1 : rows - 1;
            const int32_t n = attend_list_clean(plan, seq, unit, tile0 + i, hi[last], (int32_t)i + 1, lists);
            for (int32_t e = 0; e < n; e++) {
                const int32_t x = lists->list[e];
                if (pass == 0) start[x + 2]++;
                else lists->entries[start[x + 1]++] = (int32_t)i;
            }
        }
        if (pass == 0)
            for (int64_t x = 0; x <= blocks; x++) start[x + 1] += start[x];
    }
    return blocks;
}
