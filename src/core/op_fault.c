/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_fault.c - the sentences of faults of data that stages report. */
#include "core/error.h"
#include "core/half.h"
#include "core/op.h"

#include <stdio.h>

enum { NAME_BYTES = 96 };

/* The address of an element by its flat index. */
static const void *element_at(const quern_tensor *t, int64_t index)
{
    int64_t at = 0;
    for (int32_t d = t->ndim - 1; d >= 0; index /= t->shape[d], d--)
        at += index % t->shape[d] * t->strides[d];
    return (const char *)t->data + at * (int64_t)quern_dtype_size(t->dtype);
}

static double number_at(const quern_tensor *t, int64_t index)
{
    const void *p = element_at(t, index);
    switch (t->dtype) {
    case QUERN_F32: return (double)*(const float *)p;
    case QUERN_F16: return (double)float_from_f16(*(const uint16_t *)p);
    default: return (double)float_from_bf16(*(const uint16_t *)p);
    }
}

static int64_t integer_at(const quern_tensor *t, int64_t index)
{
    const void *p = element_at(t, index);
    switch (t->dtype) {
    case QUERN_I32: return *(const int32_t *)p;
    case QUERN_I64: return *(const int64_t *)p;
    default: return *(const uint8_t *)p;
    }
}

/* "[2]" or, of a table, "[2, 0]". */
static void write_place(char *text, size_t bytes, const quern_tensor *t, int64_t index)
{
    int64_t at[QUERN_MAX_DIMS];
    int used = snprintf(text, bytes, "[");
    for (int32_t d = t->ndim - 1; d > 0; index /= t->shape[d], d--) at[d] = index % t->shape[d];
    at[0] = index;
    for (int32_t d = 0; d < t->ndim && used > 0 && (size_t)used < bytes; d++)
        used += snprintf(text + used, bytes - (size_t)used, "%s%lld%s", d > 0 ? ", " : "", (long long)at[d],
                         d + 1 == t->ndim ? "]" : "");
}

/* Offsets rise from the one before to the number of rows, maybe by multiples. */
static quern_status say_offset(const char *name, int64_t shown, const stage_fault *fault)
{
    const long long given = (long long)integer_at(fault->tensor, fault->index);
    const quern_tensor *t = fault->tensor;
    if (t->ndim == 2 && t->strides[0] == t->strides[1]) shown = shown / 2 + shown % 2; /* offsets as ranges */
    if (fault->multiple > 1)
        return error_argument("%s[%lld] is %lld: a multiple of %lld from %lld to %lld is accepted", name,
                              (long long)shown, given, (long long)fault->multiple, (long long)fault->least,
                              (long long)fault->most);
    if (given < fault->least)
        return error_argument("%s[%lld] is %lld after %lld: it may not fall", name, (long long)shown, given,
                              (long long)fault->least);
    return error_argument("%s[%lld] is %lld: at most the %lld rows are accepted", name, (long long)shown,
                          given, (long long)fault->most);
}

/* `shown` is the index in the caller's tensor, fault->index that in the stage's view. */
static quern_status say(const char *name, int64_t shown, const stage_fault *fault, bool result)
{
    const quern_tensor *t = fault->tensor;
    const int64_t columns = t->shape[t->ndim - 1];
    char text[128] = "not finite before it is quantised";
    switch (fault->kind) {
    case QUERN_STATUS_NOT_FINITE:
        if (!result) (void)snprintf(text, sizeof text, "%g", number_at(t, fault->index));
        return error_argument("%s[%lld] (row %lld, column %lld) is %s: finite numbers are accepted", name,
                              (long long)shown, (long long)(shown / columns), (long long)(shown % columns),
                              text);
    case QUERN_STATUS_BAD_GLOBAL:
        return error_argument("%s[%lld] is %g: a global above 0 and finite is accepted", name,
                              (long long)shown, number_at(t, fault->index));
    case QUERN_STATUS_BAD_SCALE:
        if (t->dtype == QUERN_F32)
            return error_argument(
                "%s[%lld] is the scale %g: a finite one by which no weight exceeds f32 is accepted", name,
                (long long)shown, number_at(t, fault->index));
        return error_argument("%s[%lld] is the scale byte 0x%02X: 0x%02X to 0x%02X are accepted", name,
                              (long long)shown, (unsigned)integer_at(t, fault->index), (unsigned)fault->least,
                              (unsigned)fault->most);
    case QUERN_STATUS_BAD_OFFSETS: return say_offset(name, shown, fault);
    default:
        write_place(text, sizeof text, t, shown);
        return error_argument("%s%s is %lld: %lld to %lld is accepted", name, text,
                              (long long)integer_at(t, fault->index), (long long)fault->least,
                              (long long)fault->most);
    }
}

/* The caller's tensor that a view is part of, or a copy of, and how far into it; OP_NONE: none. */
static int32_t source_of(const op_call *call, const quern_tensor *view, int64_t *bytes)
{
    const int32_t tensor = op_pointed(call, view->data, bytes);
    const op_step *step = op_program_steps(call);
    if (tensor != OP_NONE) return tensor;
    for (int32_t i = 0; i < call->program.steps; i++, step = op_step_next(step)) {
        if (step->stage != OP_permute) continue;
        const permute_args *copy = op_step_args(step);
        if (copy->permutation.ndim == 0 && copy->out.data == view->data)
            return op_pointed(call, copy->x.data, bytes);
    }
    return OP_NONE;
}

quern_status op_fault(const op_call *call, const op_step *step, const op_args *now, const stage_fault *fault)
{
    op_view_list list[OP_VIEW_LISTS];
    const op_stage stage = (op_stage)step->stage;
    for (int32_t n = op_stage_views(stage, list) - 1; n >= 0; n--)
        for (int32_t i = 0; i < list[n].count; i++) {
            if (op_stage_view(now, &list[n], i) != fault->tensor) continue;
            const quern_tensor *view = op_stage_view(op_step_args(step), &list[n], i);
            char name[NAME_BYTES];
            int64_t bytes = 0;
            const int32_t source = source_of(call, view, &bytes),
                          tensor = source != OP_NONE ? source : (int32_t)step->made_for - 1;
            if (tensor == OP_NONE)
                (void)snprintf(name, sizeof name, "the stage %s: %s", op_stage_name(stage),
                               list[n].at[i].field);
            else (void)snprintf(name, sizeof name, "%s", call->family->tensors[tensor].field);
            return say(name, fault->index + bytes / (int64_t)quern_dtype_size(view->dtype), fault,
                       op_stage_writes(stage, &list[n], i));
        }
    return error_set(QUERN_ERR_INTERNAL, "the stage %s reports a fault of a tensor that it was not given",
                     op_stage_name(stage));
}
