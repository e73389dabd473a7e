/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_program_run.c - running a program, and what it would run. */
#include "core/error.h"
#include "core/op.h"
#include "core/op_span.h"
#include "core/view.h"

#include <string.h>

/* The bytes by which a view moves on within a loop. */
static int64_t moved(const op_step *step, int32_t view, const op_loop *loop, const int64_t *index)
{
    const int64_t *by = (const int64_t *)(const void *)((const char *)op_step_args(step) +
                                                        op_stage_bytes((op_stage)step->stage)) +
                        (ptrdiff_t)view * loop->dims;
    int64_t bytes = 0;
    for (int32_t d = 0; d < loop->dims; d++) bytes += by[d] * index[d];
    return bytes;
}

/* The arguments with addresses in place of symbolic pointers. */
static void place(const op_step *step, const op_frame *frame, const op_loop *loop, const int64_t *index,
                  op_args *now)
{
    op_view_list list[OP_VIEW_LISTS];
    const int32_t lists = op_stage_views((op_stage)step->stage, list);
    int32_t number = 0;
    memcpy(now, op_step_args(step), op_stage_bytes((op_stage)step->stage));
    for (int32_t n = 0; n < lists; n++)
        for (int32_t i = 0; i < list[n].count; i++, number++) {
            quern_tensor *view = op_stage_view(now, &list[n], i);
            if (view->ndim == 0) continue;
            char *data = op_placed(view->data, frame);
            view->data = loop != NULL ? data + moved(step, number, loop, index) : data;
        }
}

/* Runs a step at an index of its loop (NULL: it is in none). */
static quern_status run_step(const op_call *call, const op_frame *frame, const op_step *step,
                             const op_loop *loop, const int64_t *index)
{
    op_args now;
    stage_fault fault = {0};
    stage_exec exec = frame->exec;
    void *scratch = step->scratch != NULL ? op_placed(step->scratch, frame) : NULL;
    if (step->asked && exec.status == NULL) return QUERN_OK;
    place(step, frame, loop, index, &now);
    exec.fault = &fault;
    const quern_status status = op_stage_run(call->backend, (op_stage)step->stage, &exec, &now, scratch);
    return fault.kind == 0 ? status : op_fault(call, step, &now, &fault);
}

static int64_t rounds_of(const op_loop *loop)
{
    int64_t rounds = 1;
    for (int32_t d = 0; d < loop->dims; d++) rounds *= loop->extent[d];
    return rounds;
}

static quern_status run_loop(const op_call *call, const op_frame *frame, const op_step *first,
                             const op_loop *loop)
{
    int64_t index[QUERN_MAX_DIMS] = {0};
    quern_status status = QUERN_OK;
    for (int64_t left = rounds_of(loop); left > 0 && status == QUERN_OK; left--) {
        const op_step *step = first;
        for (int32_t i = loop->first; i < loop->end && status == QUERN_OK; i++, step = op_step_next(step))
            status = run_step(call, frame, step, loop, index);
        for (int32_t d = loop->dims - 1; d >= 0 && ++index[d] == loop->extent[d]; d--) index[d] = 0;
    }
    return status;
}

static quern_status run_in_turn(const op_call *call, const op_frame *frame, const op_step *step)
{
    const op_program *program = &call->program;
    int32_t loops = 0;
    quern_status status = QUERN_OK;
    for (int32_t i = 0; i < program->steps && status == QUERN_OK;) {
        const op_loop *loop = &program->loop[loops];
        if (loops == program->loops || loop->first != i) {
            status = run_step(call, frame, step, NULL, NULL);
            step = op_step_next(step);
            i++;
            continue;
        }
        status = run_loop(call, frame, step, loop);
        for (; i < loop->end; i++) step = op_step_next(step);
        loops++;
    }
    return status;
}

const op_step *op_program_steps(const op_call *call)
{
    return (const op_step *)(const void *)((const char *)call + call->family->program_at);
}

const void *op_find(const op_call *call, op_stage stage)
{
    const op_step *step = op_program_steps(call);
    for (int32_t i = 0; i < call->program.steps; i++, step = op_step_next(step))
        if (step->stage == stage) return op_step_args(step);
    return NULL;
}

/* ---- steps beside each other ---- */

/* Of all views of a program's steps; those of step i end at end[i]. */
enum { SPANS_MOST = 1024 };
typedef struct spans {
    int32_t count, end[OP_BESIDE_MOST];
    op_span of[SPANS_MOST];
} spans;

/* Adds a step's views; false where there are too many. */
static bool add_spans(spans *all, const op_step *step)
{
    op_view_list list[OP_VIEW_LISTS];
    const op_stage stage = (op_stage)step->stage;
    const int32_t lists = op_stage_views(stage, list);
    for (int32_t n = 0; n < lists; n++)
        for (int32_t i = 0; i < list[n].count; i++) {
            const quern_tensor *view = op_stage_view(op_step_args(step), &list[n], i);
            if (view->ndim == 0 || view_elements(view) == 0) continue;
            if (all->count == SPANS_MOST) return false;
            all->of[all->count++] = op_span_of(view, op_stage_writes(stage, &list[n], i));
        }
    return true;
}

/* Whether step i needs what step k, before it, has read or written. */
static bool touch(const spans *all, int32_t k, int32_t i)
{
    for (int32_t a = k > 0 ? all->end[k - 1] : 0; a < all->end[k]; a++)
        for (int32_t b = all->end[i - 1]; b < all->end[i]; b++)
            if (op_spans_meet(&all->of[a], &all->of[b])) return true;
    return false;
}

/* The steps that each waits for, a bit each, without those that another of them waits for; the last one, and
 * those that are to, wait for all. `first` steps have run. False where there are too many views. */
static bool order_steps(const op_call *call, const op_step *step, int32_t first,
                        uint64_t behind[OP_BESIDE_MOST])
{
    spans all;
    uint64_t before[OP_BESIDE_MOST]; /* and those that these wait for */
    const int32_t steps = call->program.steps;
    all.count = 0;
    for (int32_t i = 0; i < steps; i++, step = op_step_next(step)) {
        if (!add_spans(&all, step)) return false;
        all.end[i] = all.count;
        behind[i] = before[i] = 0;
        for (int32_t k = i - 1; k >= first; k--) {
            if (before[i] >> k & 1) continue;
            if (i < steps - 1 && !step->after_all && step->behind != k + 1 && !touch(&all, k, i)) continue;
            behind[i] |= (uint64_t)1 << k;
            before[i] |= before[k] | (uint64_t)1 << k;
        }
    }
    return true;
}

enum { PRODUCTS_MOST = 12 };

/* Of step i and those that follow, the products that wait for the same steps: none needs another then. */
static int32_t products_from(const op_call *call, const op_step *step, int32_t i,
                             const uint64_t behind[OP_BESIDE_MOST])
{
    int32_t count = 0;
    for (; i + count < call->program.steps && count < PRODUCTS_MOST; count++, step = op_step_next(step))
        if (step->stage != OP_gemm || step->asked || step->percent > 0 || behind[i + count] != behind[i])
            break;
    return count;
}

/* Runs step i, or several products from it on as one; returns how many. */
static int32_t run_some(const op_call *call, const op_frame *frame, const op_step *step, int32_t i,
                        const uint64_t behind[OP_BESIDE_MOST], quern_status *status)
{
    gemm_args now[PRODUCTS_MOST];
    const gemm_args *list[PRODUCTS_MOST];
    const op_step *next = step;
    const int32_t count = call->backend->gemm_together != NULL ? products_from(call, step, i, behind) : 0;
    for (int32_t n = 0; count > 1 && n < count; n++, next = op_step_next(next)) {
        op_args placed;
        place(next, frame, NULL, NULL, &placed);
        now[n] = placed.gemm;
        list[n] = &now[n];
    }
    if (count > 1 && call->backend->gemm_together(&frame->exec, list, count, status)) return count;
    op_frame part = *frame;
    if (step->percent > 0) part.exec.multiprocessors = (part.exec.multiprocessors * step->percent + 50) / 100;
    *status = run_step(call, &part, step, NULL, NULL);
    return 1;
}

/* Every step behind those that it waits for; `start`: what those wait for that wait for none. */
static quern_status run_beside(const op_call *call, const op_frame *frame, const op_step *step, int32_t first,
                               const backend_point *start, const uint64_t behind[OP_BESIDE_MOST])
{
    backend_point after[OP_BESIDE_MOST];
    for (int32_t i = first; i < call->program.steps;) {
        const backend_point *points[OP_BESIDE_MOST] = {start};
        int32_t count = 0, ran = 0;
        for (int32_t s = first; s < i; s++)
            if (behind[i] >> s & 1) points[count++] = &after[s];
        quern_status status = call->backend->resume(&frame->exec, points, count > 0 ? count : 1);
        if (status == QUERN_OK) ran = run_some(call, frame, step, i, behind, &status);
        if (status != QUERN_OK) return status;
        if (!call->backend->point(&frame->exec, &after[i]))
            return error_set(QUERN_ERR_DEVICE, "the stream is no longer recorded");
        for (int32_t n = 1; n < ran; n++) after[i + n] = after[i];
        for (; ran > 0; ran--, i++) step = op_step_next(step);
    }
    return QUERN_OK;
}

quern_status op_program_run(const op_call *call, const op_frame *frame)
{
    const op_program *program = &call->program;
    const op_step *const steps = op_program_steps(call), *step = steps;
    uint64_t behind[OP_BESIDE_MOST];
    backend_point start;
    int32_t asked = 0;
    quern_status status = QUERN_OK;
    if (!program->beside) return run_in_turn(call, frame, step);
    for (; asked < program->steps && step->asked && status == QUERN_OK; asked++, step = op_step_next(step))
        status = run_step(call, frame, step, NULL, NULL);
    if (status != QUERN_OK) return status;
    if (call->backend->point(&frame->exec, &start) && order_steps(call, steps, asked, behind))
        return run_beside(call, frame, step, asked, &start, behind);
    for (int32_t i = asked; i < program->steps && status == QUERN_OK; i++, step = op_step_next(step))
        status = run_step(call, frame, step, NULL, NULL);
    return status;
}

/* ---- describing ---- */

static void list_step(const op_call *call, const op_step *step, int64_t times, op_listed *listed,
                      int32_t *count)
{
    const op_stage stage = (op_stage)step->stage;
    char kernel[STAGE_NAME_BYTES];
    op_stage_kernel(call->backend, stage, &call->exec, op_step_args(step), kernel);
    int32_t i = 0;
    while (i < *count && (listed[i].stage != op_stage_name(stage) || strcmp(listed[i].kernel, kernel) != 0))
        i++;
    if (i == OP_LISTED_MAX) return;
    if (i == *count) {
        listed[i] = (op_listed){.stage = op_stage_name(stage)};
        memcpy(listed[i].kernel, kernel, sizeof kernel);
        ++*count;
    }
    listed[i].times += times;
}

int32_t op_program_list(const op_call *call, op_listed listed[OP_LISTED_MAX])
{
    const op_program *program = &call->program;
    const op_step *step = op_program_steps(call);
    int32_t count = 0;
    for (int32_t i = 0; i < program->steps; i++, step = op_step_next(step)) {
        int64_t times = step->asked ? 0 : 1;
        for (int32_t l = 0; l < program->loops; l++)
            if (i >= program->loop[l].first && i < program->loop[l].end)
                times *= rounds_of(&program->loop[l]);
        if (times > 0) list_step(call, step, times, listed, &count);
    }
    return count;
}
