/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mqa_keys.c - sequences, tasks, and the keys of a query. Lists may come from a caller, so every entry is
 * checked. */
#include "cpu/check_data.h"
#include "cpu/kernels/attend/attend.h"
#include "cpu/attend_mqa/mqa.h"
#include "cpu/rows_at.h"
#include "cpu/levels.h"

#include <string.h>

bool mqa_by_bf16(const stage_exec *exec, const attend_mqa_args *args)
{
    const attention_kernels *kernels = cpu_kernels_for(exec->cpu_level)->attention;
    /* Decoded bytes are exact in bf16. */
    const bool exact = args->kv.dtype == QUERN_BF16 || args->kv.dtype == QUERN_U8;
    return kernels->mm_bf16 != NULL && args->q.dtype == QUERN_BF16 && exact;
}

mqa_plan mqa_plan_of(const stage_exec *exec, const attend_mqa_args *args)
{
    mqa_plan p = {.args = args,
                  .status = exec->status,
                  .kernels = cpu_kernels_for(exec->cpu_level)->attention,
                  .rows = cpu_kernels_for(exec->cpu_level)->mqa};
    p.level = cpu_kernels_for(exec->cpu_level);
    p.bf16 = mqa_by_bf16(exec, args);
    p.gathers = p.bf16 && args->format == ENTRY_ROWS && args->kv.dtype == QUERN_BF16 &&
                (!is_present(&args->entries) || args->entries.dtype == QUERN_BF16);
    p.batch = args->seqs.batch;
    p.heads = args->q.shape[2];
    p.dim = args->q.shape[3];
    p.rope = is_present(&args->cos_sin) ? args->cos_sin.shape[1] : 0;
    p.columns = round_up16(p.heads);
    p.words = p.bf16 ? p.dim / 2 : p.dim;
    p.width = round_up16(p.dim);
    p.pitch = (p.bf16 ? p.width / 2 : p.width) + MQA_PAD;
    p.panel = p.kernels->panel;
    p.row = row_size_of(args->format, p.dim, args->kv.dtype);
    p.list = is_present(&args->list) ? args->list.shape[2] : -1;
    p.scale2 = args->scale * log2_e;
    return p;
}

void mqa_starts_carve(const mqa_plan *plan, arena *a, mqa_starts *starts)
{
    starts->entry = arena_take(a, (size_t)(plan->batch + 1) * sizeof *starts->entry);
    starts->task = arena_take(a, (size_t)(plan->batch + 1) * sizeof *starts->task);
}

int64_t mqa_starts_fill(const mqa_plan *plan, int64_t queries, mqa_starts *starts)
{
    const stage_seqs *seqs = &plan->args->seqs;
    const int32_t *cu = seqs->cu_q.data;
    starts->entry[0] = starts->task[0] = 0;
    for (int64_t b = 0; b < plan->batch; b++) {
        const int64_t n = cu != NULL ? cu[b + 1] - cu[b] : seqs->n_q;
        starts->entry[b + 1] = starts->entry[b] + (cu != NULL ? n / plan->args->ratio : 0);
        starts->task[b + 1] = starts->task[b] + (n + queries - 1) / queries;
    }
    return starts->task[plan->batch];
}

mqa_sequence mqa_sequence_at(const mqa_plan *plan, const mqa_starts *starts, int64_t b)
{
    const attend_mqa_args *a = plan->args;
    const int32_t *cu = a->seqs.cu_q.data, *cu_kv = a->seqs.cu_kv.data;
    mqa_sequence s = {.b = b, .position = cu == NULL ? a->position : 0};
    if (is_present(&a->positions)) s.position = ((const int32_t *)a->positions.data)[b];
    if (cu == NULL) {
        s.view_b = b;
        s.queries = a->seqs.n_q;
        s.raw = a->seqs.n_kv;
        s.entries = is_present(&a->entries) ? a->entries.shape[1] : 0;
    } else {
        s.query0 = s.raw0 = cu[b];
        s.queries = s.raw = cu[b + 1] - cu[b];
        s.entry0 = starts->entry[b];
        s.entries = is_present(&a->entries) ? starts->entry[b + 1] - starts->entry[b] : 0;
    }
    if (cu_kv != NULL) {
        s.raw0 = cu_kv[b];
        s.raw = cu_kv[b + 1] - cu_kv[b];
    }
    if (is_present(&a->kv_table)) {
        s.raw0 = 0;
        s.raw = s.position + s.queries;
    }
    if (is_present(&a->entries_table)) {
        s.entry0 = 0;
        s.entries = (s.position + s.queries) / a->ratio;
    }
    return s;
}

/* The rows, positions and pages of sequence b. The family checks a position that is an argument by value. */
static quern_status check_sequence(const stage_exec *exec, const attend_mqa_args *a, int64_t b)
{
    const int32_t *cu = a->seqs.cu_q.data, *cu_kv = a->seqs.cu_kv.data;
    const int64_t queries = cu != NULL ? cu[b + 1] - cu[b] : a->seqs.n_q, raw = cu_kv != NULL
                                                                                    ? cu_kv[b + 1] - cu_kv[b]
                                                                                : cu != NULL ? queries
                                                                                             : a->seqs.n_kv;
    const int64_t start = i32_at(&a->positions, b, cu == NULL ? a->position : 0), end = start + queries,
                  positions = is_present(&a->cos_sin) ? a->cos_sin.shape[0] : INT32_MAX;
    const bool late = queries > 0 && end > positions, given = is_present(&a->positions) || cu != NULL;
    if (given && (start < 0 || late || (!is_present(&a->kv_table) && end < raw)))
        return stage_report(exec,
                            (stage_fault){.kind = QUERN_STATUS_BAD_POSITION,
                                          .tensor = is_present(&a->positions) ? &a->positions : &a->seqs.cu_q,
                                          .index = b,
                                          .most = positions - queries});
    if (queries == 0 || a->page == 0) return QUERN_OK;
    const int64_t oldest = start >= a->window ? start - a->window + 1 : 0, entries = end / a->ratio;
    const quern_status status =
        check_pages(exec, &a->kv_table, b, oldest / a->page, (end + a->page - 1) / a->page, a->kv.shape[0]);
    if (status != QUERN_OK || !is_present(&a->entries_table)) return status;
    return check_pages(exec, &a->entries_table, b, 0, (entries + a->page - 1) / a->page, a->entries.shape[0]);
}

quern_status mqa_check(const stage_exec *exec, const attend_mqa_args *args)
{
    const int64_t rows = args->kv.shape[1];
    quern_status status = check_queries(exec, &args->seqs);
    if (status == QUERN_OK && !is_present(&args->kv_table))
        status = check_cu(exec, is_present(&args->seqs.cu_kv) ? &args->seqs.cu_kv : &args->seqs.cu_q,
                          args->seqs.batch, rows);
    for (int64_t b = 0; b < args->seqs.batch && status == QUERN_OK; b++)
        status = check_sequence(exec, args, b);
    return status;
}

int64_t mqa_task_sequence(const mqa_plan *plan, const mqa_starts *starts, int64_t task)
{
    int64_t low = 0, high = plan->batch; /* task[low] <= task < task[high] */
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (starts->task[middle] <= task) low = middle;
        else high = middle;
    }
    return low;
}

/* The visible entries of a query's list, each once, in ascending order. */
static int64_t clean_list(const mqa_plan *plan, const mqa_sequence *s, int64_t query, int64_t visible,
                          int32_t *list)
{
    const quern_tensor *t = &plan->args->list, *count = &plan->args->count;
    const int32_t *given = mqa_row(t, s->view_b, s->query0 + query);
    int64_t most = plan->list, n = 0, kept = 0;
    if (is_present(count))
        most = ((const int32_t *)
                    count->data)[s->view_b * count->strides[0] + (s->query0 + query) * count->strides[1]];
    if (most > plan->list) most = plan->list;
    bool bad = false, rising = true;
    for (int64_t i = 0; i < most; i++) {
        const int32_t x = given[i];
        bad = bad || x < -1 || x >= s->entries;
        if (x < 0 || x >= visible) continue;
        rising = rising && (n == 0 || x > list[n - 1]);
        list[n++] = x;
    }
    if (bad && plan->status != NULL)
        __atomic_fetch_or(plan->status, QUERN_STATUS_BAD_INDEX, __ATOMIC_RELAXED);
    if (rising) return n;
    attend_list_sort(list, n);
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || list[i] != list[kept - 1]) list[kept++] = list[i];
    return kept;
}

mqa_keys mqa_raw_keys_of(const mqa_plan *plan, const mqa_sequence *s, int64_t query)
{
    const int64_t position = s->position + query, first = s->position + s->queries - s->raw;
    const int64_t low = mask_window_first(position - first, plan->args->window),
                  end = position - first + 1 < s->raw ? position - first + 1 : s->raw,
                  raw = end > low ? end - low : 0;
    return (mqa_keys){low, raw, raw, NULL};
}

mqa_keys mqa_keys_of(const mqa_plan *plan, const mqa_sequence *s, int64_t query, int32_t *list)
{
    const int64_t whole = mask_entries(s->position + query + 1, plan->args->ratio, plan->args->ratio),
                  visible = whole < s->entries ? whole : s->entries;
    mqa_keys k = mqa_raw_keys_of(plan, s, query);
    k.n = k.raw + visible;
    if (plan->list < 0) return k;
    k.list = list;
    k.n = k.raw + clean_list(plan, s, query, visible, list);
    return k;
}

int64_t mqa_keys_most(const mqa_plan *plan)
{
    const attend_mqa_args *a = plan->args;
    const int64_t rows = is_present(&a->kv_table) ? a->kv_table.shape[1] * a->page : a->seqs.n_kv,
                  raw = a->window < rows ? a->window : rows;
    const int64_t all = !is_present(&a->entries)        ? 0
                        : is_present(&a->entries_table) ? a->entries_table.shape[1] * a->page
                                                        : a->entries.shape[1];
    return raw + (plan->list >= 0 && plan->list < all ? plan->list : all);
}
