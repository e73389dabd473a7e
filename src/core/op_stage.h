/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_stage.h - the stages as data: what a program knows of each by its number. */
#ifndef QUERN_CORE_OP_STAGE_H
#define QUERN_CORE_OP_STAGE_H

#include "backend.h"

/* A stage's number. */
#define OP_STAGE_NUMBER(stage, name) OP_##stage,
typedef enum op_stage { BACKEND_STAGES(OP_STAGE_NUMBER, OP_STAGE_NUMBER) OP_STAGES } op_stage;

/* The arguments of one stage, by its name. */
#define OP_STAGE_ARGS(stage, name) name##_args stage;
typedef union op_args {
    BACKEND_STAGES(OP_STAGE_ARGS, OP_STAGE_ARGS)
} op_args;

const char *op_stage_name(op_stage stage);
/* Bytes of the arguments. */
size_t op_stage_bytes(op_stage stage);

typedef struct op_view_at {
    const char *field;
    uint16_t offset;
    uint8_t role;
} op_view_at;
/* Views among a stage's arguments, or among a member of them that starts at `base`. */
typedef struct op_view_list {
    const op_view_at *at;
    int32_t count;
    size_t base;
} op_view_list;
enum { OP_VIEW_LISTS = 5 };
/* All views of a stage's arguments; returns how many lists there are. */
int32_t op_stage_views(op_stage stage, op_view_list list[OP_VIEW_LISTS]);
/* The i-th of a list, among the arguments; whether the stage may write it. */
static inline quern_tensor *op_stage_view(const void *args, const op_view_list *list, int32_t i)
{
    return (quern_tensor *)((uintptr_t)args + list->base + list->at[i].offset);
}
bool op_stage_writes(op_stage stage, const op_view_list *list, int32_t i);

/* Whether a backend has a stage; whether it takes the arguments (why not: in `why`), and its workspace. */
bool op_stage_of(const quern_backend *backend, op_stage stage);
bool op_stage_takes(const quern_backend *backend, op_stage stage, const stage_exec *exec, const void *args,
                    char why[STAGE_WHY_BYTES]);
size_t op_stage_workspace(const quern_backend *backend, op_stage stage, const stage_exec *exec,
                          const void *args);
quern_status op_stage_run(const quern_backend *backend, op_stage stage, const stage_exec *exec,
                          const op_args *args, void *workspace);
/* The name of the kernels that it would choose, "" where it names none. */
void op_stage_kernel(const quern_backend *backend, op_stage stage, const stage_exec *exec, const void *args,
                     char kernel[STAGE_NAME_BYTES]);

#endif
