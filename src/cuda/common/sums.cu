/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sums.cu - sums over runs. Limit: reads. */
#include "common/launch.cuh"
#include "common/sums.cuh"

enum { SUM_COLUMNS = 32, SUM_LANES = 8, SUMS_MOST = 3 };

/* A sum over runs, and the blocks before it. */
struct sum_of {
    const float *parts;
    float *out;
    int64_t runs, run_floats, out_row, count;
    int width;
    unsigned first;
};
struct sums_of_runs {
    sum_of of[SUMS_MOST];
    int count;
    bool add;
};

/* out[j, c] = the runs' shares of it: eight lanes sum every eighth run, then these in order. */
__global__ void sum_of_runs(const __grid_constant__ sums_of_runs all)
{
    __shared__ float sums[SUM_LANES][SUM_COLUMNS];
    int which = 0;
    while (which + 1 < all.count && blockIdx.x >= all.of[which + 1].first) which++;
    const sum_of &own = all.of[which];
    const float *const parts = own.parts;
    const int64_t i = (int64_t)(blockIdx.x - own.first) * SUM_COLUMNS + threadIdx.x;
    const int64_t runs = own.runs, run_floats = own.run_floats;
    float sum = 0.0f;
    if (i < own.count)
#pragma unroll 8
        for (int64_t r = threadIdx.y; r < runs; r += SUM_LANES) sum += parts[r * run_floats + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= own.count) return;
    for (int y = 1; y < SUM_LANES; y++) sum += sums[y][threadIdx.x];
    float *const to = own.out + i / own.width * own.out_row + i % own.width;
    *to = all.add ? *to + sum : sum;
}

quern_status sum_runs(const run_shares *shares, int count, bool add, cudaStream_t stream)
{
    sums_of_runs all = {};
    unsigned blocks = 0;
    all.add = add;
    for (int i = 0; i < count; i++) {
        const quern_tensor &out = shares[i].out;
        if (!present(out)) continue;
        const int64_t width = out.shape[out.ndim - 1], wanted = out.ndim > 1 ? width * out.shape[0] : width;
        if (wanted == 0) continue;
        all.of[all.count++] = {shares[i].parts,
                               (float *)out.data,
                               shares[i].runs,
                               shares[i].run_floats,
                               out.ndim > 1 ? out.strides[0] : 0,
                               wanted,
                               (int)width,
                               blocks};
        blocks += blocks_for(wanted, SUM_COLUMNS);
    }
    if (blocks == 0) return QUERN_OK;
    sum_of_runs<<<blocks, dim3(SUM_COLUMNS, SUM_LANES), 0, stream>>>(all);
    return LAUNCHED("sums of runs");
}

quern_status sum_runs(const float *parts, int64_t runs, int64_t run_floats, const quern_tensor &out, bool add,
                      cudaStream_t stream)
{
    const run_shares shares = {parts, runs, run_floats, out};
    return sum_runs(&shares, 1, add, stream);
}
