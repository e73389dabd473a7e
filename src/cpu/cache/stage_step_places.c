/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stage_step_places.c - the step_places, step_check and clear_rows stages: where the rows of a step go, by
 * numbers that step_tokens has checked. One thread is enough: a token takes a few numbers. */
#include "cpu/step_faults.h"
#include "cpu/levels.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

#include <string.h>

/* Where a walk over the sequences stands. */
typedef struct place {
    step_run run;
    bool live;
    int64_t count, end;         /* rows of the call, with those of a sequence that does not run */
    int64_t entry, whole, made; /* its first entry in the call; entries before; those that become whole */
} place;

/* Sets p to sequence b, behind what it was: {0} before the first. */
static void walk(place *p, const stage_step *step, int64_t ratio, int64_t b)
{
    const int32_t *rows = (const int32_t *)step->rows.data + b * step->rows.strides[0];
    p->run = step_run_at(step, b);
    p->live = p->run.slot >= 0 && p->run.count > 0;
    p->count = rows[step->rows.strides[1]] - rows[0];
    p->end = p->run.first + p->count;
    p->entry += p->made;
    p->whole = ratio > 0 ? p->run.first / ratio : 0;
    p->made = ratio > 0 ? p->end / ratio - p->whole : 0;
}

static int64_t *run_at(const quern_tensor *runs, int64_t i)
{
    return (int64_t *)runs->data + 3 * i;
}

static void set_run(const quern_tensor *runs, int64_t i, int64_t from, int64_t to, int64_t count)
{
    int64_t *run = run_at(runs, i);
    run[0] = from;
    run[1] = to;
    run[2] = count;
}

/* Rows [first, first + n) of a sequence between its ring and rows `row` on of the call: two runs. */
static void ring_runs(const step_places_args *a, const quern_tensor *runs, const place *p, int64_t first,
                      int64_t n, int64_t row, bool from_ring)
{
    const int64_t b = p->run.b, page = i32_at(&a->raw_of, b, 0) * a->ring, slot = first % a->ring,
                  one = n < a->ring - slot ? n : a->ring - slot, at[] = {page + slot, page},
                  to[] = {row, row + one}, count[] = {one, n - one};
    for (int i = 0; i < 2; i++)
        set_run(runs, 2 * b + i, from_ring ? at[i] : to[i], from_ring ? to[i] : at[i], count[i]);
}

static int64_t put_raw(const step_places_args *a, const place *p, int64_t row)
{
    const int64_t window = a->window - 1, count = p->live ? p->count : 0,
                  old = !p->live                ? 0
                        : p->run.first < window ? p->run.first
                                                : window,
                  last = count < a->ring ? count : a->ring;
    int64_t *slots = a->raw_slots.data;
    for (int64_t i = 0; i < p->count; i++) slots[p->run.row + i] = p->live ? row + old + i : -1;
    ring_runs(a, &a->old, p, p->run.first - old, old, row, true);
    ring_runs(a, &a->kept, p, p->end - last, last, row + old + count - last, false);
    return row + old + count;
}

static void put_entries(const step_places_args *a, const place *p)
{
    const quern_tensor *table = &a->pages_of;
    const int32_t *pages = (const int32_t *)table->data + p->run.b * table->strides[0];
    int64_t *slots = a->entry_slots.data;
    for (int64_t i = 0; i < p->made; i++) {
        const int64_t s = p->whole + i;
        slots[p->entry + i] = p->live ? pages[s / a->page * table->strides[1]] * a->page + s % a->page : -1;
    }
}

quern_status cpu_step_places(const stage_exec *exec, const step_places_args *a, void *workspace)
{
    (void)exec, (void)workspace;
    const int64_t batch = a->step.slots.shape[0];
    int32_t *slots = a->slots.data, *cu_raw = a->cu_raw.data;
    place p = {.made = 0};
    cu_raw[0] = 0;
    int64_t token = 0;
    for (int64_t b = 0; b < batch; b++) {
        walk(&p, &a->step, a->ratio, b);
        slots[b] = p.live ? (int32_t)p.run.slot : -1;
        cu_raw[b + 1] = (int32_t)put_raw(a, &p, cu_raw[b]);
        if (is_present(&a->entry_slots)) put_entries(a, &p);
        if (is_present(&a->first_entry)) ((int32_t *)a->first_entry.data)[b] = (int32_t)p.entry;
        if (is_present(&a->returned)) set_run(&a->returned, b, b, p.live ? p.run.slot : 0, p.live);
        token = p.run.row + p.count;
    }
    for (; token < a->raw_slots.shape[0]; token++) ((int64_t *)a->raw_slots.data)[token] = -1;
    for (int64_t i = p.entry + p.made; is_present(&a->entry_slots) && i < a->entry_slots.shape[0]; i++)
        ((int64_t *)a->entry_slots.data)[i] = -1;
    return QUERN_OK;
}

/* Rows first ... first + n - 1 of x, which may be absent, are finite. */
static quern_status check_finite(const stage_exec *exec, const quern_tensor *x, int64_t first, int64_t n)
{
    const row_kernels *kernels = cpu_kernels_for(exec->cpu_level)->rows;
    for (int64_t i = first; is_present(x) && i < first + n; i++) {
        const float *row = (const float *)x->data + i * x->strides[0];
        if (kernels->magnitude(row, QUERN_F32, x->shape[1]) >= 0x7f800000u)
            return stage_report(
                exec, (stage_fault){.kind = QUERN_STATUS_NOT_FINITE, .tensor = x, .index = i * x->shape[1]});
    }
    return QUERN_OK;
}

static void set_none(const quern_tensor *slots, int64_t first, int64_t n)
{
    for (int64_t i = first; is_present(slots) && i < first + n; i++) ((int64_t *)slots->data)[i] = -1;
}

static void stop(const step_check_args *a, const place *p)
{
    const int64_t b = p->run.b;
    ((int32_t *)a->slots.data)[b] = -1;
    set_none(&a->raw_slots, p->run.row, p->count);
    set_none(&a->entry_slots, p->entry, p->made);
    for (int64_t i = 0; i < 2; i++) run_at(&a->kept, 2 * b + i)[2] = 0;
    if (is_present(&a->returned)) run_at(&a->returned, b)[2] = 0;
}

quern_status cpu_step_check(const stage_exec *exec, const step_check_args *a, void *workspace)
{
    (void)workspace;
    place p = {.made = 0};
    step_faults faults;
    step_faults_begin(&faults, exec, true);
    for (int64_t b = 0; b < a->step.slots.shape[0]; b++) {
        walk(&p, &a->step, a->ratio, b);
        if (!p.live) continue;
        quern_status status = check_finite(&faults.exec, &a->rows, p.run.row, p.count);
        if (status == QUERN_OK) status = check_finite(&faults.exec, &a->entries, p.entry, p.made);
        if (status == QUERN_OK) status = check_finite(&faults.exec, &a->keys, p.entry, p.made);
        int32_t *word = (int32_t *)a->fault.data + p.run.slot * a->fault.strides[0];
        if (step_faults_take(&faults, status, word)) stop(a, &p);
    }
    return QUERN_OK;
}

static void clear(const quern_tensor *t, int64_t first, int64_t n)
{
    const int64_t size = (int64_t)quern_dtype_size(t->dtype);
    for (int64_t i = first; i < first + n && i < t->shape[0]; i++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            memset((char *)t->data + (i * t->strides[0] + h * t->strides[1]) * size, 0,
                   (size_t)(t->shape[2] * size));
}

quern_status cpu_clear_rows(const stage_exec *exec, const clear_rows_args *a, void *workspace)
{
    (void)exec, (void)workspace;
    place p = {.made = 0};
    int64_t token = 0;
    for (int64_t b = 0; b < a->step.slots.shape[0]; b++) {
        walk(&p, &a->step, a->ratio, b);
        if (!p.live) clear(&a->out, a->ratio > 0 ? p.entry : p.run.row, a->ratio > 0 ? p.made : p.count);
        token = p.run.row + p.count;
    }
    const int64_t end = a->ratio > 0 ? p.entry + p.made : token;
    clear(&a->out, end, a->out.shape[0] - end);
    return QUERN_OK;
}
