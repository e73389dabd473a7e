/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - what launches ask of CUDA once and remember: how much dynamic shared memory a kernel may
 * have, and how much a device's blocks can have. A call to CUDA costs as much as a tenth of a launch. */
#include "common/launch.cuh"

#include <atomic>
#include <mutex>

namespace
{

enum { SLOTS = 4096, DEVICES = 64 }; /* slots: several times the kernels there are, on eight devices */

struct allowed_kernel {
    std::atomic<uint64_t> key; /* of a kernel and a device; 0: free. Never changes again. */
    std::atomic<size_t> bytes; /* only grows, under the lock */
};

allowed_kernel allowed[SLOTS];
std::mutex growing;
std::atomic<int> offered_by[DEVICES];

/* The slot that has the key, or the free one where it belongs; NULL where all are taken. */
allowed_kernel *slot_of(uint64_t key)
{
    uint64_t at = key * 0x9e3779b97f4a7c15u >> 52;
    for (int i = 0; i < SLOTS; i++, at = (at + 1) % SLOTS) {
        const uint64_t there = allowed[at].key.load(std::memory_order_acquire);
        if (there == key || there == 0) return &allowed[at];
    }
    return NULL;
}

} // namespace

cudaError_t shared_allow(const void *kernel, size_t bytes)
{
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code != cudaSuccess) return code;
    const uint64_t key = (uint64_t)(uintptr_t)kernel | (uint64_t)(device + 1) << 48;
    const allowed_kernel *known = slot_of(key);
    if (known != NULL && known->key.load(std::memory_order_acquire) == key &&
        known->bytes.load(std::memory_order_acquire) >= bytes)
        return cudaSuccess;
    const std::lock_guard<std::mutex> hold(growing);
    allowed_kernel *slot = slot_of(key);
    if (slot != NULL && slot->key.load(std::memory_order_relaxed) == key &&
        slot->bytes.load(std::memory_order_relaxed) >= bytes)
        return cudaSuccess;
    code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess || slot == NULL) return code;
    slot->bytes.store(bytes, std::memory_order_release);
    slot->key.store(key, std::memory_order_release);
    return cudaSuccess;
}

cudaError_t shared_offered(int device, int *bytes)
{
    const bool slot = device >= 0 && device < DEVICES;
    *bytes = slot ? offered_by[device].load(std::memory_order_relaxed) : 0;
    if (*bytes > 0) return cudaSuccess;
    const cudaError_t code = cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (code == cudaSuccess && slot) offered_by[device].store(*bytes, std::memory_order_relaxed);
    return code;
}
