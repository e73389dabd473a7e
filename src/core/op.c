/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op.c - the checks that follow from a family's description, and calls over them. */
#include "core/op_entry.h"

#include "runtime/context.h"
#include "core/error.h"
#include "core/float_state.h"
#include "runtime/plugin.h"
#include "core/view.h"

#include <alloca.h>
#include <math.h>
#include <string.h>

/* ---- parameters ---- */

static float number_of(const op_param *p, const void *params)
{
    float x;
    memcpy(&x, (const char *)params + p->offset, sizeof x);
    return x;
}

/* What a float whose 0 has a meaning means by it; NULL: none has. */
static const char *zero_of(op_kind kind)
{
    return kind == OP_ROOT       ? "1/sqrt(D)"
           : kind == OP_POSITIVE ? "the default"
           : kind == OP_LIMIT    ? "no clamp"
                                 : NULL;
}

quern_status op_check_ranges(const op_family *family, const void *params)
{
    for (int32_t i = 0; i < family->param_count; i++) {
        const op_param *p = &family->params[i];
        const char *zero = zero_of(p->kind);
        if (zero != NULL) {
            const float x = number_of(p, params);
            if (!(x >= 0.0f) || isinf(x))
                return error_argument("%s is %g: 0 (%s) or a finite positive number is accepted", p->field,
                                      (double)x, zero);
        } else if (p->kind == OP_NUMBER) {
            const float x = number_of(p, params);
            if (!isfinite(x))
                return error_argument("%s is %g: a finite number is accepted", p->field, (double)x);
        } else {
            const int64_t x = op_param_value(p, params);
            if (x < p->least || x > p->most)
                return error_argument("%s is %lld: %lld to %lld is accepted", p->field, (long long)x,
                                      (long long)p->least, (long long)p->most);
        }
    }
    return QUERN_OK;
}

/* ---- tensors ---- */

int32_t op_first_used(const op_call *call, const int32_t *list, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        if (op_uses(call, list[i])) return list[i];
    return OP_NONE;
}

quern_status op_check_activation(const op_call *call, int32_t tensor, int32_t ndim)
{
    view_span span;
    const view_want want = {call->family->tensors[tensor].field, VIEW_ACTIVATION, ndim, NULL, false, false};
    return view_check_one(&want, call->given[tensor], &call->like, &span);
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

quern_status op_check_kind(const op_call *call, int32_t tensor, int32_t ndim)
{
    view_span span;
    const op_tensor *t = &call->family->tensors[tensor];
    const view_want want = {t->field, dtypes_of(call, t), ndim, NULL, false, false};
    if (call->given[tensor] == NULL) return error_argument("%s is NULL: a tensor is needed", t->field);
    return view_check_one(&want, call->given[tensor], &call->like, &span);
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
        if (t->ndim != ndim)
            return error_argument("%s has %d dimensions: %d are accepted", row->field, t->ndim, ndim);
        for (int32_t d = 0; d < ndim; d++) {
            if (symbols[d] >= OP_SYMBOLS_MAX || bound >> symbols[d] & 1) continue;
            bound |= 1u << symbols[d];
            call->symbol[symbols[d]] = t->shape[d];
        }
    }
    return QUERN_OK;
}

quern_status op_derive(op_call *call)
{
    quern_status status = check_roles(call);
    for (int32_t i = 0; status == QUERN_OK && i < call->family->tensor_count; i++)
        if (op_uses(call, i)) status = view_check_extents(call->family->tensors[i].field, call->given[i]);
    if (status == QUERN_OK) status = check_needed(call);
    if (status != QUERN_OK) return status;
    const int32_t like = find_like(call);
    if (like != OP_NONE) call->like = *call->given[like];
    status = bind_symbols(call);
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

quern_status op_repacked_bytes(const op_call *call, int64_t n, int64_t k, int64_t *bytes)
{
    const quern_backend *backend = context_backend_of(call->like.device, call->like.device_id);
    if (backend == NULL) return error_status();
    if (backend->repacked_bytes == NULL) return op_lacks(backend, OP_prepack);
    *bytes = backend->repacked_bytes(n, k);
    return QUERN_OK;
}

static uint8_t alignment_of(const quern_tensor *t, op_looks looks)
{
    return looks == OP_AT_SHAPES ? (uint8_t)quern_dtype_size(t->dtype) : op_alignment_of(t);
}

static bool is_result(const op_call *call, int32_t tensor)
{
    const uint8_t role = call->role[tensor];
    return role == OP_RESULT || role == OP_OPTIONAL_RESULT || role == OP_UPDATED;
}

/* Checks each tensor alone. */
static quern_status check_tensors(op_call *call, op_looks looks, op_used *used)
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
        const view_want want = {t->field, dtypes_of(call, t), ndim,
                                shape,    is_result(call, i), looks == OP_AT_DATA};
        view_span *span = &used->span[used->count];
        const quern_status status = view_check_one(&want, call->given[i], &call->like, span);
        if (status != QUERN_OK) return status;
        if (span->high != 0) call->alignment[i] = alignment_of(call->given[i], looks);
        if (want.output && span->high != 0) call->writes = true;
        if (want.output && span->high == 0) call->has_empty_result = true;
        used->index[used->count++] = (uint8_t)i;
    }
    return QUERN_OK;
}

static quern_status shared(const char *a, const char *b)
{
    return error_argument("%s shares memory with %s: outputs need memory of their own", a, b);
}

/* Checks that no tensor that is written shares memory with another, and that addresses are of the device. */
static quern_status check_memory(const op_call *call, const quern_tensor *const *given, const op_used *used)
{
    const op_tensor *all = call->family->tensors;
    for (int32_t i = 0; i < used->count; i++) {
        const int32_t a = used->index[i];
        if (!is_result(call, a)) continue;
        for (int32_t j = 0; j < used->count; j++) {
            const int32_t b = used->index[j];
            if (i != j && (!is_result(call, b) || j < i) &&
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

/* Checks the status word, and that it shares no memory with the tensors (NULL: skips this). */
static quern_status check_status(const op_call *call, const quern_tensor *status,
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

/* ---- calls ---- */

quern_status op_check_backward_scale(float scale)
{
    if (scale <= ATTEND_BACKWARD_SCALE_MOST) return QUERN_OK;
    return error_argument("scale is %g: 0 (1/sqrt(D)) to %d is accepted by a backward", (double)scale,
                          ATTEND_BACKWARD_SCALE_MOST);
}

quern_status op_check_granularity(int64_t granularity)
{
    if (32 % granularity == 0) return QUERN_OK;
    return error_argument("granularity is %lld: a divisor of 32 is accepted", (long long)granularity);
}

quern_status op_begin(op_call *call, const op_family *family, int32_t operation, const void *params,
                      const void *tensors, op_tensors *own)
{
    char *const kept = (char *)call + family->params_at;
    size_t size;
    memcpy(&size, family->defaults, sizeof size);
    /* Calls are compared by their bytes. */
    memset(call, 0, family->program_at);
    memcpy(kept, family->defaults, size);
    call->family = family;
    call->operation = operation;
    quern_status status = op_struct(kept, params, "params", family->params_init);
    if (status == QUERN_OK) status = op_check_ranges(family, kept);
    if (status == QUERN_OK && family->check_params != NULL) status = family->check_params(call);
    if (status != QUERN_OK) return status;
    memset(own, 0, sizeof *own);
    own->size = sizeof own->size + (size_t)family->tensor_count * sizeof(void *);
    if ((status = op_struct(own, tensors, "tensors", family->tensors_init)) != QUERN_OK) return status;
    memcpy(&size, tensors, sizeof size);
    call->given_count = (int32_t)((size < own->size ? size : own->size) / sizeof(void *)) - 1;
    call->given = own->t;
    call->varlen = family->varlen_by > 0 && own->t[family->varlen_by] != NULL;
    if (family->adapt != NULL) family->adapt(call, own->t);
    family->roles(call);
    return QUERN_OK;
}

static quern_status prepare(op_call *call, const op_family *family, int32_t operation, quern_context *ctx,
                            const void *params, const void *tensors, op_looks looks, op_tensors *own,
                            op_used *used)
{
    DEFAULT_FLOAT_STATE; /* a plan resolves defaults, such as the scale */
    used->count = 0;
    if (ctx == NULL) {
        (void)error_argument("ctx is NULL: create one with quern_context_create()");
        return QUERN_ERR_INVALID_ARGUMENT;
    }
    quern_status status = op_begin(call, family, operation, params, tensors, own);
    if (status != QUERN_OK || (status = op_derive(call)) != QUERN_OK ||
        (status = check_tensors(call, looks, used)) != QUERN_OK || (status = check_sources(call)) != QUERN_OK)
        return status;
    if (looks == OP_AT_DATA && (status = check_memory(call, own->t, used)) != QUERN_OK) return status;
    call->backend = context_backend(ctx, call->like.device, call->like.device_id, NULL, &call->exec);
    if (call->backend == NULL) return error_status();
    return op_program_build(call);
}

quern_status op_prepare(op_call *call, const op_family *family, int32_t operation, quern_context *ctx,
                        const void *params, const void *tensors, op_looks looks)
{
    op_tensors own;
    op_used used;
    const quern_status status = prepare(call, family, operation, ctx, params, tensors, looks, &own, &used);
    call->given = NULL;
    return status;
}

quern_status op_workspace_of(const op_family *family, int32_t operation, quern_context *ctx,
                             const void *params, const void *tensors, size_t *bytes)
{
    op_call *call = alloca(family->call_size);
    const quern_status status = op_prepare(call, family, operation, ctx, params, tensors, OP_AT_SHAPES);
    if (status != QUERN_OK) return status;
    if (bytes == NULL) return error_argument("bytes is NULL: a place for the size is needed");
    *bytes = call->bytes;
    return QUERN_OK;
}

/* What a call reads and writes. (The status word takes bits in any order.) */
static int32_t spans_of(const op_call *call, const quern_tensor *const *given, const op_used *used,
                        const void *workspace, op_span spans[OP_TENSORS_MAX + 1])
{
    int32_t count = 0;
    for (int32_t i = 0; i < used->count; i++)
        if (used->span[i].high != 0)
            spans[count++] = op_span_of(given[used->index[i]], is_result(call, used->index[i]));
    const uintptr_t at = (uintptr_t)workspace;
    if (call->bytes > 0) spans[count++] = (op_span){.low = at, .high = at + call->bytes, .written = true};
    return count;
}

static quern_status check_workspace(const op_call *call, const void *workspace, size_t bytes)
{
    if (bytes < call->bytes)
        return error_set(QUERN_ERR_WORKSPACE, "workspace_bytes is %zu: at least %zu are accepted", bytes,
                         call->bytes);
    if (call->bytes > 0 && workspace == NULL)
        return error_argument("workspace is NULL: %zu bytes are needed", call->bytes);
    return QUERN_OK;
}

/* A call and its addresses. */
typedef struct placed_call {
    const op_call *call;
    const op_frame *frame;
} placed_call;

static quern_status run_stages(const void *arg, const stage_exec *exec)
{
    const placed_call *p = arg;
    op_frame frame = *p->frame;
    frame.exec = *exec;
    return op_program_run(p->call, &frame);
}

/* Everything is checked except the contents of offsets that the host can read. */
static quern_status execute(const op_call *call, const quern_exec *exec, void *const *data, void *workspace)
{
    DEFAULT_FLOAT_STATE;
    if (call->like.device == QUERN_CPU) {
        /* Any number of sequences without tokens. */
        if (call->has_empty_result && !call->writes && !call->varlen) return QUERN_OK;
        const quern_status status =
            call->family->check_data != NULL ? call->family->check_data(call, data) : QUERN_OK;
        if (status != QUERN_OK) return status;
    }
    op_frame frame;
    op_frame_of(call, exec, data, workspace, &frame);
    if (call->replay == NULL) return op_program_run(call, &frame);
    return call->backend->replay(call->replay, &frame.exec, frame.base, run_stages,
                                 &(placed_call){call, &frame});
}

/* The last checks of a call: the status word, the workspace. */
static quern_status check_run(const op_call *call, const quern_exec *exec, const quern_tensor *const *given,
                              const op_used *used, const void *workspace, size_t bytes)
{
    quern_status status = check_status(call, exec->status, given, used);
    if (status == QUERN_OK) status = check_workspace(call, workspace, bytes);
    if (status == QUERN_OK && call->bytes > 0)
        status = plugin_check_pointer(workspace, call->like.device, call->like.device_id, "workspace");
    return status;
}

static quern_status run_on(const op_call *call, const quern_exec *exec, const quern_tensor *const *given,
                           const op_used *used, void *workspace)
{
    void *data[OP_TENSORS_MAX];
    memset(data, 0, (size_t)call->family->tensor_count * sizeof *data);
    for (int32_t i = 0; i < used->count; i++)
        if (used->span[i].high != 0) data[used->index[i]] = given[used->index[i]]->data;
    return execute(call, exec, data, workspace);
}

/* Runs a call that was kept: what follows from addresses is checked, as prepare() checks it. */
static quern_status run_kept(const op_call *call, const quern_exec *exec, const quern_tensor *const *given,
                             const op_used *used, void *workspace, size_t bytes)
{
    quern_exec how;
    quern_status status = QUERN_OK;
    for (int32_t i = 0; i < used->count && status == QUERN_OK; i++)
        if (used->span[i].high != 0)
            status = view_check_data(call->family->tensors[used->index[i]].field, given[used->index[i]],
                                     &used->span[i]);
    if (status == QUERN_OK) status = check_memory(call, given, used);
    if (status == QUERN_OK) status = op_exec(exec, &how);
    if (status == QUERN_OK) status = check_run(call, &how, given, used, workspace, bytes);
    return status == QUERN_OK ? run_on(call, &how, given, used, workspace) : status;
}

quern_status op_run(const op_family *family, int32_t operation, quern_context *ctx, const quern_exec *exec,
                    const void *params, const void *tensors, void *workspace, size_t bytes)
{
    op_tensors own;
    op_used used;
    quern_exec how;
    const op_call *ready = NULL;
    const op_used *found = NULL;
    const call_request request = {family, operation, params, tensors};
    kept_call *kept = ctx != NULL ? kept_calls_take(&ctx->calls, &request, &ready, &found) : NULL;
    quern_status status;
    if (ready != NULL) {
        status = run_kept(ready, exec, ((const op_tensors *)tensors)->t, found, workspace, bytes);
        kept_call_release(kept);
        return status;
    }
    op_call *call = alloca(family->call_size);
    status = prepare(call, family, operation, ctx, params, tensors, OP_AT_DATA, &own, &used);
    call->given = NULL;
    if (status == QUERN_OK && kept != NULL) kept_call_fill(kept, &request, call, &used);
    kept_call_release(kept);
    if (status == QUERN_OK) status = op_exec(exec, &how);
    if (status == QUERN_OK) status = check_run(call, &how, own.t, &used, workspace, bytes);
    if (status != QUERN_OK) return status;
    call->replay = replays_find(&ctx->replays, call, how.stream);
    if (call->backend->point == NULL) return run_on(call, &how, own.t, &used, workspace);
    op_span spans[OP_TENSORS_MAX + 1];
    stage_exec recorder = call->exec;
    recorder.stream = how.stream;
    const bool recorded = op_recorded_begin(&ctx->recorded, call->backend, &recorder, spans,
                                            spans_of(call, own.t, &used, workspace, spans));
    status = run_on(call, &how, own.t, &used, workspace);
    const quern_status ended =
        recorded ? op_recorded_end(&ctx->recorded, call->backend, &recorder) : QUERN_OK;
    return status != QUERN_OK ? status : ended;
}

quern_status op_run_at(const op_call *call, const quern_exec *exec, void *const *data, void *workspace,
                       size_t bytes)
{
    quern_exec how;
    void *used[OP_TENSORS_MAX] = {NULL}; /* the array given ends with its struct, maybe an older one */
    quern_status status = op_exec(exec, &how);
    if (status == QUERN_OK && data == NULL)
        status = error_argument("data is NULL: the tensors' addresses are needed");
    if (status != QUERN_OK) return status;
    for (int32_t i = 0; i < call->given_count; i++) {
        const char *field = call->family->tensors[i].field;
        if (call->alignment[i] == 0) continue;
        if (data[i] == NULL)
            return error_argument(
                "data[%d] is NULL: the plan was made with %s, memory is needed for its elements", i, field);
        if ((uintptr_t)data[i] % call->alignment[i] != 0)
            return error_argument("data[%d] (%s) is %p: the plan was made for a multiple of %d", i, field,
                                  data[i], call->alignment[i]);
        used[i] = data[i];
    }
    if ((status = check_status(call, how.status, NULL, NULL)) != QUERN_OK ||
        (status = check_workspace(call, workspace, bytes)) != QUERN_OK)
        return status;
    return execute(call, &how, used, workspace);
}
