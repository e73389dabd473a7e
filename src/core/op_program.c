/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_program.c - building a program. */
#include "core/error.h"
#include "core/op.h"
#include "core/view.h"

#include <string.h>

static int32_t view_count(op_stage stage)
{
    op_view_list list[OP_VIEW_LISTS];
    int32_t count = 0;
    for (int32_t i = op_stage_views(stage, list) - 1; i >= 0; i--) count += list[i].count;
    return count;
}

quern_status op_lacks(const quern_backend *backend, op_stage stage)
{
    return error_set(QUERN_ERR_UNSUPPORTED, "the %s backend has no stage %s: the cpu has all", backend->name,
                     op_stage_name(stage));
}

/* Refuses a step that the backend lacks or does not take; *bytes: its workspace. */
static quern_status check_step(const op_call *call, const op_step *step, size_t *bytes)
{
    const op_stage stage = (op_stage)step->stage;
    const void *args = op_step_args(step);
    char why[STAGE_WHY_BYTES] = "";
    if (!op_stage_of(call->backend, stage)) return op_lacks(call->backend, stage);
    if (!op_stage_takes(call->backend, stage, &call->exec, args, why))
        return error_set(QUERN_ERR_UNSUPPORTED, "%s", why);
    *bytes = op_stage_workspace(call->backend, stage, &call->exec, args);
    return QUERN_OK;
}

bool op_has(const op_build *b, op_stage stage)
{
    return op_stage_of(b->call->backend, stage);
}

bool op_takes(const op_build *b, op_stage stage, const void *args)
{
    char why[STAGE_WHY_BYTES];
    return op_stage_takes(b->call->backend, stage, &b->call->exec, args, why);
}

/* Checks the steps that are there, and finds the most scratch that one needs, or gives each its own. */
static void check_steps(op_build *b)
{
    op_step *step = (op_step *)(void *)b->room;
    for (int32_t i = 0; i < b->program->steps && b->status == QUERN_OK; i++, step = op_step_next(step)) {
        size_t bytes = 0;
        b->status = check_step(b->call, step, &bytes);
        if (b->program->beside) step->scratch = arena_take(&b->a, bytes);
        else if (bytes > b->scratch_bytes) b->scratch_bytes = bytes;
    }
}

static void share_scratch(op_build *b, const void *scratch)
{
    op_step *step = (op_step *)(void *)b->room;
    for (int32_t i = 0; i < b->program->steps; i++, step = op_step_next(step)) step->scratch = scratch;
}

void *op_add(op_build *b, op_stage stage)
{
    size_t bytes = sizeof(op_step) + op_stage_bytes(stage);
    if (b->loop != NULL) bytes += (size_t)b->loop->dims * sizeof(int64_t) * (size_t)view_count(stage);
    if (b->program->bytes + bytes > b->room_bytes) {
        if (b->status == QUERN_OK)
            b->status = error_set(QUERN_ERR_INTERNAL, "%s takes more steps than there is room for",
                                  b->call->family->operations[b->call->operation]);
        b->last = NULL;
        memset(&b->dropped, 0, sizeof b->dropped);
        return &b->dropped;
    }
    op_step *step = b->last = (op_step *)(void *)(b->room + b->program->bytes);
    memset(step, 0, bytes);
    step->bytes = (uint32_t)bytes;
    step->stage = (uint8_t)stage;
    b->program->bytes += bytes;
    b->program->steps++;
    return op_step_args(step);
}

void op_when_asked(op_build *b)
{
    if (b->last != NULL) b->last->asked = true;
}

void op_made_for(op_build *b, int32_t tensor)
{
    if (b->last != NULL) b->last->made_for = (uint8_t)(tensor + 1);
}

bool op_beside(op_build *b)
{
    return b->program->beside = b->call->backend->point != NULL;
}

void op_after_all(op_build *b)
{
    if (b->last != NULL) b->last->after_all = true;
}

int32_t op_number(const op_build *b)
{
    return b->program->steps - 1;
}

void op_behind(op_build *b, int32_t number)
{
    if (b->last != NULL) b->last->behind = (uint8_t)(number + 1);
}

void op_percent(op_build *b, int32_t percent)
{
    if (b->last != NULL) b->last->percent = (uint8_t)percent;
}

void op_drop(op_build *b)
{
    if (b->last == NULL) return;
    b->program->bytes -= b->last->bytes;
    b->program->steps--;
    b->last = NULL;
}

quern_tensor op_room(op_build *b, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = view_on(&b->call->like, NULL, dtype, ndim, shape);
    t.data = arena_take(&b->a, (size_t)view_elements(&t) * quern_dtype_size(dtype));
    return t;
}

/* Room is taken in any case: a workspace has one size on all devices. */
quern_tensor op_result(op_build *b, int32_t tensor, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    const quern_tensor to = op_view(b->call, tensor, false), room = op_room(b, dtype, ndim, shape);
    bool fits = to.ndim == ndim && b->call->like.device != QUERN_CPU;
    for (int32_t i = 0; i < ndim; i++) fits = fits && to.strides[i] == room.strides[i];
    return fits ? to : room;
}

quern_tensor op_matrix(op_build *b, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    return op_room(b, dtype, 2, shape);
}

void op_copy(op_build *b, const quern_tensor *from, const quern_tensor *to)
{
    permute_args *copy = OP_ADD(b, permute);
    copy->per = 1;
    copy->x = *from;
    copy->out = *to;
}

quern_tensor op_rows(op_build *b, int32_t tensor)
{
    const quern_tensor t = op_view(b->call, tensor, false);
    quern_tensor flat = t;
    if (t.ndim == 0 || view_flatten(&t, &flat)) return flat;
    int64_t rows = 1;
    for (int32_t i = 0; i < t.ndim - 1; i++) rows *= t.shape[i];
    flat = op_matrix(b, t.dtype, rows, t.shape[t.ndim - 1]);
    op_copy(b, &t, &flat);
    return flat;
}

void op_give(op_build *b, int32_t tensor, const quern_tensor *from)
{
    const quern_tensor to = op_view(b->call, tensor, false);
    if (to.ndim > 0 && to.data != from->data) op_copy(b, from, &to);
}

quern_dtype op_between_dtype(quern_dtype activations)
{
    return activations == QUERN_BF16 ? QUERN_BF16 : QUERN_F32;
}

void op_loop_begin(op_build *b, int32_t dims, const int64_t *extents)
{
    if (b->program->loops == OP_LOOPS_MAX) {
        if (b->status == QUERN_OK)
            b->status = error_set(QUERN_ERR_INTERNAL, "more than %d loops", OP_LOOPS_MAX);
        return;
    }
    b->loop = &b->program->loop[b->program->loops];
    *b->loop = (op_loop){.first = b->program->steps, .dims = dims};
    memcpy(b->loop->extent, extents, (size_t)dims * sizeof *extents);
}

void op_loop_end(op_build *b)
{
    if (b->loop == NULL) return;
    b->loop->end = b->program->steps;
    b->program->loops += b->loop->end > b->loop->first;
    b->loop = NULL;
}

void op_moves(op_build *b, const quern_tensor *view, int32_t dim, int64_t elements)
{
    op_view_list list[OP_VIEW_LISTS];
    if (b->loop == NULL || b->last == NULL || view->ndim == 0) return;
    const op_stage stage = (op_stage)b->last->stage;
    const int32_t lists = op_stage_views(stage, list);
    char *args = op_step_args(b->last);
    int64_t *by = (int64_t *)(void *)(args + op_stage_bytes(stage));
    for (int32_t n = 0; n < lists; n++)
        for (int32_t i = 0; i < list[n].count; i++, by += b->loop->dims)
            if (op_stage_view(args, &list[n], i) == view)
                by[dim] = elements * (int64_t)quern_dtype_size(view->dtype);
}

void op_cut(op_build *b, quern_tensor *view, int32_t along)
{
    if (b->loop == NULL || view->ndim == 0) return;
    const int64_t rounds = b->loop->extent[0], part = rounds > 0 ? view->shape[along] / rounds : 0;
    view_narrow(view, along, 0, part);
    op_moves(b, view, 0, part * view->strides[along]);
}

quern_status op_program_build(op_call *call)
{
    op_build b;
    const size_t at = call->family->program_at;
    b.call = call;
    b.a = op_workspace();
    b.program = &call->program;
    b.program->steps = b.program->loops = 0;
    b.program->bytes = 0;
    b.program->beside = false;
    b.room = (char *)call + at;
    b.room_bytes = call->family->call_size - at;
    b.last = NULL;
    b.loop = NULL;
    b.scratch_bytes = 0;
    b.status = QUERN_OK;
    call->family->build(&b);
    if (b.program->steps > OP_BESIDE_MOST || b.program->loops > 0) b.program->beside = false;
    if (b.status == QUERN_OK) check_steps(&b);
    if (!b.program->beside) {
        call->program.scratch = arena_take(&b.a, b.scratch_bytes);
        share_scratch(&b, call->program.scratch);
    }
    op_workspace_end(call, &b.a);
    return b.status;
}
