/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the indexer on Hopper for sequences of one query each: kernel.cuh scores all keys, pick.cu
 * finds the best. Items, feed and types of keys are those of several queries (sm90).
 */
#ifndef QUERN_CUDA_INDEXER_SM90_ONE_PARAMS_CUH
#define QUERN_CUDA_INDEXER_SM90_ONE_PARAMS_CUH

#include "indexer/sm90_plan/plan.cuh"

namespace sm90_indexer
{

enum { RANKED = 16, SHORT_ROW = 16 << 10 /* the choice keeps its scores in registers */ };

/* Rows are read four numbers at a time. */
struct raw_scores {
    float *raw; /* [B, row] */
    int64_t row;
    uint32_t *best; /* of rows longer than SHORT_ROW the best rank of each RANKED, [B, best_row]; or NULL */
};
static inline __host__ __device__ int64_t in_fours(int64_t n)
{
    return (n + 3) / 4 * 4;
}
static inline __host__ __device__ int64_t best_row(int64_t row)
{
    return in_fours((row + RANKED - 1) / RANKED);
}

typedef quern_status one_instance(const stage_exec *exec, plan &p, const raw_scores &to);
one_instance indexer_one_bf16, indexer_one_f16, indexer_one_fp8, indexer_one_fp4, indexer_one_codes;
quern_status pick_best(const stage_exec *exec, const index_kernel &a, const raw_scores &to);

} // namespace sm90_indexer

#endif
