/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * rows.cuh - a computing thread's two rows in Hopper's forward: what they see, their softmax, and how
 * they are stored. The accumulators are those of wgmma: of 8 columns a thread has two, of rows lane / 4 and
 * that + 8 of its warp's 16.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_ROWS_CUH
#define QUERN_CUDA_ATTEND_SM90_ROWS_CUH

#include "hopper/barrier.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/schedule.cuh"

namespace attend_parts
{

/* What a computing thread knows of its rows lane / 4 and that + 8: what they see, and their softmax so far.
 */
struct row_state {
    int lo[2], hi[2];
    float top[2], sum[2];
};

/* S becomes its exponentials; O's rows are to be multiplied by `shrink`. */
template <int NT>
__device__ __forceinline__ void softmax(float (&s)[NT][4], row_state &r, float (&shrink)[2], float scale_log2)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = r.top[h];
#pragma unroll
        for (int i = 0; i < NT; i++) top = fmaxf(top, fmaxf(s[i][h * 2], s[i][h * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == -INFINITY ? 0.0f : top * scale_log2;
        shrink[h] = exp2_fast(r.top[h] * scale_log2 - base);
        r.top[h] = top;
        float sum = r.sum[h] * shrink[h];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            s[i][h * 2] = exp2_fast(fmaf(s[i][h * 2], scale_log2, -base));
            s[i][h * 2 + 1] = exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -base));
            sum += s[i][h * 2] + s[i][h * 2 + 1];
        }
        r.sum[h] = sum;
    }
}

/* The first key of columns 8 i ... 8 i + 7 of a tile. */
template <bool LISTED>
__device__ __forceinline__ int column_key(const attend_kernel &a, const work &w, const int32_t *list,
                                          int slot)
{
    if (!LISTED) return w.base + slot;
    const int e = (int)quotient((uint32_t)slot, a.by_block);
    return slot < w.slots ? list[e] * a.list_block + (slot - e * a.list_block) : INT32_MAX - 8;
}

template <int NT, bool LISTED>
__device__ __forceinline__ void hide_unseen(float (&s)[NT][4], const attend_kernel &a, const work &w,
                                            const int32_t *list, const row_state &r, int slot0)
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int key = column_key<LISTED>(a, w, list, slot0 + i * 8) + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (key + c < r.lo[h] || key + c >= r.hi[h]) s[i][h * 2 + c] = -INFINITY;
    }
}

/* Adds what is not finite in the tile's V to the rows that see it. */
template <typename T, int KEYS, int OT, bool LISTED>
__device__ __forceinline__ void add_nonfinite(float (&o)[OT][4], const attend_kernel &a, const work &w,
                                              const int32_t *list, const row_state &r, int slot0)
{
    const T *v = (const T *)a.v.p + (int64_t)w.view * a.v.s[0] + (int64_t)w.k0 * a.v.s[1] + w.kvh * a.v.s[2] +
                 (threadIdx.x & 3) * 2;
    for (int j = 0; j < KEYS; j++) {
        const int key = column_key<LISTED>(a, w, list, slot0 + (j & ~7)) + (j & 7);
        const bool s0 = key >= r.lo[0] && key < r.hi[0], s1 = key >= r.lo[1] && key < r.hi[1];
        if (!s0 && !s1) continue;
        add_row_nonfinite(o, a.dim_v, v + key * a.v.s[1], s0, s1);
    }
}

/* Exchanges 32-bit words among the four lanes of a row so that each holds 16 consecutive bytes. */
__device__ __forceinline__ void transpose4(uint32_t (&w)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1),
                   b = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    const uint32_t x[4] = {odd ? a : w[0], odd ? w[1] : a, odd ? b : w[2], odd ? w[3] : b};
    const uint32_t c = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2),
                   d = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
    w[0] = high ? c : x[0];
    w[1] = high ? d : x[1];
    w[2] = high ? x[2] : c;
    w[3] = high ? x[3] : d;
}

/* row_keys() without its division of 64 bits. */
__device__ __forceinline__ void near_row_keys(const attend_kernel &a, const work &w, int query, int *lo,
                                              int *hi)
{
    if (a.mask != ATTEND_COMPRESSED || !a.causal || a.block_size > INT32_MAX || a.stride > INT32_MAX) {
        row_keys(a, sequence_of(w), query, lo, hi);
        return;
    }
    const int newest = a.visibility == ENTRY_COMPLETE ? query - (int)a.block_size + 1 : query,
              end = newest < 0 ? 0 : (int)((uint32_t)newest / (uint32_t)a.stride) + 1;
    *lo = 0;
    *hi = end < w.nk ? end : w.nk;
}

/* The state of a thread's two rows before their first key. */
__device__ __forceinline__ row_state begin_rows(const attend_kernel &a, const work &w, const int (&place)[2])
{
    row_state r = {{0, 0}, {0, 0}, {-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs);
        if (n < w.queries) near_row_keys(a, w, w.query + n, &r.lo[h], &r.hi[h]);
    }
    return r;
}

/* Multiplies this thread's row h by `by` and stores it; `mine`: there is such a row. */
template <typename T, int OT>
__device__ __forceinline__ void store_row(const float (&o)[OT][4], int h, float by, T *to, bool mine,
                                          int dim_v)
{
#pragma unroll
    for (int i = 0; i < OT; i += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { /* + 0: an unseen value's sign may stand in a sum that is 0 */
            const float x = o[i + j][h * 2] * by + 0.0f, y = o[i + j][h * 2 + 1] * by + 0.0f;
            words[j] = pack2<T>(x, y);
        }
        transpose4(words);
        const int c = (i + (threadIdx.x & 3)) * 8;
        if (mine && c < dim_v) *(uint4 *)(to + c) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* The sum of this thread's row h over the row's four threads; stores LSE where it is wanted. */
__device__ __forceinline__ float end_row(const attend_kernel &a, const work &w, const row_state &r, int h,
                                         int head, int64_t row, bool mine)
{
    float sum = r.sum[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (mine && a.lse.p != NULL && (threadIdx.x & 3) == 0)
        a.lse.p[(int64_t)w.view * a.lse.s[0] + head * a.lse.s[1] + row * a.lse.s[2]] =
            sum == 0.0f ? -INFINITY : r.top[h] * a.scale + logf(sum);
    return sum;
}

/* Divides O by the rows' sums and stores it, and LSE. */
template <typename T, int OT>
__device__ __forceinline__ void store_rows(float (&o)[OT][4], const attend_kernel &a, const work &w,
                                           row_state &r, const int (&place)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = place[h] - n * a.hs + w.head0;
        const bool mine = n < w.queries;
        const int64_t row = (int64_t)w.q0 + w.query + n;
        const float sum = end_row(a, w, r, h, head, row, mine), inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (a.o.p == NULL) continue;
        T *to = (T *)a.o.p + (int64_t)w.view * a.o.s[0] + row * a.o.s[1] + head * a.o.s[2];
        store_row<T, OT>(o, h, inverse, to, mine, a.dim_v);
    }
}

/* The same, but O goes to rows row0 ... of a tile of M rows in shared memory, as the copy engine reads it.
 * All of the warp's rows are there. */
template <typename T, int M, int OT>
__device__ __forceinline__ void stage_tile(const float (&o)[OT][4], const attend_kernel &a, const work &w,
                                           const row_state &r, const int (&place)[2], uint32_t tile, int row0)
{
    const int lane = threadIdx.x & 31;
    float by[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int n = (int)quotient((uint32_t)place[h], a.by_hs), head = place[h] - n * a.hs + w.head0;
        const float sum = end_row(a, w, r, h, head, (int64_t)w.q0 + w.query + n, true);
        by[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
    }
#pragma unroll
    for (int i = 0; i < OT; i += 2) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { /* + 0 as in store_row() */
            const float *x = &o[i + (j >> 1)][(j & 1) * 2];
            words[j] = pack2<T>(x[0] * by[j & 1] + 0.0f, x[1] * by[j & 1] + 0.0f);
        }
        stmatrix4(tile + tile_at<M>(row0 + (lane & 15), i + (lane >> 4)), words);
    }
    async_fence();
    __syncwarp();
}

/* O's rows times what their exponentials shrank by. */
template <int OT> __device__ __forceinline__ void shrink_rows(float (&o)[OT][4], const float (&shrink)[2])
{
#pragma unroll
    for (int i = 0; i < OT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) o[i][c] *= shrink[c >> 1];
}

/* The half of a tile's S or P that is of its first keys, and the other one as 0. */
template <typename X, int N> __device__ __forceinline__ X (&first_half(X (&x)[N][4]))[N / 2][4]
{
    return *(X(*)[N / 2][4]) x;
}
template <int N> __device__ __forceinline__ void clear_second_half(uint32_t (&p)[N][4])
{
#pragma unroll
    for (int i = N / 2; i < N; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) p[i][j] = 0;
}

/* Probabilities as the operand of P V. */
template <typename T, int NT>
__device__ __forceinline__ void pack_rows(const float (&s)[NT][4], uint32_t (&p)[NT / 2][4])
{
#pragma unroll
    for (int i = 0; i < NT / 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            p[i][j] = pack2<T>(s[i * 2 + (j >> 1)][(j & 1) * 2], s[i * 2 + (j >> 1)][(j & 1) * 2 + 1]);
}

} // namespace attend_parts

#endif
