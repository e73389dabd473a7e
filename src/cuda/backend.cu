/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.cu - the CUDA rows of the stage table, and the one symbol that libquern looks up. */
#include "any/stages.cuh"
#include "cuda/plugin.h"

#include <stdio.h>

static quern_status (*report)(quern_status status, const char *format, ...);

quern_status cuda_report(cudaError_t code, const char *what)
{
    if (code == cudaSuccess) return QUERN_OK;
    const quern_status status = code == cudaErrorMemoryAllocation ? QUERN_ERR_OUT_OF_MEMORY
                                : code == cudaErrorNoKernelImageForDevice ? QUERN_ERR_UNSUPPORTED
                                                                          : QUERN_ERR_DEVICE;
    return report(status, "cuda, %s: %s", what, cudaGetErrorString(code));
}

static const quern_backend backend = {
    .name = "cuda",
    .attend_forward = {attend_supports, attend_forward_bytes, attend_forward_run},
    .attend_backward = {attend_supports, attend_backward_bytes, attend_backward_run},
    .compress_forward = {compress_supports, compress_forward_bytes, compress_forward_run},
    .compress_backward = {compress_supports, compress_backward_bytes, compress_backward_run},
    .select = {select_supports, select_bytes, select_run},
    .gate_forward = {gate_supports, gate_forward_bytes, gate_forward_run},
    .gate_backward = {gate_supports, gate_backward_bytes, gate_backward_run},
    .convert = {convert_supports, convert_bytes, convert_run},
    .rowdot = {rowdot_supports, rowdot_bytes, rowdot_run},
    .list_convert = {list_convert_supports, list_convert_bytes, list_convert_run},
    .attend_gate_forward = {NULL, NULL, NULL},
};

static quern_status check_device(int32_t device)
{
    int count = 0, driver = 0, major = 0;
    cudaError_t code = cudaDriverGetVersion(&driver);
    if (code == cudaSuccess && driver == 0) return report(QUERN_ERR_DEVICE, "device cuda: no NVIDIA driver is loaded");
    if (code == cudaSuccess) code = cudaGetDeviceCount(&count);
    if (code != cudaSuccess) {
        (void)cudaGetLastError(); /* leave no sticky error behind */
        return report(QUERN_ERR_DEVICE, "device cuda: %s (driver %d, this library needs %d)", cudaGetErrorString(code), driver, CUDART_VERSION);
    }
    if (device < 0 || device >= count) return report(QUERN_ERR_DEVICE, "device cuda:%d: 0 to %d is accepted", device, count - 1);
    code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (code != cudaSuccess) return cuda_report(code, "compute capability");
    if (major < 8) return report(QUERN_ERR_UNSUPPORTED, "cuda:%d has compute capability %d.x: 8.0 or newer is accepted", device, major);
    return QUERN_OK;
}

/* A host pointer or memory of another device where this device's is needed is an error before any launch. */
static quern_status check_pointer(const void *p, int32_t device, const char *name)
{
    cudaPointerAttributes at;
    const cudaError_t code = cudaPointerGetAttributes(&at, p);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return report(QUERN_ERR_DEVICE, "%s: %s", name, cudaGetErrorString(code));
    }
    if (at.type != cudaMemoryTypeDevice && at.type != cudaMemoryTypeManaged)
        return report(QUERN_ERR_INVALID_ARGUMENT, "%s is a host pointer: memory of cuda:%d is accepted", name, device);
    if (at.type == cudaMemoryTypeDevice && at.device != device)
        return report(QUERN_ERR_INVALID_ARGUMENT, "%s is memory of cuda:%d: memory of cuda:%d is accepted", name, at.device, device);
    return QUERN_OK;
}

static quern_status memory(quern_cuda_memory_call call, void **p, const void *src, size_t bytes, void *stream)
{
    switch (call) {
    case QUERN_CUDA_ALLOCATE: return cuda_report(cudaMalloc(p, bytes), "allocate");
    case QUERN_CUDA_FREE: return cuda_report(cudaFree(*p), "free");
    case QUERN_CUDA_UPLOAD: return cuda_report(cudaMemcpyAsync(*p, src, bytes, cudaMemcpyHostToDevice, (cudaStream_t)stream), "upload");
    case QUERN_CUDA_DOWNLOAD: return cuda_report(cudaMemcpyAsync(*p, src, bytes, cudaMemcpyDeviceToHost, (cudaStream_t)stream), "download");
    case QUERN_CUDA_SYNCHRONIZE: return cuda_report(cudaStreamSynchronize((cudaStream_t)stream), "synchronize");
    }
    return QUERN_ERR_INTERNAL;
}

extern "C" __attribute__((visibility("default"))) const quern_cuda_plugin *quern_cuda_plugin_1(quern_status (*set)(quern_status, const char *, ...))
{
    static const quern_cuda_plugin plugin = {sizeof(quern_cuda_plugin), sizeof(quern_backend), &backend, check_device, check_pointer, memory};
    report = set;
    return &plugin;
}
