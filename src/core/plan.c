/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plan.c - plans: an op_call that outlives the call which made it. */
#include <quern/plan.h>

#include "core/error.h"
#include "core/op.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* The family's struct, whose head this is. */
struct quern_plan {
    op_call call;
};

quern_status quern_plan_create(quern_context *ctx, quern_operation operation, const void *params,
                               const void *tensors, quern_plan **plan)
{
    if (plan == NULL) return error_argument("plan is NULL: a place for the plan is needed");
    for (size_t i = 0; quern_families[i] != NULL; i++) {
        const op_family *family = quern_families[i];
        if (operation < family->first || (int64_t)operation - family->first >= family->operation_count)
            continue;
        const int32_t at = (int32_t)operation - (int32_t)family->first;
        op_call *call = malloc(family->call_size);
        if (call == NULL)
            return error_set(QUERN_ERR_OUT_OF_MEMORY, "no memory for a plan of %zu bytes", family->call_size);
        const quern_status status = op_prepare(call, family, at, ctx, params, tensors, OP_AT_ALIGNMENT);
        if (status != QUERN_OK) {
            free(call);
            return status;
        }
        if (call->backend->replay_open != NULL)
            call->replay = call->backend->replay_open(&call->exec, OP_ADDRESSES_BYTES);
        *plan = (quern_plan *)call;
        return QUERN_OK;
    }
    return error_argument("operation %d: the values of quern_operation are accepted", (int)operation);
}

void quern_plan_destroy(quern_plan *plan)
{
    if (plan != NULL && plan->call.replay != NULL) plan->call.backend->replay_close(plan->call.replay);
    free(plan);
}

static quern_status need_plan(const quern_plan *plan)
{
    return plan != NULL ? QUERN_OK : error_argument("plan is NULL: make one with quern_plan_create()");
}

quern_status quern_plan_workspace(const quern_plan *plan, size_t *bytes)
{
    const quern_status status = need_plan(plan);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_argument("bytes is NULL: a place for the size is needed");
    *bytes = plan->call.bytes;
    return QUERN_OK;
}

quern_status quern_plan_run(const quern_plan *plan, const quern_exec *exec, void *const *data,
                            void *workspace, size_t bytes)
{
    const quern_status status = need_plan(plan);
    return status == QUERN_OK ? op_run_at(&plan->call, exec, data, workspace, bytes) : status;
}

/* Adds to a text of `bytes` bytes that holds *used. */
__attribute__((format(printf, 4, 5))) static void add(char *text, size_t bytes, size_t *used,
                                                      const char *format, ...)
{
    if (*used >= bytes) return;
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(text + *used, bytes - *used, format, list);
    va_end(list);
    *used += n > 0 ? (size_t)n : 0;
}

quern_status quern_plan_describe(const quern_plan *plan, char *text, size_t bytes)
{
    const quern_status status = need_plan(plan);
    if (status != QUERN_OK) return status;
    if (text == NULL || bytes == 0)
        return error_argument("text is NULL or of 0 bytes: room for a line is needed");
    const op_call *c = &plan->call;
    op_listed listed[OP_LISTED_MAX];
    const int32_t count = op_program_list(c, listed);
    size_t used = 0;
    add(text, bytes, &used, "%s on %s", c->family->operations[c->operation], c->backend->name);
    if (c->exec.device == QUERN_CPU) add(text, bytes, &used, " %s", quern_cpu_level_name(c->exec.cpu_level));
    for (int32_t i = 0; i < count; i++) {
        const op_listed *step = &listed[i];
        add(text, bytes, &used, "%s %s", i == 0 ? ":" : ",", step->stage);
        if (step->kernel[0] != '\0') add(text, bytes, &used, " by %s", step->kernel);
        if (step->times > 1) add(text, bytes, &used, " (%lld times)", (long long)step->times);
    }
    add(text, bytes, &used, "; %zu bytes of workspace", c->bytes);
    return QUERN_OK;
}
