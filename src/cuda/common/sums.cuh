/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sums.cuh - sums in a fixed order: of values by one block, and over runs of rows, each of which wrote its
 * share. */
#ifndef QUERN_CUDA_SUMS_CUH
#define QUERN_CUDA_SUMS_CUH

#include "common/device.cuh"

/* out[j, c] (f32, or absent) = the shares of it, parts[r run_floats + j width + c], in a fixed order; `add`:
 * to what it holds. */
quern_status sum_runs(const float *parts, int64_t runs, int64_t run_floats, const quern_tensor &out, bool add,
                      cudaStream_t stream);

/* The same of up to three sums in one launch. */
struct run_shares {
    const float *parts;
    int64_t runs, run_floats;
    const quern_tensor &out;
};
quern_status sum_runs(const run_shares *shares, int count, bool add, cudaStream_t stream);

/* The sum of x[n] on thread 0 of a block of THREADS, which all call: each adds every THREADS-th value, and
 * that one adds these sums in the order of the threads. */
template <int THREADS> __device__ __forceinline__ double block_sum(const double *x, int64_t n)
{
    __shared__ double sums[THREADS];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += x[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int i = 1; threadIdx.x == 0 && i < THREADS; i++) sum += sums[i];
    return sum;
}

#endif
