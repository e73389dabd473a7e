/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_stage.c - the stages as data, from the lists in backend.h and in the stages' headers. */
#include "core/op_stage.h"

#include <stddef.h>

size_t op_stage_bytes(op_stage stage)
{
#define BYTES(stage, name) [OP_##stage] = sizeof(name##_args),
    static const uint16_t bytes[] = {BACKEND_STAGES(BYTES, BYTES)};
    return bytes[stage];
}

const char *op_stage_name(op_stage stage)
{
#define NAME(stage, name) [OP_##stage] = #stage,
    static const char *const names[] = {BACKEND_STAGES(NAME, NAME)};
    return names[stage];
}

static bool is_backward(op_stage stage)
{
#define NO(stage, name) [OP_##stage] = false,
#define YES(stage, name) [OP_##stage] = true,
    static const bool backward[] = {BACKEND_STAGES(NO, YES)};
    return backward[stage];
}

typedef enum view_role { READ, RESULT, GRADIENT } view_role;

#define READ_AT(field) {#field, offsetof(of, field), READ},
#define RESULT_AT(field) {#field, offsetof(of, field), RESULT},
#define GRADIENT_AT(field) {#field, offsetof(of, field), GRADIENT},
#define LIST_VIEWS(name, NAME)                                                                               \
    static int32_t name##_views(op_view_list list[])                                                         \
    {                                                                                                        \
        typedef name##_args of;                                                                              \
        static const op_view_at at[] = {NAME##_TENSORS(READ_AT, RESULT_AT, GRADIENT_AT)};                    \
        *list = (op_view_list){at, sizeof at / sizeof *at, 0};                                               \
        return 1;                                                                                            \
    }
BACKEND_ARGS(LIST_VIEWS)

static int32_t attend_gate_views(op_view_list list[])
{
    for (int i = 0; i < 3; i++) {
        (void)attend_views(&list[i]);
        list[i].base = offsetof(attend_gate_args, branch) + (size_t)i * sizeof(attend_args);
    }
    (void)select_views(&list[3]);
    list[3].base = offsetof(attend_gate_args, select);
    (void)gate_views(&list[4]);
    list[4].base = offsetof(attend_gate_args, gate);
    return OP_VIEW_LISTS;
}

int32_t op_stage_views(op_stage stage, op_view_list list[OP_VIEW_LISTS])
{
    switch (stage) {
#define VIEWS(stage, name)                                                                                   \
    case OP_##stage: return name##_views(list);
        BACKEND_STAGES(VIEWS, VIEWS)
    case OP_STAGES: break;
    }
    return 0;
}

bool op_stage_writes(op_stage stage, const op_view_list *list, int32_t i)
{
    return list->at[i].role == (is_backward(stage) ? GRADIENT : RESULT);
}

/* ---- what a backend says of a stage ---- */

bool op_stage_of(const quern_backend *backend, op_stage stage)
{
    switch (stage) {
#define HAS(stage, name)                                                                                     \
    case OP_##stage: return backend->stage.run != NULL;
        BACKEND_STAGES(HAS, HAS)
    case OP_STAGES: break;
    }
    return false;
}

bool op_stage_takes(const quern_backend *backend, op_stage stage, const stage_exec *exec, const void *args,
                    char why[STAGE_WHY_BYTES])
{
    switch (stage) {
#define TAKES(stage, name)                                                                                   \
    case OP_##stage: return STAGE_TAKES(backend->stage, exec, args, why);
        BACKEND_STAGES(TAKES, TAKES)
    case OP_STAGES: break;
    }
    return false;
}

size_t op_stage_workspace(const quern_backend *backend, op_stage stage, const stage_exec *exec,
                          const void *args)
{
    switch (stage) {
#define WORKSPACE(stage, name)                                                                               \
    case OP_##stage: return STAGE_WORKSPACE(backend->stage, exec, args);
        BACKEND_STAGES(WORKSPACE, WORKSPACE)
    case OP_STAGES: break;
    }
    return 0;
}

quern_status op_stage_run(const quern_backend *backend, op_stage stage, const stage_exec *exec,
                          const op_args *args, void *workspace)
{
    switch (stage) {
#define RUN(stage, name)                                                                                     \
    case OP_##stage: return backend->stage.run(exec, &args->stage, workspace);
        BACKEND_STAGES(RUN, RUN)
    case OP_STAGES: break;
    }
    return QUERN_OK;
}

void op_stage_kernel(const quern_backend *backend, op_stage stage, const stage_exec *exec, const void *args,
                     char kernel[STAGE_NAME_BYTES])
{
    kernel[0] = '\0';
    switch (stage) {
#define KERNEL(stage, name)                                                                                  \
    case OP_##stage:                                                                                         \
        if (backend->stage.kernel != NULL) backend->stage.kernel(exec, args, kernel);                        \
        return;
        BACKEND_STAGES(KERNEL, KERNEL)
    case OP_STAGES: return;
    }
}
