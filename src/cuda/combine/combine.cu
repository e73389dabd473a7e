/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * combine.cu - sorted rows back to their tokens: one kernel inverts the permutation, one sums a token's rows
 * in slot order, four columns a thread. A short permutation is inverted by each block for itself. A slot that
 * no row holds counts as 0. Limit: y read once.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256, COLUMNS = 4, TOGETHER = 8 /* rows */, FEW = 1024 /* slots that a block inverts */ };

struct combine_params {
    const float *y, *weights, *plus, *plus_too;
    int64_t y_s, weights_s, plus_s, plus_too_s;
    const int32_t *permutation;
    int32_t *row_of; /* [slots], workspace; -1: no row. NULL: few */
    rows_view out;
    int64_t tokens, per, slots, columns;
    bool wide, wide_out;
};

__global__ void __launch_bounds__(THREADS) combine_invert(const __grid_constant__ combine_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.slots) return;
    const int32_t slot = a.permutation[i];
    if (slot >= 0 && slot < a.slots) a.row_of[slot] = (int32_t)i;
}

struct columns {
    float x[COLUMNS];
};
__device__ __forceinline__ columns load_columns(const float *x, int64_t left, bool wide)
{
    columns v = {};
    if (wide && left >= COLUMNS) *(float4 *)v.x = __ldcs((const float4 *)x);
    else
        for (int c = 0; c < COLUMNS && c < left; c++) v.x[c] = x[c];
    return v;
}

/* sum += w x in two roundings. */
__device__ __forceinline__ void add_columns(float (&sum)[COLUMNS], const columns &v, float w)
{
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) sum[c] = __fadd_rn(sum[c], __fmul_rn(w, v.x[c]));
}

/* A token's rows in slot order, some of them loaded at once. */
__device__ __forceinline__ void add_rows(const combine_params &a, float (&sum)[COLUMNS],
                                         const int32_t *row_of, int64_t token, int64_t c, int64_t left)
{
    for (int64_t j0 = 0; j0 < a.per; j0 += TOGETHER) {
        columns v[TOGETHER];
        float w[TOGETHER];
        bool here[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            const int64_t j = j0 + i;
            const int32_t row = j < a.per ? row_of[token * a.per + j] : -1;
            here[i] = row >= 0;
            w[i] = here[i] && a.weights != NULL ? __ldg(a.weights + token * a.weights_s + j) : 1.0f;
            if (here[i]) v[i] = load_columns(a.y + row * a.y_s + c, left, a.wide);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            if (here[i]) add_columns(sum, v[i], w[i]);
    }
}

/* Rows of few slots into shared memory. */
__device__ __forceinline__ void invert_few(const combine_params &a, int32_t *row_of)
{
    for (int i = threadIdx.x; i < a.slots; i += THREADS) row_of[i] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += THREADS) {
        const int32_t slot = __ldg(a.permutation + i);
        if (slot >= 0 && slot < a.slots) row_of[slot] = i;
    }
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(THREADS) combine_rows(const __grid_constant__ combine_params a)
{
    __shared__ int32_t few[FEW];
    const int64_t per_row = (a.columns + COLUMNS - 1) / COLUMNS,
                  i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int32_t *row_of = a.row_of != NULL ? a.row_of : few;
    wait_for_before();
    let_next_start();
    if (a.row_of == NULL) invert_few(a, few);
    if (i >= a.tokens * per_row) return;
    const int64_t token = i / per_row, c = (i - token * per_row) * COLUMNS, left = a.columns - c;
    float sum[COLUMNS] = {};
    add_rows(a, sum, row_of, token, c, left);
    if (a.plus != NULL) add_columns(sum, load_columns(a.plus + token * a.plus_s + c, left, false), 1.0f);
    if (a.plus_too != NULL)
        add_columns(sum, load_columns(a.plus_too + token * a.plus_too_s + c, left, false), 1.0f);
    T *out = a.out.row<T>(token) + c;
    T rounded[COLUMNS];
#pragma unroll
    for (int e = 0; e < COLUMNS; e++) rounded[e] = from_float<T>(sum[e]);
    if (a.wide_out && left >= COLUMNS) {
        if constexpr (sizeof(T) == 4) *(float4 *)out = *(const float4 *)rounded;
        else *(uint2 *)out = *(const uint2 *)rounded;
    } else {
        for (int e = 0; e < COLUMNS && e < left; e++) out[e] = rounded[e];
    }
}

template <typename T>
static quern_status launch_combine(const combine_params &a, unsigned grid, cudaStream_t stream)
{
    if (a.row_of == NULL) return launch_behind(stream, combine_rows<T>, dim3(grid), THREADS, 0, "combine", a);
    return launch_shared({stream, NULL}, combine_rows<T>, dim3(grid), THREADS, 0, "combine", a);
}

static size_t combine_any_bytes(const stage_exec *, const combine_args *args)
{
    const int64_t slots = args->permutation.shape[0];
    return slots > FEW ? room_for((size_t)slots * sizeof(int32_t)) : 0;
}

static const float *floats(const quern_tensor &t)
{
    return present(t) ? (const float *)t.data : NULL;
}

static quern_status combine_any_run(const stage_exec *exec, const combine_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const combine_params a = {floats(args->y),
                              floats(args->weights),
                              floats(args->plus),
                              floats(args->plus_too),
                              args->y.strides[0],
                              args->weights.strides[0],
                              args->plus.strides[0],
                              args->plus_too.strides[0],
                              (const int32_t *)args->permutation.data,
                              args->permutation.shape[0] > FEW ? room_at<int32_t>(workspace) : NULL,
                              rows_view_of(args->out),
                              rows_of(args->out),
                              args->per,
                              args->permutation.shape[0],
                              args->y.shape[1],
                              rows_aligned(args->y, 16),
                              rows_aligned(args->out, COLUMNS * bytes_of(args->out.dtype))};
    const int64_t n = a.tokens * ((a.columns + COLUMNS - 1) / COLUMNS);
    if (n == 0) return QUERN_OK;
    if (a.row_of != NULL) {
        const cudaError_t code = cudaMemsetAsync(a.row_of, 0xff, (size_t)a.slots * sizeof(int32_t), stream);
        if (code != cudaSuccess) return cuda_report(code, "combine, clearing");
        combine_invert<<<blocks_for(a.slots, THREADS), THREADS, 0, stream>>>(a);
    }
    const unsigned grid = blocks_for(n, THREADS);
    return args->out.dtype == QUERN_F32    ? launch_combine<float>(a, grid, stream)
           : args->out.dtype == QUERN_BF16 ? launch_combine<bf16>(a, grid, stream)
                                           : launch_combine<f16>(a, grid, stream);
}

extern const variant<combine_args> combine_any = {"combine_any", NULL, combine_any_bytes, combine_any_run};
