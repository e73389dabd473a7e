/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_tensors.c - the checks of a call's tensors by their rows in the family's table. */
#include "core/error.h"
#include "core/op_entry.h"
#include "core/view.h"
#include "runtime/plugin.h"

int32_t op_first_used(const op_call *call, const int32_t *list, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        if (op_uses(call, list[i])) return list[i];
    return OP_NONE;
}

/* The dtypes that a tensor of the call may have, as bits. */
static uint32_t dtypes_of(const op_call *call, const op_tensor *t)
{
    const uint32_t like = view_dtype_bit(call->like.dtype) & VIEW_ACTIVATION,
                   activation = like != 0 ? like : VIEW_ACTIVATION; /* which the first of them has not */
    const quern_tensor *source = t->gradient_of != OP_NONE ? call->given[t->gradient_of] : NULL;
    const quern_tensor *before = t->dtype == OP_LIKE ? call->given[t - call->family->tensors - 1] : NULL;
    switch (t->dtype) {
    case OP_ACTIVATION: return activation;
    case OP_WEIGHT: return activation | VIEW_F32;
    case OP_FLOAT: return VIEW_ACTIVATION;
    case OP_F32:
    case OP_GLOBAL: return VIEW_F32;
    case OP_I32: return VIEW_I32;
    case OP_INDEX: return VIEW_I32 | VIEW_I64;
    case OP_I64: return VIEW_I64;
    case OP_U8: return VIEW_U8;
    case OP_CODES: return VIEW_CODES;
    case OP_SCALE: return VIEW_SCALE;
    case OP_EXPONENT: return VIEW_EXPONENT;
    case OP_STORED:
    case OP_STORED_2: return VIEW_ACTIVATION | VIEW_U8;
    case OP_ANY: return VIEW_ACTIVATION | VIEW_CODES | VIEW_SCALE | VIEW_EXPONENT;
    case OP_SOURCE: return source != NULL ? view_dtype_bit(source->dtype) : VIEW_F32;
    case OP_SOURCE_OR_F32: return VIEW_F32 | (source != NULL ? view_dtype_bit(source->dtype) : 0);
    case OP_LIKE: return before != NULL ? view_dtype_bit(before->dtype) : activation;
    }
    return 0;
}

quern_status op_check_ndim(const op_call *call, int32_t tensor, int32_t ndim)
{
    const quern_tensor *t = call->given[tensor];
    const char *field = call->family->tensors[tensor].field;
    if (t == NULL) return error_argument("%s is NULL: a tensor is needed", field);
    if (t->ndim == ndim) return QUERN_OK;
    return error_argument("%s has %d dimensions: %d are accepted", field, t->ndim, ndim);
}

quern_status op_find_batch(const op_call *call, int32_t cu, const quern_tensor *lead, int64_t *batch)
{
    const quern_tensor *t = call->given[cu];
    const char *field = call->family->tensors[cu].field;
    if (!call->varlen) {
        *batch = lead->shape[0];
        return QUERN_OK;
    }
    if (t->ndim != 1 || t->shape[0] < 1)
        return error_argument("%s has %d dimensions of %lld: one dimension of batch + 1 offsets is accepted",
                              field, t->ndim, t->ndim == 1 ? (long long)t->shape[0] : 0);
    if (t->shape[0] > INT32_MAX)
        return error_argument("%s.shape[0] is %lld: 1 to %d is accepted", field, (long long)t->shape[0],
                              INT32_MAX);
    *batch = t->shape[0] - 1;
    return QUERN_OK;
}

/* Why a tensor has its role. */
static const char *reason_of(op_call *call, int32_t tensor, const char *otherwise, char text[OP_REASON])
{
    call->asks = tensor + 1;
    call->why = otherwise;
    call->family->roles(call);
    call->asks = 0;
    if (call->why != NULL) return call->why;
    return call->family->refuse != NULL ? call->family->refuse(call, tensor, text) : "";
}

static quern_status check_roles(op_call *call)
{
    char text[OP_REASON];
    for (int32_t i = 0; i < call->family->tensor_count; i++)
        if (call->role[i] == OP_REFUSED && call->given[i] != NULL)
            return error_argument("%s is given%s", call->family->tensors[i].field,
                                  reason_of(call, i, NULL, text));
    return QUERN_OK;
}

/* (Where a tensor follows from the others, quern_op_expect() may be called without it.) */
static quern_status check_needed(op_call *call)
{
    if (call->family->complete != NULL) return QUERN_OK;
    for (int32_t i = 0; i < call->family->tensor_count; i++)
        if ((call->role[i] == OP_NEEDED || call->role[i] == OP_UPDATED) && call->given[i] == NULL)
            return error_argument("%s is NULL%s", call->family->tensors[i].field,
                                  reason_of(call, i, ": a tensor is needed", NULL));
    return QUERN_OK;
}

/* The first tensor that others are like, or OP_NONE. */
static int32_t find_like(const op_call *call)
{
    static const int8_t first[] = {0, OP_NONE};
    const int8_t *list = call->family->like != NULL ? call->family->like : first;
    while (*list != OP_NONE && !op_uses(call, *list)) list++;
    return *list;
}

static const uint8_t *symbols_of(const op_call *call, const op_tensor *t)
{
    return call->varlen && t->varlen[0] != 0 ? t->varlen : t->fixed;
}

/* How many extents a shape has; OP_NONE: that depends on the call. */
static int32_t dims_of(const op_tensor *t, const uint8_t *symbols)
{
    int32_t n = 0;
    for (; n < QUERN_MAX_DIMS && symbols[n] != 0; n++)
        if (symbols[n] >= OP_LEAD) return OP_NONE;
    return t->dtype == OP_GLOBAL ? OP_NONE : n;
}

/* Symbols get the extents of tensors that come in: of the first one with each. */
static quern_status bind_symbols(op_call *call)
{
    uint32_t bound = 0;
    for (int32_t i = 0; i < call->family->tensor_count; i++) {
        const quern_tensor *t = call->given[i];
        const uint8_t role = call->role[i];
        if (t == NULL || (role != OP_NEEDED && role != OP_OPTIONAL && role != OP_UPDATED)) continue;
        const op_tensor *row = &call->family->tensors[i];
        const uint8_t *symbols = symbols_of(call, row);
        const int32_t ndim = dims_of(row, symbols);
        if (ndim == OP_NONE || (call->varlen && i == call->family->varlen_by)) continue; /* op_find_batch() */
        const quern_status status = op_check_ndim(call, i, ndim);
        if (status != QUERN_OK) return status;
        for (int32_t d = 0; d < ndim; d++) {
            if (symbols[d] >= OP_SYMBOLS_MAX || bound >> symbols[d] & 1) continue;
            bound |= 1u << symbols[d];
            call->symbol[symbols[d]] = t->shape[d];
        }
    }
    return QUERN_OK;
}

/* Dtype and device. */
static quern_status check_kind(const op_call *call, int32_t tensor)
{
    const op_tensor *t = &call->family->tensors[tensor];
    return view_check_kind(t->field, dtypes_of(call, t), call->given[tensor], &call->like);
}

quern_status op_derive(op_call *call)
{
    quern_status status = check_roles(call);
    if (status == QUERN_OK) status = check_needed(call);
    if (status != QUERN_OK) return status;
    const int32_t like = find_like(call);
    if (like != OP_NONE) {
        call->like = *call->given[like];
        status = check_kind(call, like); /* which the others' are compared with */
    }
    for (int32_t i = 0; status == QUERN_OK && i < call->family->tensor_count; i++)
        if (op_uses(call, i) && i != like) status = check_kind(call, i);
    for (int32_t i = 0; status == QUERN_OK && i < call->family->tensor_count; i++)
        if (op_uses(call, i)) status = view_check_extents(call->family->tensors[i].field, call->given[i]);
    if (status == QUERN_OK) status = bind_symbols(call);
    if (status == QUERN_OK && call->family->derive != NULL) status = call->family->derive(call);
    call->like.data = NULL; /* a call holds no addresses: where its tensors are elsewhere, it is the same */
    return status;
}

void op_gradient_roles(op_call *call, int32_t first, int32_t last, bool backward)
{
    for (int32_t i = first; i <= last; i++) {
        const int8_t of = call->family->tensors[i].gradient_of;
        call->role[i] = !backward                      ? OP_UNUSED
                        : call->given[of] == NULL      ? OP_SOURCE_MISSING
                        : call->role[of] == OP_REFUSED ? OP_REFUSED
                                                       : OP_OPTIONAL_RESULT;
    }
}

static quern_status check_sources(const op_call *call)
{
    const op_tensor *all = call->family->tensors;
    for (int32_t i = 0; i < call->family->tensor_count; i++) {
        if (call->role[i] != OP_SOURCE_MISSING || call->given[i] == NULL) continue;
        const char *of = all[all[i].gradient_of].field;
        return error_argument("%s is given and %s is NULL: both or no %s are accepted", all[i].field, of,
                              all[i].field);
    }
    return QUERN_OK;
}

/* The extent of a place, or the part of it, in a shape. */
static int64_t extent_of(const op_call *call, uint8_t symbol)
{
    const int64_t extent = call->symbol[symbol % OP_SYMBOLS_MAX];
    switch (symbol / OP_SYMBOLS_MAX * OP_SYMBOLS_MAX) {
    case OP_HALF: return extent / 2;
    case OP_SIXTEENTH: return extent / 16;
    case OP_128TH: return extent / 128 + (extent % 128 != 0);
    default: return extent;
    }
}

int32_t op_shape(const op_call *call, int32_t tensor, int64_t shape[QUERN_MAX_DIMS])
{
    const uint8_t *symbols = symbols_of(call, &call->family->tensors[tensor]);
    int32_t n = 0;
    for (int32_t i = 0; i < QUERN_MAX_DIMS && symbols[i] != 0; i++) {
        if (symbols[i] < OP_LEAD) {
            shape[n++] = extent_of(call, symbols[i]);
            continue;
        }
        const op_extents *lead = &call->lead[symbols[i] - OP_LEAD];
        for (int32_t k = 0; k < lead->count; k++) shape[n++] = lead->extent[k];
    }
    return n;
}

/* The form, among those that a global may have, of the one that is given. */
static int32_t global_shape(const quern_tensor *given, int32_t ndim, int64_t shape[QUERN_MAX_DIMS])
{
    if (given->ndim == ndim + 1 && ndim < QUERN_MAX_DIMS && given->shape[ndim] == 1) shape[ndim++] = 1;
    else if (given->ndim == 0 && ndim == 1 && shape[0] == 1) ndim = 0;
    return ndim;
}

static uint8_t alignment_of(const quern_tensor *t, op_looks looks)
{
    return looks == OP_AT_SHAPES ? (uint8_t)quern_dtype_size(t->dtype) : op_alignment_of(t);
}

quern_status op_check_tensors(op_call *call, op_looks looks, op_used *used)
{
    used->count = 0;
    for (int32_t i = 0; i < call->family->tensor_count; i++) {
        const op_tensor *t = &call->family->tensors[i];
        const uint8_t role = call->role[i];
        int64_t shape[QUERN_MAX_DIMS];
        if (!op_uses(call, i)) {
            if ((role == OP_NEEDED || role == OP_RESULT || role == OP_UPDATED) && call->given[i] == NULL)
                return error_argument("%s is NULL: a tensor is needed", t->field);
            continue;
        }
        int32_t ndim = op_shape(call, i, shape);
        if (t->dtype == OP_GLOBAL) ndim = global_shape(call->given[i], ndim, shape);
        const view_want want = {t->field, 0, ndim, shape, op_is_result(call, i), looks == OP_AT_DATA};
        view_span *span = &used->span[used->count];
        const quern_status status = view_check_layout(&want, call->given[i], span);
        if (status != QUERN_OK) return status;
        if (span->high != 0) call->alignment[i] = alignment_of(call->given[i], looks);
        if (want.output && span->high != 0) call->writes = true;
        if (want.output && span->high == 0) call->has_empty_result = true;
        used->index[used->count++] = (uint8_t)i;
    }
    return check_sources(call);
}

static quern_status shared(const char *a, const char *b)
{
    return error_argument("%s shares memory with %s: outputs need memory of their own", a, b);
}

quern_status op_check_memory(const op_call *call, const quern_tensor *const *given, const op_used *used)
{
    const op_tensor *all = call->family->tensors;
    for (int32_t i = 0; i < used->count; i++) {
        const int32_t a = used->index[i];
        if (!op_is_result(call, a)) continue;
        for (int32_t j = 0; j < used->count; j++) {
            const int32_t b = used->index[j];
            if (i != j && (!op_is_result(call, b) || j < i) &&
                view_share_memory(given[a], &used->span[i], given[b], &used->span[j]))
                return shared(all[a].field, all[b].field);
        }
    }
    for (int32_t i = 0; i < used->count; i++) {
        if (used->span[i].high == 0) continue;
        const int32_t a = used->index[i];
        const quern_status status =
            plugin_check_pointer(given[a]->data, call->like.device, call->like.device_id, all[a].field);
        if (status != QUERN_OK) return status;
    }
    return QUERN_OK;
}

quern_status op_check_status(const op_call *call, const quern_tensor *status,
                             const quern_tensor *const *given, const op_used *used)
{
    const int64_t one[] = {1};
    const view_want want = {"exec.status", VIEW_I32, 1, one, true, true};
    view_span span;
    if (status == NULL) return QUERN_OK;
    const quern_status code = view_check_one(&want, status, &call->like, &span);
    if (code != QUERN_OK || used == NULL) return code;
    for (int32_t i = 0; i < used->count; i++)
        if (view_share_memory(status, &span, given[used->index[i]], &used->span[i]))
            return shared("exec.status", call->family->tensors[used->index[i]].field);
    return plugin_check_pointer(status->data, call->like.device, call->like.device_id, "exec.status");
}
