/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* steps.c - a call's list of steps: adding one, sizing their workspace, running them. */
#include "moe/call.h"

#include "core/error.h"
#include "core/view.h"

static int32_t add(moe_call *c, moe_step_kind kind)
{
    c->step[c->steps] = (moe_step){(uint8_t)kind, c->used[kind]};
    c->steps++;
    return c->used[kind]++;
}

// NOLINTBEGIN(bugprone-macro-parentheses): a function's name cannot stand in parentheses here
#define ADD(stage, name, most)                                                                               \
    name##_args *moe_add_##stage(moe_call *c)                                                                \
    {                                                                                                        \
        name##_args *args = &c->stage[add(c, MOE_##stage)];                                                  \
        *args = (name##_args){0};                                                                            \
        return args;                                                                                         \
    }
MOE_STEPS(ADD)
// NOLINTEND(bugprone-macro-parentheses)

/* Whether the backend has a step's stage and takes its arguments, and the bytes that it needs. */
static bool takes(const moe_call *c, const moe_step *step, size_t *bytes, char why[STAGE_WHY_BYTES])
{
    const quern_backend *b = c->head.backend;
    const stage_exec *exec = &c->head.exec;
    switch ((moe_step_kind)step->kind) {
#define TAKES(stage, name, most)                                                                             \
    case MOE_##stage:                                                                                        \
        if (b->stage.run == NULL) return false;                                                              \
        *bytes = STAGE_WORKSPACE(b->stage, exec, &c->stage[step->index]);                                    \
        return STAGE_TAKES(b->stage, exec, &c->stage[step->index], why);
        MOE_STEPS(TAKES)
    case MOE_STEP_KINDS: break;
    }
    return false;
}

quern_status moe_end(moe_call *c)
{
    size_t most = 0;
    for (int32_t i = 0; i < c->steps; i++) {
        char why[STAGE_WHY_BYTES] = "";
        size_t bytes = 0;
        if (!takes(c, &c->step[i], &bytes, why))
            return error_set(QUERN_ERR_UNSUPPORTED, "%s%s%s: the cpu has the layer",
                             why[0] != '\0' ? why : "the ", why[0] != '\0' ? "" : c->head.backend->name,
                             why[0] != '\0' ? "" : " backend has no mixture of experts");
        if (bytes > most) most = bytes;
    }
    c->scratch = arena_take(&c->a, most);
    op_workspace_end(&c->head, &c->a);
    return QUERN_OK;
}

quern_status moe_run(const op_call *call, const op_frame *frame)
{
    const moe_call *c = (const moe_call *)call;
    quern_status status = QUERN_OK;
    for (int32_t i = 0; i < c->steps && status == QUERN_OK; i++) {
        const moe_step *step = &c->step[i];
        switch ((moe_step_kind)step->kind) {
#define RUN(stage, name, most)                                                                               \
    case MOE_##stage: status = op_##stage(call, frame, &c->stage[step->index], c->scratch); break;
            MOE_STEPS(RUN)
        case MOE_STEP_KINDS: break;
        }
    }
    return status;
}

quern_tensor moe_room(moe_call *c, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    void *data = arena_take(&c->a, (size_t)(rows * columns) * quern_dtype_size(dtype));
    return view_on(&c->head.like, data, dtype, 2, shape);
}

quern_tensor moe_flat(moe_call *c, moe_tensor tensor)
{
    const quern_tensor t = op_view(&c->head, tensor, false);
    quern_tensor flat;
    if (t.ndim == 0 || view_flatten(&t, &flat)) return t.ndim == 0 ? t : flat;
    permute_args *copy = moe_add_permute(c);
    copy->x = t;
    return copy->out = moe_room(c, t.dtype, c->head.symbol[MS_T], t.shape[t.ndim - 1]);
}

void moe_give(moe_call *c, moe_tensor tensor, const quern_tensor *from)
{
    if (!op_uses(&c->head, tensor)) return;
    permute_args *copy = moe_add_permute(c);
    copy->x = *from;
    copy->out = op_view(&c->head, tensor, false);
}
