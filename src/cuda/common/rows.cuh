/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.cuh - views with any leading dimensions as rows of their last one, and the experts of rows. */
#ifndef QUERN_CUDA_ROWS_CUH
#define QUERN_CUDA_ROWS_CUH

#include "common/device.cuh"

#include <quern/cuda.h>

extern "C" {
#include "core/arena.h"
}

/* A workspace for one array: its bytes, with room to align it, and where it then stands. */
static inline size_t room_for(size_t bytes)
{
    return bytes > 0 ? bytes + ARENA_ALIGN - 1 : 0;
}
template <typename T> static inline T *room_at(void *workspace)
{
    return workspace != NULL ? (T *)arena_on(workspace).base : NULL;
}

/* Quotients by one number, of numbers below 2^31 without a division. */
struct divider {
    int64_t by;
    uint32_t factor, shift;

    __device__ __forceinline__ int64_t of(int64_t n) const
    {
        return n <= INT32_MAX ? (int64_t)((uint64_t)(uint32_t)n * factor >> shift) : n / by;
    }
};

static inline divider divider_by(int64_t by)
{
    divider d = {by > 0 ? by : 1, 0, 31};
    while (d.shift < 62 && (int64_t)1 << (d.shift - 31) < d.by) d.shift++;
    d.factor = (uint32_t)((((uint64_t)1 << d.shift) + (uint64_t)d.by - 1) / (uint64_t)d.by);
    return d;
}

/* Bytes of an element, of the dtypes that stages have. */
static inline int64_t bytes_of(quern_dtype dtype)
{
    return dtype == QUERN_I64                          ? 8
           : dtype == QUERN_F32 || dtype == QUERN_I32  ? 4
           : dtype == QUERN_BF16 || dtype == QUERN_F16 ? 2
                                                       : 1;
}

/* Row r stands at element row_at(r). Dimensions that follow one another in memory are one. */
struct rows_view {
    void *p;
    int32_t ndim;
    int64_t shape[QUERN_MAX_DIMS], stride[QUERN_MAX_DIMS];

    __device__ __forceinline__ int64_t row_at(int64_t row) const
    {
        if (ndim == 0) return 0;
        int64_t at = 0;
        for (int i = ndim - 1; i > 0; i--) {
            const int64_t rest = row / shape[i];
            at += (row - rest * shape[i]) * stride[i];
            row = rest;
        }
        return at + row * stride[0];
    }
    template <typename T> __device__ __forceinline__ T *row(int64_t r) const { return (T *)p + row_at(r); }
};

static inline int64_t rows_of(const quern_tensor &t)
{
    int64_t rows = 1;
    for (int32_t i = 0; i + 1 < t.ndim; i++) rows *= t.shape[i];
    return rows;
}

static inline int64_t columns_of(const quern_tensor &t)
{
    return t.ndim > 0 ? t.shape[t.ndim - 1] : 1;
}

static inline rows_view rows_view_of(const quern_tensor &t)
{
    rows_view v = {};
    v.p = t.data;
    for (int32_t i = 0; i + 1 < t.ndim; i++) {
        if (t.shape[i] == 1) continue;
        const bool joins = v.ndim > 0 && v.stride[v.ndim - 1] == t.shape[i] * t.strides[i];
        if (!joins) v.ndim++;
        v.shape[v.ndim - 1] = joins ? v.shape[v.ndim - 1] * t.shape[i] : t.shape[i];
        v.stride[v.ndim - 1] = t.strides[i];
    }
    return v;
}

/* Whether each row begins where the one before it ends. */
static inline bool rows_follow(const rows_view &v, int64_t columns)
{
    return v.ndim == 0 || (v.ndim == 1 && v.stride[0] == columns);
}

/* Whether each row of `t` starts at a multiple of `bytes`. */
static inline bool rows_aligned(const quern_tensor &t, int64_t bytes)
{
    const int64_t size = bytes_of(t.dtype);
    bool ok = (uintptr_t)t.data % (uintptr_t)bytes == 0;
    for (int32_t i = 0; i + 1 < t.ndim; i++) ok = ok && (t.shape[i] == 1 || t.strides[i] * size % bytes == 0);
    return ok;
}

/* Sets a bit of the caller's status word, where there is one (quern/cuda.h). */
__device__ __forceinline__ void raise_status(int32_t *status, int32_t bit)
{
    if (status != NULL) atomicOr(status, bit);
}

/* Where the rows of experts end, in device memory. Values out of order or range are held within [0, rows]. */
struct expert_ends {
    const int32_t *end; /* NULL: one expert has all rows */
    int32_t experts;
    int64_t rows;

    __device__ __forceinline__ int64_t end_of(int32_t e) const
    {
        if (end == NULL) return rows;
        const int64_t at = __ldg(end + e);
        return at < 0 ? 0 : at > rows ? rows : at;
    }
    /* The grid's first block looks at all of them. */
    __device__ __forceinline__ void check(int32_t *status) const
    {
        if (blockIdx.x > 0 || end == NULL || status == NULL) return;
        for (int32_t e = threadIdx.x; e < experts; e += blockDim.x)
            if (end[e] > rows || end[e] < (e > 0 ? end[e - 1] : 0))
                raise_status(status, QUERN_STATUS_BAD_OFFSETS);
    }
    __device__ __forceinline__ int64_t first_of(int32_t e) const { return e > 0 ? end_of(e - 1) : 0; }
    /* The first expert whose end is past a row; `experts` where there is none. */
    __device__ __forceinline__ int32_t expert_of(int64_t row) const
    {
        int32_t low = 0, high = experts;
        while (low < high) {
            const int32_t middle = (low + high) / 2;
            if (end_of(middle) > row) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

static inline expert_ends expert_ends_of(const quern_tensor &offsets, int64_t rows)
{
    const bool some = present(offsets);
    return {some ? (const int32_t *)offsets.data : NULL, some ? (int32_t)offsets.shape[0] : 1, rows};
}

#endif
