/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sums.cu - sums over runs. Limit: reads. */
#include "common/launch.cuh"
#include "common/sums.cuh"

enum { SUM_COLUMNS = 32, SUM_LANES = 8 };

/* out[j, c] = the runs' shares of it: eight lanes sum every eighth run, then these in order. */
__global__ void sum_of_runs(const float *parts, int64_t runs, int64_t run_floats, int width, float *out,
                            int64_t out_row, int64_t count, bool add)
{
    __shared__ float sums[SUM_LANES][SUM_COLUMNS];
    const int64_t i = (int64_t)blockIdx.x * SUM_COLUMNS + threadIdx.x;
    float sum = 0.0f;
    if (i < count)
        for (int64_t r = threadIdx.y; r < runs; r += SUM_LANES) sum += parts[r * run_floats + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= count) return;
    for (int y = 1; y < SUM_LANES; y++) sum += sums[y][threadIdx.x];
    float *const to = out + i / width * out_row + i % width;
    *to = add ? *to + sum : sum;
}

quern_status sum_runs(const float *parts, int64_t runs, int64_t run_floats, const quern_tensor &out, bool add,
                      cudaStream_t stream)
{
    if (!present(out)) return QUERN_OK;
    const int64_t width = out.shape[out.ndim - 1], count = out.ndim > 1 ? width * out.shape[0] : width;
    if (count == 0) return QUERN_OK;
    sum_of_runs<<<blocks_for(count, SUM_COLUMNS), dim3(SUM_COLUMNS, SUM_LANES), 0, stream>>>(
        parts, runs, run_floats, (int)width, (float *)out.data, out.ndim > 1 ? out.strides[0] : 0, count,
        add);
    return LAUNCHED("sums of runs");
}
