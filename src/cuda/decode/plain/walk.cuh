/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk.cuh - four rows on the f32 cores, eight keys a step, of any dtype, at any address, up to D 512. A lane
 * has four of each 128 columns; the 32 products of rows and keys are added by halving, so that each lane has
 * one score. Limit: the read rate; for 16 bits the conversions.
 */
#ifndef QUERN_CUDA_DECODE_PLAIN_WALK_CUH
#define QUERN_CUDA_DECODE_PLAIN_WALK_CUH

#include "common/fold.cuh"
#include "decode/walk.cuh"

namespace decode_walk
{

/* Four elements of a row, or zeros. */
template <typename T> __device__ __forceinline__ float4 load_four_of(const char *from, bool there, bool wide)
{
    if (!there) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const T *const x = (const T *)from;
    if (!wide) return make_float4(to_float<T>(x[0]), to_float<T>(x[1]), to_float<T>(x[2]), to_float<T>(x[3]));
    if constexpr (sizeof(T) == 4) {
        return __ldg((const float4 *)x);
    } else {
        const uint2 raw = __ldg((const uint2 *)x);
        const T *const y = (const T *)&raw;
        return make_float4(to_float<T>(y[0]), to_float<T>(y[1]), to_float<T>(y[2]), to_float<T>(y[3]));
    }
}

template <typename T, int PANELS> struct plain_walk {
    typedef T element;
    enum { ROWS = 4, KEYS = 8, DIM = PANELS * 128 };
    struct queries {
        alignas(16) float x[ROWS][DIM];
    };
    struct ring {
    };

    float o[PANELS][ROWS][4], top, sum; /* of the lane's row, which is lane % ROWS */

    static bool takes(const plane_view &v) { return v.dim <= DIM && v.dim_v <= DIM; }

    static __device__ __forceinline__ void load(queries &m, const query_rows<T> &from)
    {
        for (int i = threadIdx.x; i < ROWS * DIM; i += THREADS) {
            const int row = i / DIM, column = i % DIM;
            m.x[row][column] =
                row < from.rows && column < from.dim ? to_float<T>(from.q[row * from.stride + column]) : 0.0f;
        }
    }

    __device__ __forceinline__ void open()
    {
#pragma unroll
        for (int p = 0; p < PANELS; p++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[p][r][c] = 0.0f;
        top = -INFINITY;
        sum = 0.0f;
    }

    /* A panel of the rows of a step; `further`: bytes from the key. */
    static __device__ __forceinline__ void panel(float4 (&x)[KEYS], const plane_row &row, bool value,
                                                 int panel, int bytes, bool wide)
    {
        const int at = (panel * 128 + (int)threadIdx.x % 32 * 4) * (int)sizeof(T);
#pragma unroll
        for (int i = 0; i < KEYS; i++) {
            const char *const key = (const char *)__shfl_sync(~0u, (unsigned long long)row.key, i);
            const int further = value ? __shfl_sync(~0u, row.value, i) : 0;
            x[i] = load_four_of<T>(key + further + at, key != NULL && at < bytes, wide);
        }
    }

    /* The lane's score: of key lane / ROWS and row lane % ROWS. */
    static __device__ __forceinline__ float multiply(const queries &q, const plane_view &v,
                                                     const plane_row &row, bool wide)
    {
        float dot[KEYS * ROWS] = {};
#pragma unroll
        for (int p = 0; p < PANELS; p++) {
            float4 k[KEYS];
            panel(k, row, false, p, v.key, wide);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float4 x = *(const float4 *)&q.x[r][p * 128 + threadIdx.x % 32 * 4];
#pragma unroll
                for (int i = 0; i < KEYS; i++) {
                    float &d = dot[i * ROWS + r];
                    d = fmaf(x.w, k[i].w, fmaf(x.z, k[i].z, fmaf(x.y, k[i].y, fmaf(x.x, k[i].x, d))));
                }
            }
        }
        fold<32>(dot, 16);
        fold<16>(dot, 8);
        fold<8>(dot, 4);
        fold<4>(dot, 2);
        fold<2>(dot, 1);
        return dot[0];
    }

    __device__ __forceinline__ void add(float s, float scale2, const plane_view &v, const plane_row &row,
                                        bool there, bool wide, bool values)
    {
        float held, most = there ? s : -INFINITY;
        s = most;
#pragma unroll
        for (int by = ROWS; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
        top = raise_top(top, most * scale2, &held);
        const float p = exp2_fast(fmaf(s, scale2, -base_of(top)));
        sum = fmaf(sum, held, p);
        if (!values) return;
        float by[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) by[r] = __shfl_sync(~0u, held, r);
#pragma unroll
        for (int n = 0; n < PANELS; n++) {
            float4 x[KEYS];
            panel(x, row, true, n, v.value, wide);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int c = 0; c < 4; c++) o[n][r][c] *= by[r];
#pragma unroll
                for (int i = 0; i < KEYS; i++) {
                    const float w = __shfl_sync(~0u, p, i * ROWS + r);
                    o[n][r][0] = fmaf(w, x[i].x, o[n][r][0]);
                    o[n][r][1] = fmaf(w, x[i].y, o[n][r][1]);
                    o[n][r][2] = fmaf(w, x[i].z, o[n][r][2]);
                    o[n][r][3] = fmaf(w, x[i].w, o[n][r][3]);
                }
            }
        }
    }

    template <class Keys, class Scores>
    __device__ __forceinline__ void run(const walk_source &from, const Keys &keys, int n, const queries &q,
                                        ring &, float scale2, bool values, const Scores &scores)
    {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (n + KEYS - 1) / KEYS;
        const bool wide = plane_aligned(from.plane, 4 * (int)sizeof(T));
        plane_row next = from.row(keys, warp * KEYS + lane % KEYS, n);
        for (int step = warp; step < steps; step += WARPS) {
            const plane_row now = next;
            next = from.row(keys, (step + WARPS) * KEYS + lane % KEYS, n);
            const float s = multiply(q, from.plane, now, wide);
            const unsigned seen = __ballot_sync(~0u, now.key != NULL);
            scores(step * KEYS + lane / ROWS, lane % ROWS, s);
            add(s, scale2, from.plane, now, (seen >> lane / ROWS & 1) != 0, wide, values);
        }
    }

    __device__ __forceinline__ void store_sums(block_memory<plain_walk> &m, int rows) const
    {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float all = sum;
#pragma unroll
        for (int by = ROWS; by < 32; by *= 2) all += __shfl_xor_sync(~0u, all, by);
        if (lane < rows) {
            m.top[warp][lane] = top;
            m.sum[warp][lane] = all;
        }
#pragma unroll
        for (int p = 0; p < PANELS; p++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                *(float4 *)&m.o[warp][r][p * 128 + lane * 4] =
                    make_float4(o[p][r][0], o[p][r][1], o[p][r][2], o[p][r][3]);
    }
};

} // namespace decode_walk

#endif
