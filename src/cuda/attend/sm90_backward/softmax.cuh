/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * softmax.cuh - P^T and dS^T of a step in f32, in the places of S^T and dP^T; then in 16 bits, whose
 * registers products may read until then. A thread loads the statistics of four rows at once
 * (place_of_row()), which takes half as many loads of shared memory.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_SOFTMAX_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_SOFTMAX_CUH

#include "attend/sm90_backward/parts.cuh"

namespace sm90_backward
{

/* Four statistics of a thread: of tiles 2 j and 2 j + 1 of a stage's rows, [tile][row]. */
struct four_rows {
    float of[2][2];
};

__device__ __forceinline__ four_rows rows_of_tiles(const float (&statistic)[MOST_ROWS], int j)
{
    const float4 x = *(const float4 *)&statistic[j * 16 + (threadIdx.x & 3) * 4];
    return {{{x.x, x.y}, {x.z, x.w}}};
}

/* S^T of a stage becomes P^T, times row_scale, in f32 and not masked. */
template <bool SCALED, int NT>
__device__ __forceinline__ void exponentials(float (&s)[NT][4], const statistics *st, float scale_log2)
{
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
        const four_rows lse2 = rows_of_tiles(st->lse2, j);
        four_rows row_scale = {};
        if (SCALED) row_scale = rows_of_tiles(st->row_scale, j);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float &x = s[2 * j + i][e];
                x = exp2_fast(fmaf(x, scale_log2, -lse2.of[i][e & 1]));
                if (SCALED) x *= row_scale.of[i][e & 1];
            }
    }
}

template <int NT>
__device__ __forceinline__ void probabilities_in_place(float (&s)[NT][4], const statistics *st,
                                                       const attend_kernel &a)
{
    if (a.row_scale.p != NULL) exponentials<true>(s, st, a.scale_log2);
    else exponentials<false>(s, st, a.scale_log2);
}

/* dP^T of a stage becomes dS^T, in f32 and not masked. p: P^T. */
template <int NT>
__device__ __forceinline__ void score_gradients_in_place(const float (&p)[NT][4], float (&dp)[NT][4],
                                                         const statistics *st)
{
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
        const four_rows delta = rows_of_tiles(st->delta, j);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[2 * j + i][e] = p[2 * j + i][e] * (dp[2 * j + i][e] - delta.of[i][e & 1]);
    }
}

/* The same of P^T in 16 bits, which products may still read. */
template <typename T, int NT>
__device__ __forceinline__ void score_gradients_in_place(const uint32_t (&p)[NT / 2][4], float (&dp)[NT][4],
                                                         const statistics *st)
{
#pragma unroll
    for (int j = 0; j < NT / 2; j++) {
        const four_rows delta = rows_of_tiles(st->delta, j);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float2 two = unpack2<T>(p[j][i * 2 + h]);
                float(&x)[4] = dp[2 * j + i];
                x[h * 2] = two.x * (x[h * 2] - delta.of[i][0]);
                x[h * 2 + 1] = two.y * (x[h * 2 + 1] - delta.of[i][1]);
            }
    }
}

/* P^T or dS^T of a stage in 16 bits. PART: some of these pairs do not see each other. */
template <typename T, bool PART, int NT>
__device__ __forceinline__ void round_seen(const float (&x)[NT][4], uint32_t (&f)[NT / 2][4], uint32_t seen)
{
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t &two = f[i >> 1][(i & 1) * 2 + h];
            two = pack2<T>(x[i][h * 2], x[i][h * 2 + 1]);
            if (PART) two = h == 0 ? only_seen<0>(two, seen, i) : only_seen<1>(two, seen, i);
        }
}

template <typename T, int NT>
__device__ __forceinline__ void round_step(const float (&x)[NT][4], uint32_t (&f)[NT / 2][4],
                                           const statistics *st, const key_rows &rows)
{
    if (st->part != 0) round_seen<T, true>(x, f, find_seen(st, rows));
    else round_seen<T, false>(x, f, 0);
}

} // namespace sm90_backward

#endif
