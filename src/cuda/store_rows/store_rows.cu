/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * store_rows.cu - rows into slots of a cache, in its format.
 *
 * A group of threads stores one row, four channels a thread. Of rows for one slot the last one wins: of a few
 * rows each looks through those behind it; of many a table of slots in the workspace, filled by integer
 * atomics, says which row is the last. Limit: bytes moved over the copy rate.
 */
#include "common/entry.cuh"
#include "common/launch.cuh"
#include "variants.cuh"

enum { FEW_ROWS = 1024, WIDTH_MOST = GROUP_MOST * GROUP_CHANNELS };

/* A place of the table: a slot and 1 (0: free), the last row for it and 1. */
struct slot_place {
    unsigned long long slot;
    unsigned long long row;
};

struct store_kernel {
    any_floats x;
    int64_t x_row, rows;
    const void *slots;
    bool slots_i64;
    int64_t slots_row, slot_count; /* of the cache */
    void *cache;
    quern_dtype dtype;
    int64_t page, page_bytes, slot_bytes; /* page: slots; 1 where rows are contiguous */
    int64_t scales, scale_bytes;          /* from a page to its scales, from slot to slot; 0: in the row */
    entry_kernel entry;
    slot_place *table;
    uint64_t mask;
    int32_t *status;
};

/* Row i's slot; -1 where it is not stored. */
__device__ __forceinline__ int64_t slot_of(const store_kernel &a, int64_t i)
{
    const int64_t slot = a.slots_i64 ? ((const int64_t *)a.slots)[i * a.slots_row]
                                     : ((const int32_t *)a.slots)[i * a.slots_row];
    return slot < 0 || slot >= a.slot_count ? -1 : slot;
}

__device__ __forceinline__ uint64_t place_of(const store_kernel &a, int64_t slot)
{
    return ((uint64_t)slot * 0x9e3779b97f4a7c15ull >> 20) & a.mask;
}

__global__ void store_find(const __grid_constant__ store_kernel a)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.rows) return;
    const int64_t slot = slot_of(a, i);
    if (slot < 0) return;
    const unsigned long long key = (unsigned long long)slot + 1;
    for (uint64_t at = place_of(a, slot);; at = (at + 1) & a.mask) {
        const unsigned long long old = atomicCAS(&a.table[at].slot, 0ull, key);
        if (old != 0 && old != key) continue;
        atomicMax(&a.table[at].row, (unsigned long long)i + 1);
        return;
    }
}

/* Whether a later row has the slot of row i. */
__device__ __forceinline__ bool is_overwritten(const store_kernel &a, const group &g, int64_t i, int64_t slot)
{
    if (a.table != NULL) {
        uint64_t at = place_of(a, slot);
        while (a.table[at].slot != (unsigned long long)slot + 1) at = (at + 1) & a.mask;
        return a.table[at].row != (unsigned long long)i + 1;
    }
    float found = 0.0f;
    for (int64_t j = i + 1 + g.lane; j < a.rows; j += g.lanes)
        if (slot_of(a, j) == slot) found = 1.0f;
    return g.max(found) > 0.0f;
}

__global__ void __launch_bounds__(GROUP_MOST) store_write(const __grid_constant__ store_kernel a, int lanes)
{
    __shared__ float parts[PARTS];
    const group g(parts, lanes);
    const int64_t i = (int64_t)blockIdx.x * (blockDim.x / lanes) + g.index;
    if (i >= a.rows) return;
    const int first = g.lane * GROUP_CHANNELS;
    const int64_t slot = slot_of(a, i);
    if (slot < 0) {
        const int64_t given = a.slots_i64 ? ((const int64_t *)a.slots)[i * a.slots_row]
                                          : ((const int32_t *)a.slots)[i * a.slots_row];
        if (given != -1 && g.lane == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
        return;
    }
    channels v = {};
#pragma unroll
    for (int c = 0; c < GROUP_CHANNELS; c++)
        if (first + c < a.entry.width) v.x[c] = a.x.at(i * a.x_row + first + c);
    if (is_overwritten(a, g, i, slot)) return;
    char *const page = (char *)a.cache + slot / a.page * a.page_bytes;
    const int64_t at = slot % a.page;
    if (a.entry.format == ENTRY_ROWS || a.scale_bytes == 0)
        entry_store(a.entry, g, v, page + at * a.slot_bytes, a.dtype, a.status);
    else
        entry_quantise(a.entry, g, v, (uint8_t *)page + at * a.slot_bytes,
                       (uint8_t *)page + a.scales + at * a.scale_bytes, a.status);
}

static bool supports(const stage_exec *, const store_rows_args *args, char why[STAGE_WHY_BYTES])
{
    if (args->x.shape[1] <= WIDTH_MOST) return true;
    snprintf(why, STAGE_WHY_BYTES, "rows have %lld channels: the cuda backend takes up to %d",
             (long long)args->x.shape[1], WIDTH_MOST);
    return false;
}

static int64_t places_of(const store_rows_args *args)
{
    int64_t places = 2;
    while (places < 2 * args->x.shape[0]) places *= 2;
    return args->x.shape[0] > FEW_ROWS ? places : 0;
}

static size_t workspace(const stage_exec *, const store_rows_args *args)
{
    return room_for((size_t)places_of(args) * sizeof(slot_place));
}

static store_kernel kernel_of(const stage_exec *exec, const store_rows_args *args, void *memory)
{
    const quern_tensor &cache = args->cache;
    const int64_t size = bytes_of(cache.dtype), width = args->x.shape[1];
    const entry_args how = {.format = args->format};
    store_kernel a = {};
    a.x = any_floats_of(args->x);
    a.x_row = args->x.strides[0];
    a.rows = args->x.shape[0];
    a.slots = args->slots.data;
    a.slots_i64 = args->slots.dtype == QUERN_I64;
    a.slots_row = args->slots.strides[0];
    a.page = args->page > 0 ? args->page : 1;
    a.slot_count = cache.shape[0] * a.page;
    a.cache = cache.data;
    a.dtype = cache.dtype;
    a.page_bytes = cache.strides[0] * size;
    a.entry = entry_kernel_of(how, width, 1);
    a.status = exec->status;
    if (args->page > 0 && cache.ndim == 3) {
        a.slot_bytes = cache.strides[1] * size;
    } else if (args->page > 0) {
        a.slot_bytes = entry_data_bytes(args->format, width);
        a.scales = a.page * a.slot_bytes;
        a.scale_bytes = cache.shape[1] / a.page - a.slot_bytes;
    }
    a.table = places_of(args) > 0 ? room_at<slot_place>(memory) : NULL;
    a.mask = (uint64_t)places_of(args) - 1;
    return a;
}

static quern_status run(const stage_exec *exec, const store_rows_args *args, void *memory)
{
    enum { THREADS = 256 };
    const store_kernel a = kernel_of(exec, args, memory);
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const int lanes = group_lanes(a.entry.width), groups = groups_of_block(a.entry.width);
    if (a.rows == 0) return QUERN_OK;
    if (a.table != NULL) {
        const cudaError_t code =
            cudaMemsetAsync(a.table, 0, (size_t)places_of(args) * sizeof(slot_place), stream);
        if (code != cudaSuccess) return cuda_report(code, "store_rows' table");
        store_find<<<blocks_for(a.rows, THREADS), THREADS, 0, stream>>>(a);
    }
    store_write<<<blocks_for(a.rows, groups), groups * lanes, 0, stream>>>(a, lanes);
    return LAUNCHED("store_rows");
}

extern const variant<store_rows_args> store_rows_any = {"store_rows_any", supports, workspace, run};
