/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op.c - calls over a family's description. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/op_entry.h"
#include "core/view.h"
#include "runtime/context.h"
#include "runtime/plugin.h"

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
            const quern_status status =
                error_in_range(p->field, op_param_value(p, params), p->least, p->most);
            if (status != QUERN_OK) return status;
        }
    }
    return QUERN_OK;
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

quern_status op_repacked_bytes(const op_call *call, int64_t n, int64_t k, int64_t *bytes)
{
    const quern_backend *backend = context_backend_of(call->like.device, call->like.device_id);
    if (backend == NULL) return error_status();
    if (backend->repacked_bytes == NULL) return op_lacks(backend, OP_prepack);
    *bytes = backend->repacked_bytes(n, k);
    return QUERN_OK;
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
        (status = op_check_tensors(call, looks, used)) != QUERN_OK)
        return status;
    if (looks == OP_AT_DATA && (status = op_check_memory(call, own->t, used)) != QUERN_OK) return status;
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
            spans[count++] = op_span_of(given[used->index[i]], op_is_result(call, used->index[i]));
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
    quern_status status = op_check_status(call, exec->status, given, used);
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
    if (status == QUERN_OK) status = op_check_memory(call, given, used);
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
    if ((status = op_check_status(call, how.status, NULL, NULL)) != QUERN_OK ||
        (status = check_workspace(call, workspace, bytes)) != QUERN_OK)
        return status;
    return execute(call, &how, used, workspace);
}
