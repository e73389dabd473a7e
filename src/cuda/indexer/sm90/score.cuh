/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* score.cuh - from a stage's keys to scores: operands, and sums over heads. */
#ifndef QUERN_CUDA_INDEXER_SM90_SCORE_CUH
#define QUERN_CUDA_INDEXER_SM90_SCORE_CUH

#include "indexer/sm90/shared.cuh"

namespace sm90_indexer
{

/* 16 rows from row0 on of a stage, and what multiplies the scores of a thread's two. */
template <typename K, int Q, int STAGES>
__device__ __forceinline__ void read_keys(uint32_t (&to)[K::STEPS][4], float (&scale)[2], const plan &p,
                                          fed<K, Q, STAGES> &m, int stage, int row0)
{
    const uint32_t tile = stage_address(m.k, stage), here = m.here[stage];
    K::read(to, scale, p.cut, tile, row0);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int run = (row0 + threadIdx.x % 32 / 4 + h * 8) >> p.cut.run_shift;
        scale[h] = (here >> run & 1) != 0 ? scale[h] * p.a.scale : NAN; /* chosen last */
    }
}

/* Sums over the heads of a tile's queries, times the keys' scales; `put(query, half, score)` takes those of a
 * thread's two rows, in the first two lanes of four. */
template <int TILE, typename Put>
__device__ __forceinline__ void weigh(const float (&c)[TILE / 8][4], const float (*w)[HEADS],
                                      const float (&scale)[2], const Put &put)
{
    const int lane = threadIdx.x % 4, column = lane * 2;
    const bool second = lane % 2 != 0;
    const float own_scale = second ? scale[1] : scale[0];
#pragma unroll
    for (int q = 0; q < TILE / HEADS; q++) {
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float2 two = *(const float2 *)&w[q][i * 8 + column];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sum[h] = fmaf(two.x, relu(c[q * 8 + i][h * 2]), sum[h]);
                sum[h] = fmaf(two.y, relu(c[q * 8 + i][h * 2 + 1]), sum[h]);
            }
        }
        float own = second ? sum[1] : sum[0]; /* of lanes' first or second rows, by turns */
        own += __shfl_xor_sync(~0u, second ? sum[0] : sum[1], 1);
        own += __shfl_xor_sync(~0u, own, 2);
        if (lane < 2) put(q, lane, own * own_scale);
    }
}

} // namespace sm90_indexer

#endif
