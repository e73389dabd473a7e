/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* device.cuh - what every CUDA stage shares: views as kernels take them, element access for any dtype,
 * cu_seqlens that live on the device, and the check after a launch. */
#ifndef QUERN_CUDA_DEVICE_CUH
#define QUERN_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>

extern "C" {
#include "backend.h"
}

typedef __nv_bfloat16 bf16;
#ifdef QUERN_CUDA_ONE_DTYPE
typedef bf16 f16; /* code chosen for f16 is then bf16's, compiled already */
#else
typedef __half f16;
#endif

/* A 4-D view: element (i0, i1, i2, i3) stands at p + i0 s[0] + i1 s[1] + i2 s[2] + i3. */
struct view4 {
    void *p;
    int64_t s[3];
};

static inline view4 view4_of(const quern_tensor &t)
{
    view4 v = {t.data, {0, 0, 0}};
    for (int i = 0; i < 3 && i < t.ndim; i++) v.s[i] = t.strides[i];
    return v;
}

/* Statistics [B, heads, N] (any strides). */
struct view3 {
    float *p;
    int64_t s[3];
};

static inline view3 view3_of(const quern_tensor &t)
{
    view3 v = {(float *)t.data, {0, 0, 0}};
    for (int i = 0; i < 3 && i < t.ndim; i++) v.s[i] = t.strides[i];
    return v;
}

static inline bool present(const quern_tensor &t)
{
    return t.ndim > 0;
}

/* Whether the kernels take two head dims (0: absent); if not, says so. */
static inline bool dims_fit(int64_t dim_k, int64_t dim_v, char why[STAGE_WHY_BYTES])
{
    if (dim_k <= 256 && dim_v <= 256) return true;
    snprintf(why, STAGE_WHY_BYTES, "head dims %lld and %lld: the cuda backend takes multiples of 8 up to 256",
             (long long)dim_k, (long long)dim_v);
    return false;
}

/* Whether rows of `t` can be read 16 bytes at a time. */
static inline bool rows_aligned16(const quern_tensor &t)
{
    const int64_t size = t.dtype == QUERN_F32 ? 4 : 2;
    bool ok = ((uintptr_t)t.data & 15) == 0;
    for (int i = 0; i + 1 < t.ndim; i++) ok = ok && (t.strides[i] * size) % 16 == 0;
    return ok;
}

template <typename T> __device__ __forceinline__ float to_float(T x)
{
    return (float)x;
}
template <> __device__ __forceinline__ float to_float<bf16>(bf16 x)
{
    return __bfloat162float(x);
}
template <> __device__ __forceinline__ float to_float<__half>(__half x)
{
    return __half2float(x);
}
template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ __half from_float<__half>(float x)
{
    return __float2half_rn(x);
}

/* The sequences of a call: fixed length, or varlen with cu_seqlens on the device. */
struct seqs {
    int64_t batch, n_q, n_kv;
    const int32_t *cu_q, *cu_kv;
};

static inline seqs seqs_of(const stage_seqs &s)
{
    return {s.batch, s.n_q, s.n_kv, (const int32_t *)s.cu_q.data, (const int32_t *)s.cu_kv.data};
}

/* One sequence: where its rows start (in dim 1 of the views), how many there are, and the batch index
 * to use in dim 0 of the views. */
struct sequence {
    int64_t b, view_b, q0, nq, k0, nk;
};

/* cu[i] as the caller gave it, clamped to [0, total]. */
__device__ __forceinline__ int64_t cu_seqlens_at(const int32_t *cu, int64_t i, int64_t total)
{
    const int64_t x = cu[i];
    return x < 0 ? 0 : x > total ? total : x;
}

__device__ __forceinline__ sequence sequence_at(const seqs &s, int64_t b)
{
    if (s.cu_q == NULL) return {b, b, 0, s.n_q, 0, s.n_kv};
    const int32_t *ck = s.cu_kv != NULL ? s.cu_kv : s.cu_q;
    const int64_t q0 = cu_seqlens_at(s.cu_q, b, s.n_q), q1 = cu_seqlens_at(s.cu_q, b + 1, s.n_q);
    const int64_t k0 = cu_seqlens_at(ck, b, s.n_kv), k1 = cu_seqlens_at(ck, b + 1, s.n_kv);
    return {b, 0, q0, q1 > q0 ? q1 - q0 : 0, k0, k1 > k0 ? k1 - k0 : 0};
}

/* Cuts every sequence into pieces of `unit` rows, `per_query` rows a query: piece `i` starts at row *first
 * of *seq. False past the last piece. */
__device__ __forceinline__ bool piece_at(const seqs &s, int64_t i, int64_t unit, int64_t per_query,
                                         sequence *seq, int64_t *first)
{
    if (s.cu_q == NULL) {
        const int64_t per = (s.n_q * per_query + unit - 1) / unit;
        const int64_t b = per > 0 ? i / per : s.batch;
        if (b >= s.batch) return false;
        *first = (i - b * per) * unit;
        *seq = sequence_at(s, b);
        return true;
    }
    for (int64_t b = 0; b < s.batch; b++) {
        const sequence q = sequence_at(s, b);
        const int64_t per = (q.nq * per_query + unit - 1) / unit;
        if (i < per) {
            *seq = q;
            *first = i * unit;
            return true;
        }
        i -= per;
    }
    return false;
}

/* Upper bound on the number of pieces. */
static inline int64_t piece_bound(const stage_seqs &s, int64_t unit, int64_t per_query)
{
    if (s.cu_q.data == NULL) return s.batch * ((s.n_q * per_query + unit - 1) / unit);
    return s.n_q * per_query / unit + s.batch;
}

/* Lets a kernel that is launched behind this one (launch_behind) start; it waits with wait_for_before() for
 * what this one writes. */
__device__ __forceinline__ void let_next_start()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Waits until the kernels before this one have ended, where it was launched behind them. */
__device__ __forceinline__ void wait_for_before()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Division of x < 2^31 by a number known at launch: one multiplication. */
struct fast_div {
    uint32_t d, m, s;
};

static inline fast_div fast_div_by(uint32_t d)
{
    fast_div f = {d, 0, 0};
    while (((uint64_t)1 << f.s) < d) f.s++;
    f.m = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << f.s) - d)) / d + 1);
    return f;
}

__device__ __forceinline__ uint32_t quotient(uint32_t x, const fast_div &f)
{
    return (__umulhi(x, f.m) + x) >> f.s;
}

/* libquern's error_set(). */
quern_status (*cuda_set_error())(quern_status, const char *, ...);
quern_status cuda_report(cudaError_t code, const char *what);
#define LAUNCHED(what) cuda_report(cudaGetLastError(), what)

#endif
