/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* score.cuh - from a stage's keys to scores: operands, and sums over heads. */
#ifndef QUERN_CUDA_INDEXER_SM90_SCORE_CUH
#define QUERN_CUDA_INDEXER_SM90_SCORE_CUH

#include "indexer/sm90/shared.cuh"
#include "hopper/rows.cuh"

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
 * thread's two rows, in one lane of four. */
template <int TILE, typename Put>
__device__ __forceinline__ void weigh(const float (&c)[TILE / 8][4], const float (*w)[HEADS],
                                      const float (&scale)[2], const Put &put)
{
    const int column = threadIdx.x % 4 * 2;
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
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[h] = row_sum(sum[h]);
            if (column == 0) put(q, h, sum[h] * scale[h]);
        }
    }
}

} // namespace sm90_indexer

#endif
