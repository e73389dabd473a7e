/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * check.cu - looks through the new rows of a step, a warp a row; a sequence has a block or, of many tokens,
 * several. Each of them that finds a row not finite stops the sequence: all write the same. Limit: latency;
 * rows of up to 512 numbers are read at once.
 */
#include "common/launch.cuh"
#include "step/params.cuh"
#include "variants.cuh"

enum {
    THREADS = 128,
    WARPS = THREADS / 32,
    CHECKS = 3,
    CHUNKS = 4,
    BLOCK_ROWS = 32 /* that one looks through */
};

struct checked_rows {
    const float *p; /* NULL: not checked */
    int64_t row_s, count;
    int32_t width;
    bool wide; /* of up to CHUNKS * 128 numbers that can be read four at a time */
};

struct check_kernel {
    step_view step;
    int64_t ratio;
    const int32_t *first_entry;
    checked_rows check[CHECKS]; /* of tokens, of entries twice */
    int32_t *fault;
    int64_t fault_s;
    int32_t *slots;
    int64_t *raw_slots, *entry_slots, *kept, *returned;
    int64_t tokens, entries; /* that there is room for */
    int32_t *status;
};

/* Whether a number of a row is not finite: of those that the lane looks at. */
__device__ __forceinline__ bool lane_finds(const checked_rows &c, int64_t row)
{
    const int lane = (int)threadIdx.x % 32;
    const float *const x = c.p + row * c.row_s;
    uint32_t most = 0; /* without signs; infinity and NaN exceed all finite numbers */
    if (c.wide) {
        uint4 held[CHUNKS] = {};
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            if ((lane + 32 * j) * 4 < c.width) held[j] = ((const uint4 *)x)[lane + 32 * j];
#pragma unroll
        for (int j = 0; j < CHUNKS; j++)
            most = max(most, max(max(held[j].x << 1, held[j].y << 1), max(held[j].z << 1, held[j].w << 1)));
    } else {
#pragma unroll 4
        for (int i = lane; i < c.width; i += 32) most = max(most, __float_as_uint(x[i]) << 1);
    }
    return most >= 0xff000000u;
}

__device__ __forceinline__ void stop(const check_kernel &a, const step_place &p, int64_t b, int64_t entry)
{
    const int64_t t = threadIdx.x;
    for (int64_t i = t; i < p.count && p.row + i < a.tokens; i += THREADS) a.raw_slots[p.row + i] = -1;
    for (int64_t i = t; a.entry_slots != NULL && i < p.made && entry + i < a.entries; i += THREADS)
        a.entry_slots[entry + i] = -1;
    if (t < 2) a.kept[6 * b + 3 * t + 2] = 0;
    if (t > 0) return;
    a.slots[b] = -1;
    if (a.returned != NULL) a.returned[3 * b + 2] = 0;
    raise_status(a.status, QUERN_STATUS_NOT_FINITE);
    atomicOr(a.fault + p.slot * a.fault_s, QUERN_STATUS_NOT_FINITE);
}

__global__ void __launch_bounds__(THREADS) step_check_rows(const __grid_constant__ check_kernel a)
{
    const int64_t b = blockIdx.x, own = (int64_t)blockIdx.y * WARPS + threadIdx.x / 32,
                  warps = (int64_t)gridDim.y * WARPS;
    const int64_t entry = a.first_entry != NULL ? a.first_entry[b] : 0;
    const step_place p = step_place_at(a.step, a.ratio, b);
    if (!p.live) return;
    bool found = false;
    int64_t row = own; /* of those that are left, one check behind the other */
#pragma unroll
    for (int k = 0; k < CHECKS; k++) {
        const checked_rows &c = a.check[k];
        const int64_t first = k == 0 ? p.row : entry, left = c.count - first, all = k == 0 ? p.count : p.made,
                      rows = c.p == NULL || left <= 0 ? 0
                             : all < left             ? all
                                                      : left;
        for (; row < rows; row += warps) found |= lane_finds(c, first + row);
        row -= rows;
    }
    if (__syncthreads_or(found)) stop(a, p, b, entry);
}

static checked_rows checked_of(const quern_tensor &t)
{
    checked_rows c = {};
    if (!present(t)) return c;
    c.p = (const float *)t.data;
    c.row_s = t.strides[0];
    c.count = t.shape[0];
    c.width = (int32_t)t.shape[1];
    c.wide = c.width % 4 == 0 && c.row_s % 4 == 0 && (uintptr_t)c.p % 16 == 0 && c.width <= CHUNKS * 128;
    return c;
}

static quern_status run(const stage_exec *exec, const step_check_args *args, void *)
{
    const quern_tensor *const checked[CHECKS] = {&args->rows, &args->entries, &args->keys};
    const int64_t batch = args->step.slots.shape[0];
    check_kernel a = {};
    int64_t rows = 0;
    if (batch == 0) return QUERN_OK;
    a.step = step_view_of(args->step, args->raw_slots.shape[0]);
    a.ratio = args->ratio;
    if (present(args->first_entry)) a.first_entry = (const int32_t *)args->first_entry.data;
    for (int k = 0; k < CHECKS; k++) {
        a.check[k] = checked_of(*checked[k]);
        rows += a.check[k].count;
    }
    a.fault = (int32_t *)args->fault.data;
    a.fault_s = args->fault.strides[0];
    a.slots = (int32_t *)args->slots.data;
    a.raw_slots = (int64_t *)args->raw_slots.data;
    a.tokens = args->raw_slots.shape[0];
    if (present(args->entry_slots)) {
        a.entry_slots = (int64_t *)args->entry_slots.data;
        a.entries = args->entry_slots.shape[0];
    }
    a.kept = (int64_t *)args->kept.data;
    if (present(args->returned)) a.returned = (int64_t *)args->returned.data;
    a.status = exec->status;
    const int64_t parts = rows / batch / BLOCK_ROWS + 1, most = 2 * exec->multiprocessors;
    const dim3 grid((unsigned)batch, (unsigned)(parts < most ? parts : most));
    step_check_rows<<<grid, THREADS, 0, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("a step's rows that are not finite");
}

extern const variant<step_check_args> step_check_any = {"step_check_any", NULL, NULL, run};
