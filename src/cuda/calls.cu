/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* calls.cu - devices, pointers, memory, streams and events, each over a call or two of the CUDA runtime. */
#include "common/calls.cuh"

#include <atomic>
#include <cuda.h>
#include <mutex>
#include <stdio.h>

#define REPORT (cuda_set_error())

/* The library has code of it for a GPU exactly where it has code of the stages' kernels. */
static __global__ void probe_kernel() {}

quern_status device_count(int32_t *count)
{
    int driver = 0, n = 0;
    cudaError_t code = cudaDriverGetVersion(&driver);
    if (code == cudaSuccess && driver == 0)
        return REPORT(QUERN_ERR_DEVICE, "device cuda: no NVIDIA driver is loaded");
    if (code == cudaSuccess) code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return REPORT(QUERN_ERR_DEVICE,
                      "device cuda: %s (the driver serves CUDA %d.%d, this library needs %d.%d)",
                      cudaGetErrorString(code), driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                      CUDART_VERSION % 1000 / 10);
    }
    *count = n;
    return QUERN_OK;
}

namespace
{
enum { DEVICES = 64 };
struct known_device {
    std::atomic<bool> known; /* set last, under the lock */
    int major, minor, multiprocessors, shared_bytes;
};
known_device known_devices[DEVICES];
std::mutex learning;
} // namespace

static cudaError_t ask_properties(int32_t device, known_device *d)
{
    cudaError_t code = cudaDeviceGetAttribute(&d->major, cudaDevAttrComputeCapabilityMajor, device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&d->minor, cudaDevAttrComputeCapabilityMinor, device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&d->multiprocessors, cudaDevAttrMultiProcessorCount, device);
    return code == cudaSuccess
               ? cudaDeviceGetAttribute(&d->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)
               : code;
}

quern_status device_properties(int32_t device, stage_exec *exec)
{
    known_device here = {};
    known_device *const d = device >= 0 && device < DEVICES ? &known_devices[device] : &here;
    if (!d->known.load(std::memory_order_acquire)) {
        const std::lock_guard<std::mutex> hold(learning);
        const cudaError_t code = ask_properties(device, d);
        if (code != cudaSuccess) return cuda_report(code, "device properties");
        d->known.store(true, std::memory_order_release);
    }
    exec->compute = d->major * 10 + d->minor;
    exec->multiprocessors = d->multiprocessors;
    exec->shared_bytes = (size_t)d->shared_bytes;
    return QUERN_OK;
}

quern_status device_check(int32_t device)
{
    int32_t count = 0;
    const quern_status status = device_count(&count);
    if (status != QUERN_OK) return status;
    if (count == 0) return REPORT(QUERN_ERR_DEVICE, "device cuda: this machine has no GPU");
    if (device < 0 || device >= count)
        return REPORT(QUERN_ERR_DEVICE, "device cuda:%d: cuda:0 to cuda:%d are accepted", device, count - 1);
    int major = 0, minor = 0;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (code != cudaSuccess) return cuda_report(code, "compute capability");
    const device_scope scope(device);
    if (scope.code != cudaSuccess) return cuda_report(scope.code, "choosing the device");
    cudaFuncAttributes attributes;
    code = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (code == cudaErrorNoKernelImageForDevice || code == cudaErrorInvalidDeviceFunction ||
        code == cudaErrorUnsupportedPtxVersion) {
        (void)cudaGetLastError();
        return REPORT(QUERN_ERR_UNSUPPORTED,
                      "cuda:%d has compute capability %d.%d: this build holds no kernels for it", device,
                      major, minor);
    }
    return cuda_report(code, "looking for kernels");
}

/* The driver's query of a pointer's attributes, or NULL: the runtime's fetches more than is needed here. */
typedef CUresult pointer_question(unsigned count, CUpointer_attribute *attributes, void **data,
                                  CUdeviceptr pointer);

static pointer_question *find_question()
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuPointerGetAttributes", &found, 12000, cudaEnableDefault, &result);
    if (code == cudaSuccess && result == cudaDriverEntryPointSuccess) return (pointer_question *)found;
    (void)cudaGetLastError();
    return NULL;
}

/* Whether the driver confirms that p is memory of its tensor's device. False: the runtime's query decides. */
static bool plainly_right(const void *p, quern_device device, int32_t device_id)
{
    static pointer_question *const ask = find_question();
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    unsigned type = 0;
    int ordinal = -1;
    void *answers[] = {&type, &ordinal};
    if (ask == NULL || ask(2, which, answers, (CUdeviceptr)p) != CUDA_SUCCESS) return false;
    return device == QUERN_CPU ? type != CU_MEMORYTYPE_DEVICE
                               : type == CU_MEMORYTYPE_DEVICE && ordinal == device_id;
}

quern_status device_check_pointer(const void *p, quern_device device, int32_t device_id, const char *name)
{
    cudaPointerAttributes at;
    if (plainly_right(p, device, device_id)) return QUERN_OK;
    const cudaError_t code = cudaPointerGetAttributes(&at, p);
    if (code != cudaSuccess) return cuda_report(code, name);
    if (device == QUERN_CPU) {
        if (at.type != cudaMemoryTypeDevice) return QUERN_OK;
        return REPORT(QUERN_ERR_INVALID_ARGUMENT,
                      "%s is memory of cuda:%d: its tensor says cpu, host memory is accepted", name,
                      at.device);
    }
    if (at.type != cudaMemoryTypeDevice && at.type != cudaMemoryTypeManaged)
        return REPORT(QUERN_ERR_INVALID_ARGUMENT, "%s is host memory: memory of cuda:%d is accepted", name,
                      device_id);
    if (at.type == cudaMemoryTypeDevice && at.device != device_id)
        return REPORT(QUERN_ERR_INVALID_ARGUMENT, "%s is memory of cuda:%d: memory of cuda:%d is accepted",
                      name, at.device, device_id);
    return QUERN_OK;
}

quern_status device_info(int32_t device, quern_cuda_device *info)
{
    const device_scope scope(device);
    cudaDeviceProp p;
    size_t left = 0, total = 0;
    int driver = 0;
    cudaError_t code = scope.code;
    if (code == cudaSuccess) code = cudaGetDeviceProperties(&p, device);
    if (code == cudaSuccess) code = cudaMemGetInfo(&left, &total);
    if (code == cudaSuccess) code = cudaDriverGetVersion(&driver);
    if (code != cudaSuccess) return cuda_report(code, "device properties");
    snprintf(info->name, sizeof info->name, "%s", p.name);
    info->compute_major = p.major;
    info->compute_minor = p.minor;
    info->multiprocessors = p.multiProcessorCount;
    info->driver = driver;
    info->runtime = CUDART_VERSION;
    info->memory_bytes = (int64_t)total;
    info->free_bytes = (int64_t)left;
    info->l2_bytes = p.l2CacheSize;
    return QUERN_OK;
}

/* One runtime call on a device. */
#define ON_DEVICE(device, what, call)                                                                        \
    const device_scope scope(device);                                                                        \
    return cuda_report(scope.code != cudaSuccess ? scope.code : (call), what)

quern_status device_allocate(int32_t device, size_t bytes, void **p)
{
    const device_scope scope(device);
    void *got = NULL;
    const cudaError_t code = scope.code != cudaSuccess ? scope.code : cudaMalloc(&got, bytes > 0 ? bytes : 1);
    if (code == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return REPORT(QUERN_ERR_OUT_OF_MEMORY, "cuda:%d has no %zu bytes left", device, bytes);
    }
    if (code == cudaSuccess) *p = got;
    return cuda_report(code, "allocating");
}

quern_status device_free(int32_t device, void *p)
{
    ON_DEVICE(device, "freeing", cudaFree(p));
}

quern_status device_copy(int32_t device, void *to, const void *from, size_t bytes, void *stream)
{
    ON_DEVICE(device, "copying", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)stream));
}

quern_status device_fill(int32_t device, void *to, uint8_t value, size_t bytes, void *stream)
{
    ON_DEVICE(device, "filling", cudaMemsetAsync(to, value, bytes, (cudaStream_t)stream));
}

quern_status stream_create(int32_t device, void **stream)
{
    ON_DEVICE(device, "creating a stream",
              cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
}

quern_status stream_destroy(int32_t device, void *stream)
{
    ON_DEVICE(device, "destroying a stream", cudaStreamDestroy((cudaStream_t)stream));
}

quern_status stream_synchronize(int32_t device, void *stream)
{
    ON_DEVICE(device, "waiting for a stream", cudaStreamSynchronize((cudaStream_t)stream));
}

quern_status stream_query(int32_t device, void *stream, bool *done)
{
    const device_scope scope(device);
    const cudaError_t code = scope.code != cudaSuccess ? scope.code : cudaStreamQuery((cudaStream_t)stream);
    if (code == cudaSuccess || code == cudaErrorNotReady) *done = code == cudaSuccess;
    if (code == cudaErrorNotReady) (void)cudaGetLastError();
    return code == cudaErrorNotReady ? QUERN_OK : cuda_report(code, "asking a stream");
}

quern_status event_create(int32_t device, void **event)
{
    ON_DEVICE(device, "creating an event", cudaEventCreate((cudaEvent_t *)event));
}

quern_status event_destroy(int32_t device, void *event)
{
    ON_DEVICE(device, "destroying an event", cudaEventDestroy((cudaEvent_t)event));
}

quern_status event_record(int32_t device, void *event, void *stream)
{
    ON_DEVICE(device, "recording an event", cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
}

quern_status event_elapsed(int32_t device, void *from, void *to, double *ms)
{
    const device_scope scope(device);
    float elapsed = 0;
    cudaError_t code = scope.code != cudaSuccess ? scope.code : cudaEventSynchronize((cudaEvent_t)to);
    if (code == cudaSuccess) code = cudaEventElapsedTime(&elapsed, (cudaEvent_t)from, (cudaEvent_t)to);
    if (code == cudaSuccess) *ms = (double)elapsed;
    return cuda_report(code, "reading an event");
}
