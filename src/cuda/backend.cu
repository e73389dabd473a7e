/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.cu - the stage table, whose rows are in stages/, and the one symbol that libquern looks up. */
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

static const stage_rows *all_rows; /* set by constructors, before which it is NULL */

stage_rows::stage_rows(void (*fill)(quern_backend &)) : fill(fill), next(all_rows)
{
    all_rows = this;
}

/* A stage without a row is not offered here. */
static quern_backend make_backend()
{
    quern_backend backend = {};
    backend.name = "cuda";
    backend.replay_open = replay_open;
    backend.replay_close = replay_close;
    backend.replay = replay_run;
    backend.point = capture_point;
    backend.resume = capture_resume;
    for (const stage_rows *rows = all_rows; rows != NULL; rows = rows->next) rows->fill(backend);
    return backend;
}

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

extern "C" __attribute__((visibility("default"))) const quern_cuda_plugin *
quern_cuda_backend(quern_status (*set)(quern_status, const char *, ...))
{
    static const quern_backend backend = make_backend();
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
