/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_validate_lists.c - the validate_lists stage: whether a caller's list has entries outside its
 * sequence, and whether compressed rows that are an input are as many as the tokens make. */
#include "core/parallel.h"
#include "cpu/check_data.h"
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

/* Every sequence has as many entries as its tokens make. */
static quern_status check_entries(const stage_exec *exec, const validate_lists_args *args)
{
    const int32_t *tokens = args->seqs.cu_q.data, *entries = args->seqs.cu_kv.data;
    const bool compressed = is_present(&args->seqs.cu_kv) && args->stride > 0;
    for (int64_t b = 0; compressed && b < args->seqs.batch; b++) {
        const int64_t end =
            entries[b] + mask_entries(tokens[b + 1] - tokens[b], args->block_size, args->stride);
        if (entries[b + 1] != end)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_OFFSETS,
                                                    .tensor = &args->seqs.cu_kv,
                                                    .index = b + 1,
                                                    .least = end,
                                                    .most = end});
    }
    return QUERN_OK;
}

quern_status cpu_validate_lists(const stage_exec *exec, const validate_lists_args *args, void *workspace)
{
    quern_status status = check_queries(exec, &args->seqs);
    if (status == QUERN_OK) status = check_cu(exec, &args->seqs.cu_kv, args->seqs.batch, args->seqs.n_kv);
    if (status == QUERN_OK) status = check_entries(exec, args);
    if (status != QUERN_OK) return status;
    (void)workspace;
    list_job lists[] = {{args, &args->blocks, false, QUERN_STATUS_BAD_INDEX, exec->status},
                        {args, &args->groups, true, QUERN_STATUS_BAD_GROUP, exec->status}};
    for (int i = 0; i < 2; i++)
        if (lists[i].list->ndim > 0 && lists[i].list->shape[2] > 0)
            parallel_for(exec, args->seqs.batch * lists[i].list->shape[1], validate_sequence, &lists[i]);
    return QUERN_OK;
}
