/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.cu - the CUDA rows of the stage table, and the one symbol that libquern looks up. */
#include "common/calls.cuh"
#include "stages.cuh"

extern "C" {
#include "build_id.h"
}

static quern_status (*report)(quern_status status, const char *format, ...);

quern_status (*cuda_set_error())(quern_status, const char *, ...)
{
    return report;
}

quern_status cuda_report(cudaError_t code, const char *what)
{
    if (code == cudaSuccess) return QUERN_OK;
    (void)cudaGetLastError(); /* leave nothing pending behind */
    const quern_status status = code == cudaErrorMemoryAllocation ? QUERN_ERR_OUT_OF_MEMORY
                                : code == cudaErrorNoKernelImageForDevice || code == cudaErrorUnsupportedPtxVersion ? QUERN_ERR_UNSUPPORTED
                                                                                                                 : QUERN_ERR_DEVICE;
    return report(status, "cuda, %s: %s", what, cudaGetErrorString(code));
}

/* A stage runs on the device of its tensors, whatever the thread's current one is. */
template <typename Args, quern_status (*stage)(const stage_exec *, const Args *, void *)>
static quern_status on_device(const stage_exec *exec, const Args *args, void *workspace)
{
    const device_scope scope(exec->device_id);
    return scope.code != cudaSuccess ? cuda_report(scope.code, "choosing the device") : stage(exec, args, workspace);
}

/* A stage without a row is not offered here. */
static const quern_backend backend = {
    .name = "cuda",
    .open = NULL,
    .close = NULL,
    .attend_forward = {attend_forward_supports, attend_forward_bytes, on_device<attend_args, attend_forward_run>},
    .attend_backward = {attend_backward_supports, attend_backward_bytes, on_device<attend_args, attend_backward_run>},
    .compress_forward = {compress_supports, compress_forward_bytes, on_device<compress_args, compress_forward_run>},
    .compress_backward = {compress_supports, compress_backward_bytes, on_device<compress_args, compress_backward_run>},
    .select = {select_supports, select_bytes, on_device<select_args, select_run>},
    .gate_forward = {gate_supports, gate_forward_bytes, on_device<gate_args, gate_forward_run>},
    .gate_backward = {gate_supports, gate_backward_bytes, on_device<gate_args, gate_backward_run>},
    .convert = {convert_supports, convert_bytes, on_device<convert_args, convert_run>},
    .rowdot = {rowdot_supports, rowdot_bytes, on_device<rowdot_args, rowdot_run>},
    .list_convert = {list_convert_supports, list_convert_bytes, on_device<list_convert_args, list_convert_run>},
    .validate_lists = {validate_lists_supports, validate_lists_bytes, on_device<validate_lists_args, validate_lists_run>},
};

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

extern "C" __attribute__((visibility("default"))) const quern_cuda_plugin *quern_cuda_backend(quern_status (*set)(quern_status, const char *, ...))
{
    static const quern_cuda_plugin plugin = {
        build_id(), TEXT(QUERN_VERSION_MAJOR) "." TEXT(QUERN_VERSION_MINOR) "." TEXT(QUERN_VERSION_PATCH),
        &backend, device_check, device_check_pointer, device_count, device_info, device_allocate, device_free, device_copy, device_fill,
        stream_create, stream_destroy, stream_synchronize, stream_query, event_create, event_destroy, event_record, event_elapsed};
    report = set;
    return &plugin;
}
