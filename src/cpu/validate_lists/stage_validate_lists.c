/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_validate_lists.c - the validate_lists stage: whether a caller's list has entries outside its
 * sequence. The host can read cu_seqlens, so they are checked before any stage. */
#include "core/parallel.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

typedef struct list_job {
    const validate_lists_args *args;
    const quern_tensor *list;
    bool groups;
    int32_t bit, *status;
} list_job;

/* The lists of one sequence and one head. */
static void validate_sequence(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const list_job *c = arg;
    const validate_lists_args *a = c->args;
    const quern_tensor *list = c->list;
    const int64_t heads = list->shape[1], b = index / heads, h = index % heads, k = list->shape[3];
    const int32_t *cu = a->seqs.cu_q.data;
    const int64_t tokens = cu != NULL ? cu[b + 1] - cu[b] : a->seqs.n_q;
    const int64_t limit =
        c->groups ? mask_blocks(mask_entries(tokens, a->block_size, a->stride), STAGE_GROUP_ENTRIES)
                  : mask_blocks(tokens, a->select_block);
    int64_t row = first_list_row(&a->seqs, a->tile, b);
    const int64_t end = cu != NULL ? row + (tokens + a->tile - 1) / a->tile : list->shape[2],
                  view = cu != NULL ? 0 : b;
    bool bad = false;
    for (; row < end; row++) {
        const int32_t *x = row_at(list, view, h, row);
        for (int64_t i = 0; i < k; i++) bad |= x[i] < -1 || x[i] >= limit;
    }
    if (bad) __atomic_fetch_or(c->status, c->bit, __ATOMIC_RELAXED);
}

quern_status cpu_validate_lists(const stage_exec *exec, const validate_lists_args *args, void *workspace)
{
    (void)workspace;
    list_job lists[] = {{args, &args->blocks, false, QUERN_STATUS_BAD_INDEX, exec->status},
                        {args, &args->groups, true, QUERN_STATUS_BAD_GROUP, exec->status}};
    for (int i = 0; i < 2; i++)
        if (lists[i].list->ndim > 0 && lists[i].list->shape[2] > 0)
            parallel_for(exec, args->seqs.batch * lists[i].list->shape[1], validate_sequence, &lists[i]);
    return QUERN_OK;
}
