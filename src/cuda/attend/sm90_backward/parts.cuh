/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parts.cuh - what the computing warpgroups of the backward's kernels that own keys share:
 * S^T and dP^T, P^T and dS^T of them, rows that are not finite, and the gradients' way out. */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_PARTS_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_PARTS_CUH

#include "attend/sm90_backward/feed.cuh"

namespace sm90_backward
{

/* What is not finite in the rows of a tile goes to the keys that see it. */
template <typename T, int ROWS, int NT>
__device__ __forceinline__ void spread_rows(float (&acc)[NT][4], const char *tile, const statistics *st,
                                            const key_rows &rows, bool poison)
{
    spread_nonfinite<T, ROWS>(acc, tile, 0, ROWS, poison, [&](int j, int h) {
        const int n = st->query + j;
        return n >= rows.first[h] && n < rows.end[h] && (st->empty[j / 32] >> j % 32 & 1) == 0;
    });
}

/* Both computing warpgroups, when their products S and dP of a stage are made: `spread` takes what is not
 * finite from its Q and dO, which become finite. They wait for each other at the mbarrier `both`, twice so
 * that its phases are as before: warpgroups that run different code have no instruction for a named barrier
 * in common, and compute-sanitizer's synccheck reports such a barrier. */
template <typename T, int ROWS, int DK, int DV, typename F>
__device__ __forceinline__ void clean_rows(char *q, char *g, uint32_t both, F spread)
{
    typedef barriers_at<0, 1> both_groups;
    spread(q, g);
    both_groups::arrive(both, {});
    both_groups::wait(both, {});
#pragma unroll 1
    for (int i = (int)(threadIdx.x - 128) * 2; i < ROWS * (DK + DV) * 2; i += 512) {
        clear_nonfinite<T>((uint16_t *)(i < ROWS * DK * 2 ? q + i : g + i - ROWS * DK * 2));
    }
    async_fence();
    both_groups::arrive(both, {});
    both_groups::wait(both, both_groups::place::of(1));
}

/* Where a gradient of keys goes: its columns follow `before` others in a row of partial sums. */
struct key_gradient {
    view4 to;
    int dim, before;
    float scale;
    bool add;
};

__device__ __forceinline__ key_gradient d_k_of(const attend_kernel &a)
{
    return {a.d_k, a.dim_k, 0, a.scale, a.add_k};
}
__device__ __forceinline__ key_gradient d_v_of(const attend_kernel &a)
{
    return {a.d_v, a.dim_v, a.dim_k, 1.0f, a.add_v};
}

/* The gradient of one thread's keys, or their share. */
template <typename T, int KEYS, int NT>
__device__ __forceinline__ void store_keys(const float (&acc)[NT][4], const attend_kernel &a,
                                           const key_block &b, int place, const key_gradient &d)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = place + h * 8, key = key_of(b, r);
        if (key >= b.key_end) continue;
        float *part = a.part + (b.slot * KEYS + r) * (a.dim_k + a.dim_v) + d.before;
        const int64_t at = b.view * d.to.s[0] + (b.k0 + key) * d.to.s[1] + b.kvh * d.to.s[2];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const int c = i * 8 + (threadIdx.x & 3) * 2;
            const float x = acc[i][h * 2] * d.scale, y = acc[i][h * 2 + 1] * d.scale;
            if (c >= d.dim) continue;
            if (a.splits == 1) store_pair<T>(d.to.p, at + c, x, y, a.f32_dkv, d.add);
            else *(float2 *)(part + c) = make_float2(x, y);
        }
    }
}

/* Which of a thread's pairs of a stage see each other: bit 8 (2 h + c) + 7 - i is of key h and of row
 * 8 i + column + c. So the signs of the four bytes, all shifted by i, are those of S's i-th tile. */
__device__ __forceinline__ uint32_t find_seen(const statistics *st, const key_rows &rows)
{
    const int column = (threadIdx.x & 3) * 2;
    uint32_t seen = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        /* Of the stage's rows, those in [first, end). */
        const int first = min(max(rows.first[h] - st->query, 0), 64),
                  end = min(max(rows.end[h] - st->query, 0), 64);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int up = 7 - column - c;
            seen |= (0xffu >> ((first + up) >> 3) & ~(0xffu >> ((end + up) >> 3))) << 8 * (2 * h + c);
        }
    }
    const uint32_t empty[2] = {st->empty[0], st->empty[1]};
    if ((empty[0] | empty[1]) != 0) {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if (empty[i / 4] >> (i % 4 * 8 + column + c) & 1) seen &= ~(0x00010001u << (8 * c + 7 - i));
    }
    return seen;
}

/* Of two values of 16 bits, those of tile i and key h, the ones of rows that see the key; else 0. */
template <int H> __device__ __forceinline__ uint32_t only_seen(uint32_t two, uint32_t seen, int i)
{
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(seen << i), "n"(H == 0 ? 0x9988 : 0xbbaa));
    return two & mask;
}

/* P^T of a stage in 16 bits, times row_scale (SCALED). PART: some of these pairs do not see each other. */
template <typename T, bool SCALED, bool PART, int NT>
__device__ __forceinline__ void probabilities(const float (&s)[NT][4], uint32_t (&p)[NT / 2][4],
                                              uint32_t seen, const statistics *st, float scale_log2)
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int r = i * 8 + (threadIdx.x & 3) * 2;
        const float2 lse2 = *(const float2 *)&st->lse2[r];
        const float2 rs = SCALED ? *(const float2 *)&st->row_scale[r] : make_float2(1.0f, 1.0f);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x = exp2_fast(fmaf(s[i][h * 2], scale_log2, -lse2.x)),
                  y = exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -lse2.y));
            if (SCALED) {
                x *= rs.x;
                y *= rs.y;
            }
            uint32_t &two = p[i >> 1][(i & 1) * 2 + h];
            two = pack2<T>(x, y);
            if (PART) two = h == 0 ? only_seen<0>(two, seen, i) : only_seen<1>(two, seen, i);
        }
    }
}

template <typename T, int NT>
__device__ __forceinline__ void probabilities_of(const float (&s)[NT][4], uint32_t (&p)[NT / 2][4],
                                                 const statistics *st, const attend_kernel &a,
                                                 const key_rows &rows)
{
    const bool scaled = a.row_scale.p != NULL;
    if (st->part != 0) {
        const uint32_t seen = find_seen(st, rows);
        if (scaled) probabilities<T, true, true>(s, p, seen, st, a.scale_log2);
        else probabilities<T, false, true>(s, p, seen, st, a.scale_log2);
    } else if (scaled) {
        probabilities<T, true, false>(s, p, 0, st, a.scale_log2);
    } else {
        probabilities<T, false, false>(s, p, 0, st, a.scale_log2);
    }
}

/* P^T of a stage, times row_scale and in 16 bits, becomes dS^T. PART as there. */
template <typename T, bool PART, int NT>
__device__ __forceinline__ void score_gradients(uint32_t (&p)[NT / 2][4], uint32_t seen,
                                                const float (&dp)[NT][4], const statistics *st)
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const int r = i * 8 + (threadIdx.x & 3) * 2;
        const float2 delta = *(const float2 *)&st->delta[r];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t &two = p[i >> 1][(i & 1) * 2 + h];
            const float2 x = unpack2<T>(two);
            two = pack2<T>(x.x * (dp[i][h * 2] - delta.x), x.y * (dp[i][h * 2 + 1] - delta.y));
            if (PART) two = h == 0 ? only_seen<0>(two, seen, i) : only_seen<1>(two, seen, i);
        }
    }
}

template <typename T, int NT>
__device__ __forceinline__ void score_gradients_of(uint32_t (&p)[NT / 2][4], const float (&dp)[NT][4],
                                                   const statistics *st, const key_rows &rows)
{
    if (st->part != 0) score_gradients<T, true>(p, find_seen(st, rows), dp, st);
    else score_gradients<T, false>(p, 0, dp, st);
}

/* acc = 64 keys times the ROWS rows of a stage. */
template <typename T, int ROWS, int KEYS, int DIM>
__device__ __forceinline__ void rows_by_keys(float (&acc)[ROWS / 8][4], uint32_t keys, uint32_t rows)
{
    const uint64_t x0 = wg_fresh(wg_tile(keys, 0)), y0 = wg_fresh(wg_tile(rows, 0));
    wg_start();
#pragma unroll
    for (int c = 0; c < DIM; c += 16) {
        const uint64_t x = wg_further(x0, (c >> 6) * (KEYS * 128) + (c & 63) * 2),
                       y = wg_further(y0, (c >> 6) * (ROWS * 128) + (c & 63) * 2);
        if (c == 0) wg_ss_wide<T, ROWS, false>(acc, x, y);
        else wg_ss_wide<T, ROWS, true>(acc, x, y);
    }
    wg_commit();
}

/* acc += P^T or dS^T of a stage times its rows. */
template <typename T, int ROWS, int DIM>
__device__ __forceinline__ void keys_by_rows(float (&acc)[DIM / 8][4], const uint32_t (&f)[ROWS / 16][4],
                                             uint32_t rows)
{
    const uint64_t x0 = wg_fresh(wg_tile(rows, ROWS * 128));
#pragma unroll
    for (int c = 0; c < ROWS; c += 16)
        wg_rs_wide<T, DIM, true, true>(acc, f[c / 16], wg_further(x0, c * 128));
    wg_commit();
}

} // namespace sm90_backward

#endif
