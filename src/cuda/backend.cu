/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.cu - the CUDA rows of the stage table, and the one symbol that libquern looks up. */
#include "common/calls.cuh"
#include "replay.cuh"
#include "variants.cuh"

extern "C" {
#include "runtime/build_id.h"
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
    const quern_status status =
        code == cudaErrorMemoryAllocation ? QUERN_ERR_OUT_OF_MEMORY
        : code == cudaErrorNoKernelImageForDevice || code == cudaErrorUnsupportedPtxVersion
            ? QUERN_ERR_UNSUPPORTED
            : QUERN_ERR_DEVICE;
    return report(status, "cuda, %s: %s", what, cudaGetErrorString(code));
}

/* A stage by its variants. It runs on the device of its tensors, whatever the thread's current one is. */
template <typename Args, const variants<Args> &all> struct by_variants {
    static bool supports(const stage_exec *exec, const Args *args, char why[STAGE_WHY_BYTES])
    {
        return choose(all, exec, args, why) != NULL;
    }
    static size_t workspace(const stage_exec *exec, const Args *args)
    {
        return workspace_of(all, exec, args);
    }
    static quern_status run(const stage_exec *exec, const Args *args, void *workspace)
    {
        const device_scope scope(exec->device_id);
        return scope.code != cudaSuccess ? cuda_report(scope.code, "choosing the device")
                                         : run_chosen(all, exec, args, workspace);
    }
    static void kernel(const stage_exec *exec, const Args *args, char text[STAGE_NAME_BYTES])
    {
        char why[STAGE_WHY_BYTES];
        const variant<Args> *v = choose(all, exec, args, why);
        snprintf(text, STAGE_NAME_BYTES, "%s", v != NULL ? v->name : "");
    }
};

template <typename Stage, typename Args, const variants<Args> &all> static constexpr Stage stage_of()
{
    using functions = by_variants<Args, all>;
    return {functions::supports, functions::workspace, functions::run, functions::kernel};
}

/* A stage without a row is not offered here. */
static const quern_backend backend = {
    .name = "cuda",
    .open = NULL,
    .close = NULL,
    .replay_open = replay_open,
    .replay_close = replay_close,
    .replay = replay_run,
    .point = capture_point,
    .resume = capture_resume,
    .attend_forward = stage_of<attend_stage, attend_args, attend_forward_variants>(),
    .attend_backward = stage_of<attend_stage, attend_args, attend_backward_variants>(),
    .compress_forward = stage_of<compress_stage, compress_args, compress_forward_variants>(),
    .compress_backward = stage_of<compress_stage, compress_args, compress_backward_variants>(),
    .select = stage_of<select_stage, select_args, select_variants>(),
    .gate_forward = stage_of<gate_stage, gate_args, gate_forward_variants>(),
    .gate_backward = stage_of<gate_stage, gate_args, gate_backward_variants>(),
    .convert = stage_of<convert_stage, convert_args, convert_variants>(),
    .rowdot = stage_of<rowdot_stage, rowdot_args, rowdot_variants>(),
    .list_convert = stage_of<list_convert_stage, list_convert_args, list_convert_variants>(),
    .validate_lists = stage_of<validate_lists_stage, validate_lists_args, validate_lists_variants>(),
#ifdef QUERN_SM90
    .attend_gate_forward = stage_of<attend_gate_stage, attend_gate_args, attend_gate_variants>(),
#endif
    .indexer = stage_of<indexer_stage, indexer_args, indexer_variants>(),
    .attend_mqa_forward = stage_of<attend_mqa_stage, attend_mqa_args, attend_mqa_forward_variants>(),
};

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

extern "C" __attribute__((visibility("default"))) const quern_cuda_plugin *
quern_cuda_backend(quern_status (*set)(quern_status, const char *, ...))
{
    static const quern_cuda_plugin plugin = {
        build_id(),
        TEXT(QUERN_VERSION_MAJOR) "." TEXT(QUERN_VERSION_MINOR) "." TEXT(QUERN_VERSION_PATCH),
        &backend,
        device_check,
        device_properties,
        device_check_pointer,
        device_count,
        device_info,
        device_allocate,
        device_free,
        device_copy,
        device_fill,
        stream_create,
        stream_destroy,
        stream_synchronize,
        stream_query,
        event_create,
        event_destroy,
        event_record,
        event_elapsed};
    report = set;
    return &plugin;
}
