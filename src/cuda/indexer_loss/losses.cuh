/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* losses.cuh - the sum of the queries' losses. */
#ifndef QUERN_CUDA_INDEXER_LOSS_LOSSES_CUH
#define QUERN_CUDA_INDEXER_LOSS_LOSSES_CUH

#include "common/sums.cuh"
#include "indexer_loss/params.cuh"

/* A block of THREADS calls. seen: queries that see an entry, of calls without lists. */
template <int THREADS> __device__ __forceinline__ void sum_losses(const loss_params &p, int64_t seen)
{
    __shared__ int32_t counted;
    if (threadIdx.x == 0) counted = p.listed < 0 || p.rows == NULL ? 0 : *p.rows;
    const double sum = block_sum<THREADS>(p.losses, p.batch * p.queries);
    if (p.listed >= 0 && p.rows == NULL) {
        count_rows(p, &counted, threadIdx.x, THREADS);
        __syncthreads();
    }
    if (threadIdx.x != 0 || p.loss == NULL) return;
    const int64_t rows = p.listed < 0 ? seen : counted;
    *p.loss = (float)((double)p.lambda * sum / (double)(rows > 1 ? rows : 1));
}

#endif
