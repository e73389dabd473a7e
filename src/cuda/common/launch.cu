/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - what launches ask of CUDA once and remember: that a kernel may have its dynamic shared memory.
 * A call to CUDA costs as much as a tenth of a launch. */
#include "common/launch.cuh"

#include <atomic>
#include <mutex>

namespace
{

enum { SLOTS = 4096 }; /* several times the kernels there are, on eight devices */

struct allowed_kernel {
    std::atomic<uint64_t> key; /* of a kernel and a device; 0: free. Never changes again. */
    std::atomic<size_t> bytes; /* only grows, under the lock */
};

allowed_kernel allowed[SLOTS];
std::mutex growing;

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

bool shared_fits(const stage_exec *exec, size_t bytes, const char *what, char why[STAGE_WHY_BYTES])
{
    if (bytes <= exec->shared_bytes) return true;
    snprintf(why, STAGE_WHY_BYTES,
             "%s at this head dim, dtype and list length takes %zu bytes of shared memory a block: cuda:%d "
             "offers %zu",
             what, bytes, exec->device_id, exec->shared_bytes);
    return false;
}
