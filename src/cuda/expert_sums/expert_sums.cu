/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * expert_sums.cu - the sum of each expert's rows, a thread a column, rows in order; and each row's product
 * with its expert's bias, a warp a row. Limit: x read once for each of the two.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "common/values.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

struct sums_params {
    const void *x, *bias;
    quern_dtype x_dtype, bias_dtype;
    int64_t x_s, bias_s, rows, columns, per, slots;
    expert_ends ends;
    const int32_t *permutation;
    const float *weights;
    float *sums, *d_weights;
    int64_t weights_s, sums_s, d_weights_s;
};

/* Where the slot of a row stands in rows of `stride`; -1: its slot is none. */
__device__ __forceinline__ int64_t slot_at(const sums_params &a, int64_t row, int64_t stride)
{
    const int64_t slot = a.permutation[row];
    return slot >= 0 && slot < a.slots ? slot / a.per * stride + slot % a.per : -1;
}

__global__ void __launch_bounds__(THREADS) expert_sums_add(const __grid_constant__ sums_params a)
{
    const int64_t c = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int32_t e = blockIdx.y;
    float sum = 0.0f;
    if (c >= a.columns) return;
    for (int64_t row = a.ends.first_of(e); row < a.ends.end_of(e); row++) {
        const int64_t slot = a.weights != NULL ? slot_at(a, row, a.weights_s) : 0;
        const float w = a.weights == NULL ? 1.0f : slot >= 0 ? a.weights[slot] : 0.0f;
        sum = fmaf(w, value_at(a.x, a.x_dtype, row * a.x_s + c), sum);
    }
    a.sums[e * a.sums_s + c] = sum;
}

__global__ void __launch_bounds__(THREADS) expert_sums_multiply(const __grid_constant__ sums_params a)
{
    const int64_t row = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    if (row >= a.rows) return;
    const int32_t e = a.ends.expert_of(row);
    for (int64_t c = lane; e < a.ends.experts && c < a.columns; c += 32)
        sum = fmaf(value_at(a.x, a.x_dtype, row * a.x_s + c),
                   value_at(a.bias, a.bias_dtype, e * a.bias_s + c), sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const int64_t slot = slot_at(a, row, a.d_weights_s);
    if (lane == 0 && slot >= 0) a.d_weights[slot] += sum;
}

static quern_status expert_sums_any_run(const stage_exec *exec, const expert_sums_args *args, void *)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    sums_params a = {};
    a.x = args->x.data;
    a.x_dtype = args->x.dtype;
    a.x_s = args->x.strides[0];
    a.rows = args->x.shape[0];
    a.columns = args->x.shape[1];
    a.ends = expert_ends_of(args->offsets, a.rows);
    a.permutation = (const int32_t *)args->permutation.data;
    const quern_tensor &slots = present(args->d_weights) ? args->d_weights : args->weights;
    const int64_t tokens = present(slots) ? slots.shape[0] : a.rows;
    a.per = tokens > 0 ? a.rows / tokens : 1;
    a.slots = tokens * a.per;
    if (present(args->weights)) {
        a.weights = (const float *)args->weights.data;
        a.weights_s = args->weights.strides[0];
    }
    if (a.columns == 0) return QUERN_OK;
    if (present(args->sums) && a.ends.experts > 0) {
        a.sums = (float *)args->sums.data;
        a.sums_s = args->sums.strides[0];
        expert_sums_add<<<dim3(blocks_for(a.columns, THREADS), (unsigned)a.ends.experts), THREADS, 0,
                          stream>>>(a);
    }
    if (present(args->bias) && present(args->d_weights) && a.rows > 0) {
        a.bias = args->bias.data;
        a.bias_dtype = args->bias.dtype;
        a.bias_s = args->bias.strides[0];
        a.d_weights = (float *)args->d_weights.data;
        a.d_weights_s = args->d_weights.strides[0];
        expert_sums_multiply<<<blocks_for(a.rows * 32, THREADS), THREADS, 0, stream>>>(a);
    }
    return LAUNCHED("expert_sums");
}

extern const variant<expert_sums_args> expert_sums_any = {"expert_sums_any", NULL, NULL, expert_sums_any_run};
