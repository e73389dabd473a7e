/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* chunk.cuh - eight consecutive elements at a time, widened to f32: 16 (or 2 x 16) bytes a thread where the
 * view allows it, element by element where it is misaligned. */
#ifndef QUERN_CUDA_CHUNK_CUH
#define QUERN_CUDA_CHUNK_CUH

#include "common/device.cuh"

enum { CHUNK = 8 };

struct chunk {
    float x[CHUNK];
};

__device__ __forceinline__ float dot_of(const chunk &x, const chunk &y)
{
    float dot = 0.0f;
#pragma unroll
    for (int e = 0; e < CHUNK; e++) dot = fmaf(x.x[e], y.x[e], dot);
    return dot;
}

/* ONCE: nobody reads it again, so it need not stay in a cache. */
template <typename T, bool ONCE = false> __device__ __forceinline__ chunk load_chunk(const T *p, bool vec)
{
    chunk c;
    if (vec) {
        uint4 raw[sizeof(T) / 2];
#pragma unroll
        for (unsigned i = 0; i < sizeof(T) / 2; i++)
            raw[i] = ONCE ? __ldcs((const uint4 *)p + i) : __ldg((const uint4 *)p + i);
        const T *t = (const T *)raw;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) c.x[i] = to_float<T>(t[i]);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) c.x[i] = to_float<T>(p[i]);
    }
    return c;
}

template <typename T> __device__ __forceinline__ void store_chunk(T *p, const chunk &c, bool vec)
{
    if (vec) {
        uint4 raw[sizeof(T) / 2];
        T *t = (T *)raw;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) t[i] = from_float<T>(c.x[i]);
#pragma unroll
        for (unsigned i = 0; i < sizeof(T) / 2; i++) __stcs((uint4 *)p + i, raw[i]);
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; i++) p[i] = from_float<T>(c.x[i]);
    }
}

#endif
