/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* calls.cuh - what the plugin's table offers beside the stages: devices, memory, streams, events. */
#ifndef QUERN_CUDA_CALLS_CUH
#define QUERN_CUDA_CALLS_CUH

#include "common/device.cuh"

extern "C" {
#include "runtime/cuda_plugin.h"
}

/* While another stream is captured in CUDA's global mode, as PyTorch's is, a call that might touch it is
 * refused and ends that capture: one that allocates, loads a kernel, makes a graph or frees one. Quern's
 * touch no stream but the call's, so the thread may make them while this lives. */
struct relaxed_capture {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    relaxed_capture() { (void)cudaThreadExchangeStreamCaptureMode(&mode); }
    ~relaxed_capture() { (void)cudaThreadExchangeStreamCaptureMode(&mode); }
    relaxed_capture(const relaxed_capture &) = delete;
    relaxed_capture &operator=(const relaxed_capture &) = delete;
};

/* Makes a device current while it lives. */
struct device_scope {
    relaxed_capture relaxed;
    int before = -1;
    cudaError_t code;
    explicit device_scope(int device)
    {
        code = cudaGetDevice(&before);
        if (code == cudaSuccess && before == device) before = -1;
        else if (code == cudaSuccess) code = cudaSetDevice(device);
    }
    ~device_scope()
    {
        if (before >= 0) (void)cudaSetDevice(before);
    }
    device_scope(const device_scope &) = delete;
    device_scope &operator=(const device_scope &) = delete;
};

quern_status device_check(int32_t device);
quern_status device_check_pointer(const void *p, quern_device device, int32_t device_id, const char *name);
/* Fills in the exec's fields that describe the device. */
quern_status device_properties(int32_t device, stage_exec *exec);
quern_status device_count(int32_t *count);
quern_status device_info(int32_t device, quern_cuda_device *info);
quern_status device_allocate(int32_t device, size_t bytes, void **p);
quern_status device_free(int32_t device, void *p);
quern_status device_copy(int32_t device, void *to, const void *from, size_t bytes, void *stream);
quern_status device_fill(int32_t device, void *to, uint8_t value, size_t bytes, void *stream);
quern_status stream_create(int32_t device, void **stream);
quern_status stream_destroy(int32_t device, void *stream);
quern_status stream_synchronize(int32_t device, void *stream);
quern_status stream_query(int32_t device, void *stream, bool *done);
quern_status event_create(int32_t device, void **event);
quern_status event_destroy(int32_t device, void *event);
quern_status event_record(int32_t device, void *event, void *stream);
quern_status event_elapsed(int32_t device, void *from, void *to, double *ms);

#endif
