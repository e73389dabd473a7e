/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_step_tokens.c - the step_tokens stage: which sequences of a step run. One thread is enough, as a
 * sequence takes less than a microsecond and a page number. */
#include "cpu/step_faults.h"
#include "cpu/check_data.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

static int32_t *numbers(const quern_tensor *t)
{
    return t->data;
}

static int64_t pages_before(const step_tokens_args *a, int64_t tokens)
{
    return a->ratio > 0 ? mask_blocks(tokens / a->ratio, a->page) : 0;
}

/* Whether an earlier sequence of the step has tokens and the same slot. */
static bool stands_before(const stage_step *step, const step_run *run)
{
    bool found = false;
    for (int64_t i = 0; i < run->b && !found; i++) {
        const step_run other = step_run_at(step, i);
        found = other.slot == run->slot && other.count > 0;
    }
    return found;
}

/* The positions that the rows in both states' sums allow. */
static quern_status check_position(const stage_exec *exec, const step_tokens_args *a, const step_run *run)
{
    const quern_tensor *const merged[] = {&a->merged, &a->merged_index};
    stage_fault fault = {QUERN_STATUS_BAD_POSITION, &a->step.positions, run->b, .most = a->most - run->count};
    if (run->first < 0 || run->first > fault.most) return stage_report(exec, fault);
    for (int i = 0; i < 2 && run->first > 0; i++) {
        const int64_t sums = i32_at(merged[i], run->slot, run->first);
        fault.least = sums;
        fault.most = sums + a->rollback;
        if (sums < 0 || run->first < sums || run->first > fault.most) return stage_report(exec, fault);
    }
    return QUERN_OK;
}

static quern_status check_sequence(const stage_exec *exec, const step_tokens_args *a, const step_run *run)
{
    const stage_fault slot = {QUERN_STATUS_BAD_POSITION, &a->step.slots, run->b, .least = -1,
                              .most = a->slot_count - 1};
    if (run->slot < 0 || run->slot >= a->slot_count || stands_before(&a->step, run))
        return stage_report(exec, slot);
    quern_status status = check_position(exec, a, run);
    if (status == QUERN_OK) status = check_pages(exec, &a->raw_table, run->b, 0, 1, a->raw_pages);
    return status == QUERN_OK
               ? check_pages(exec, &a->table, run->b, 0, pages_before(a, run->first + run->count), a->pages)
               : status;
}

/* The results for a sequence of so many rows from `row` on. */
static void put(const step_tokens_args *a, const step_run *run, bool runs, int64_t row, int64_t count)
{
    const int64_t b = run->b, most = INT32_MAX - count, start = runs ? run->first : 0,
                  columns = is_present(&a->table) ? a->table.shape[1] : 0,
                  pages = pages_before(a, start + count);
    numbers(&a->slots)[b] = runs ? (int32_t)run->slot : -1;
    numbers(&a->positions)[b] = (int32_t)(run->first < 0 ? 0 : run->first < most ? run->first : most);
    numbers(&a->starts)[b] = (int32_t)start;
    numbers(&a->raw_of)[b] = runs ? (int32_t)i32_at(&a->raw_table, b, 0) : 0;
    for (int64_t c = 0; c < pages && c < columns; c++)
        numbers(&a->pages_of)[b * columns + c] =
            runs ? numbers(&a->table)[b * a->table.strides[0] + c * a->table.strides[1]] : 0;
    for (int64_t i = 0; i < count; i++) numbers(&a->at)[row + i] = runs ? (int32_t)(start + i) : 0;
    if (!is_present(&a->own)) return;
    int64_t *copied = (int64_t *)a->copied.data + 3 * b;
    numbers(&a->own)[b] = runs ? (int32_t)b : -1;
    copied[0] = runs ? run->slot : 0;
    copied[1] = b;
    copied[2] = runs;
}

/* Whether a sequence with tokens runs. */
static bool may_run(const step_tokens_args *a, const step_run *run, step_faults *faults)
{
    const bool known = is_present(&a->fault) && run->slot >= 0 && run->slot < a->fault.shape[0];
    int32_t *fault = known ? numbers(&a->fault) + run->slot * a->fault.strides[0] : NULL;
    if (known && *fault != 0 && run->first > 0) return false;
    const quern_status status = check_sequence(&faults->exec, a, run);
    const bool of_slots = faults->now.tensor == &a->step.slots; /* the slot's own sequence goes on */
    if (step_faults_take(faults, status, of_slots ? NULL : fault)) return false;
    if (known) *fault = 0;
    return true;
}

quern_status cpu_step_tokens(const stage_exec *exec, const step_tokens_args *a, void *workspace)
{
    (void)workspace;
    const int64_t batch = a->step.slots.shape[0], tokens = a->at.shape[0];
    const quern_status offsets = check_step_rows(exec, &a->step, tokens);
    step_faults faults;
    int64_t end = 0;
    step_faults_begin(&faults, exec, is_present(&a->fault));
    numbers(&a->cu)[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int32_t *row = numbers(&a->step.rows) + b * a->step.rows.strides[0];
        const int64_t count = offsets == QUERN_OK ? row[a->step.rows.strides[1]] - row[0] : 0;
        step_run run = step_run_at(&a->step, b);
        run.count = run.slot >= 0 ? count : 0;
        const bool bad_slot = run.slot < -1 && offsets == QUERN_OK;
        put(a, &run, (run.count > 0 || bad_slot) && may_run(a, &run, &faults), end, count);
        end += count;
        numbers(&a->cu)[b + 1] = (int32_t)end;
    }
    for (int64_t t = end; t < tokens; t++) numbers(&a->at)[t] = 0;
    return offsets == QUERN_OK ? step_faults_end(&faults, exec) : offsets;
}
