/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * swiglu.cu - SwiGLU and its gradient. Forward: a thread has four columns. Backward: a block of threads has a
 * row, as a routing weight's gradient is a sum over the row: each thread's columns in order, then threads by
 * pairs. Limit: h read once.
 */
#include "common/swiglu.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256, COLUMNS = 4 };

struct swiglu_params {
    rows_view h, act, d_act, d_h;
    int64_t rows, width;
    swiglu_rule rule;
    bool runs; /* four columns are in one run, at multiples of 16 bytes */
    quern_dtype act_dtype, d_act_dtype, d_h_dtype;
    const int32_t *permutation;
    const float *weights;
    float *d_weights;
    int64_t per, slots, weights_s, d_weights_s;
};

template <typename T>
__global__ void __launch_bounds__(THREADS) swiglu_forward(const __grid_constant__ swiglu_params a)
{
    const int64_t per_row = (a.width + COLUMNS - 1) / COLUMNS,
                  i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * per_row) return;
    const int64_t row = i / per_row, c = (i - row * per_row) * COLUMNS, q = a.rule.granularity;
    const float *h = a.h.row<const float>(row);
    T *act = a.act.row<T>(row) + c;
    float gate[COLUMNS], up[COLUMNS];
    if (a.runs) {
        const float *at = h + gate_column(c, q);
        *(float4 *)gate = __ldcs((const float4 *)at);
        *(float4 *)up = __ldcs((const float4 *)(at + q));
    } else {
        for (int e = 0; e < COLUMNS; e++) {
            const int64_t at = gate_column(c + e < a.width ? c + e : c, q);
            gate[e] = h[at];
            up[e] = h[at + q];
        }
    }
#pragma unroll
    for (int e = 0; e < COLUMNS; e++)
        if (c + e < a.width) act[e] = from_float<T>(swiglu_of(a.rule, gate[e], up[e]));
}

__device__ __forceinline__ float element(const rows_view &v, quern_dtype dtype, int64_t row, int64_t column)
{
    const int64_t at = v.row_at(row) + column;
    return dtype == QUERN_F32    ? ((const float *)v.p)[at]
           : dtype == QUERN_BF16 ? to_float(((const bf16 *)v.p)[at])
                                 : to_float(((const f16 *)v.p)[at]);
}

__device__ __forceinline__ void put(const rows_view &v, quern_dtype dtype, int64_t row, int64_t column,
                                    float x)
{
    const int64_t at = v.row_at(row) + column;
    if (dtype == QUERN_F32) ((float *)v.p)[at] = x;
    else if (dtype == QUERN_BF16) ((bf16 *)v.p)[at] = from_float<bf16>(x);
    else ((f16 *)v.p)[at] = from_float<f16>(x);
}

__global__ void __launch_bounds__(THREADS) swiglu_backward(const __grid_constant__ swiglu_params a)
{
    __shared__ float sums[THREADS];
    const int64_t row = blockIdx.x, q = a.rule.granularity;
    int64_t slot = row;
    if (a.permutation != NULL) slot = a.permutation[row];
    const bool real = slot >= 0 && slot < a.slots;
    const float weight = a.permutation == NULL ? 1.0f
                         : real                ? a.weights[slot / a.per * a.weights_s + slot % a.per]
                                               : 0.0f;
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < a.width; c += THREADS) {
        const float d = element(a.d_act, a.d_act_dtype, row, c);
        const int64_t at = gate_column(c, q);
        float dg, du;
        if (a.d_weights != NULL) sum = fmaf(d, element(a.act, a.act_dtype, row, c), sum);
        swiglu_gradient(a.rule, d * weight, element(a.h, QUERN_F32, row, at),
                        element(a.h, QUERN_F32, row, at + q), &dg, &du);
        put(a.d_h, a.d_h_dtype, row, at, dg);
        put(a.d_h, a.d_h_dtype, row, at + q, du);
    }
    if (a.d_weights == NULL) return;
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0 && real) a.d_weights[slot / a.per * a.d_weights_s + slot % a.per] = sums[0];
}

static swiglu_params params_of(const swiglu_args *args)
{
    swiglu_params a = {};
    a.h = rows_view_of(args->h);
    a.act = rows_view_of(args->act);
    a.d_act = rows_view_of(args->d_act);
    a.d_h = rows_view_of(args->d_h);
    a.act_dtype = args->act.dtype;
    a.d_act_dtype = args->d_act.dtype;
    a.d_h_dtype = args->d_h.dtype;
    a.rows = args->h.shape[0];
    a.width = args->h.shape[1] / 2;
    a.rule = args->rule;
    a.runs = a.width % COLUMNS == 0 && a.rule.granularity % COLUMNS == 0 && rows_aligned(args->h, 16);
    if (present(args->permutation)) {
        a.permutation = (const int32_t *)args->permutation.data;
        a.weights = (const float *)args->weights.data;
        a.weights_s = args->weights.strides[0];
        a.per = args->weights.shape[1];
        a.slots = args->weights.shape[0] * a.per;
    }
    if (present(args->d_weights)) {
        a.d_weights = (float *)args->d_weights.data;
        a.d_weights_s = args->d_weights.strides[0];
    }
    return a;
}

static quern_status swiglu_any_run(const stage_exec *exec, const swiglu_args *args, void *)
{
    const swiglu_params a = params_of(args);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t n = a.rows * ((a.width + COLUMNS - 1) / COLUMNS);
    if (n == 0) return QUERN_OK;
    const unsigned grid = blocks_for(n, THREADS);
    if (args->act.dtype == QUERN_F32) swiglu_forward<float><<<grid, THREADS, 0, stream>>>(a);
    else if (args->act.dtype == QUERN_BF16) swiglu_forward<bf16><<<grid, THREADS, 0, stream>>>(a);
    else swiglu_forward<f16><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("swiglu");
}

static quern_status swiglu_backward_any_run(const stage_exec *exec, const swiglu_args *args, void *)
{
    swiglu_params a = params_of(args);
    if (a.rows == 0) return QUERN_OK;
    if (a.permutation == NULL) a.slots = a.rows, a.per = 1;
    swiglu_backward<<<(unsigned)a.rows, THREADS, 0, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("swiglu_backward");
}

extern const variant<swiglu_args> swiglu_forward_any = {"swiglu_forward_any", NULL, NULL, swiglu_any_run};

extern const variant<swiglu_args> swiglu_backward_any = {"swiglu_backward_any", NULL, NULL,
                                                         swiglu_backward_any_run};
