/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * grouped_dense.cu - each expert's rows by its own matrix of floats, on the f32 cores. A block of 256 threads
 * owns 64 rows of an expert and 64 columns, 4 x 4 a thread; both operands pass through shared memory, 16 of K
 * at a time, whose terms are added in order. Limit: FMA.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "common/values.cuh"
#include "variants.cuh"

enum { THREADS = 256, ROWS = 64, COLUMNS = 64, DEPTH = 16, EACH = 4 };

struct dense_params {
    const void *a, *b, *bias;
    void *c;
    quern_dtype a_dtype, b_dtype, bias_dtype, c_dtype;
    int64_t a_s, b_expert, b_k, b_n, bias_s, c_s; /* strides */
    int64_t n, k;
    expert_ends ends;
    bool accumulate;
};

/* The rows of a block: it counts experts' tiles up to its own. False past the last. */
__device__ __forceinline__ bool find_rows(const dense_params &p, int64_t tile, int32_t *expert, int64_t *row,
                                          int64_t *rows)
{
    for (int32_t e = 0; e < p.ends.experts; e++) {
        const int64_t first = p.ends.first_of(e), all = p.ends.end_of(e) - first,
                      tiles = all > 0 ? (all + ROWS - 1) / ROWS : 0;
        if (tile < tiles) {
            *expert = e;
            *row = first + tile * ROWS;
            *rows = min((int64_t)ROWS, all - tile * ROWS);
            return true;
        }
        tile -= tiles;
    }
    return false;
}

__global__ void __launch_bounds__(THREADS) grouped_dense(const __grid_constant__ dense_params p)
{
    __shared__ float a[DEPTH][ROWS + 1], b[DEPTH][COLUMNS + 1];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const int64_t column0 = (int64_t)blockIdx.x * COLUMNS;
    float sum[EACH][EACH] = {};
    int32_t expert = 0;
    int64_t row0 = 0, rows = 0;
    if (!find_rows(p, blockIdx.y, &expert, &row0, &rows)) return;
    for (int64_t k0 = 0; k0 < p.k; k0 += DEPTH) {
        for (int i = threadIdx.x; i < DEPTH * ROWS; i += THREADS) {
            const int d = i % DEPTH, r = i / DEPTH;
            a[d][r] = r < rows && k0 + d < p.k ? value_at(p.a, p.a_dtype, (row0 + r) * p.a_s + k0 + d) : 0.0f;
        }
        for (int i = threadIdx.x; i < DEPTH * COLUMNS; i += THREADS) {
            const bool along_k = p.b_k == 1;
            const int d = along_k ? i % DEPTH : i / COLUMNS, c = along_k ? i / DEPTH : i % COLUMNS;
            b[d][c] =
                column0 + c < p.n && k0 + d < p.k
                    ? value_at(p.b, p.b_dtype, expert * p.b_expert + (k0 + d) * p.b_k + (column0 + c) * p.b_n)
                    : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fmaf(a[d][y * EACH + i], b[d][x + j * 16], sum[i][j]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int64_t r = y * EACH + i, c = column0 + x + j * 16, at = (row0 + r) * p.c_s + c;
            if (r >= rows || c >= p.n) continue;
            float v = sum[i][j];
            if (p.bias != NULL) v += value_at(p.bias, p.bias_dtype, expert * p.bias_s + c);
            put_at(p.c, p.c_dtype, at, p.accumulate ? ((const float *)p.c)[at] + v : v);
        }
}

static quern_status grouped_dense_any_run(const stage_exec *exec, const grouped_dense_args *args, void *)
{
    const quern_tensor &b = args->b;
    dense_params p = {};
    p.a = args->a.data;
    p.a_dtype = args->a.dtype;
    p.a_s = args->a.strides[0];
    p.b = b.data;
    p.b_dtype = b.dtype;
    p.b_expert = b.strides[0];
    p.b_k = args->b_transposed ? 1 : b.strides[1];
    p.b_n = args->b_transposed ? b.strides[1] : 1;
    p.k = args->a.shape[1];
    p.n = args->c.shape[1];
    if (present(args->bias)) {
        p.bias = args->bias.data;
        p.bias_dtype = args->bias.dtype;
        p.bias_s = args->bias.strides[0];
    }
    p.c = args->c.data;
    p.c_dtype = args->c.dtype;
    p.c_s = args->c.strides[0];
    p.accumulate = args->accumulate;
    p.ends = expert_ends_of(args->offsets, args->a.shape[0]);
    const int64_t down = args->a.shape[0] / ROWS + p.ends.experts, across = (p.n + COLUMNS - 1) / COLUMNS;
    if (args->a.shape[0] == 0 || p.n == 0) return QUERN_OK;
    grouped_dense<<<dim3((unsigned)across, (unsigned)down), THREADS, 0, (cudaStream_t)exec->stream>>>(p);
    return LAUNCHED("grouped_dense");
}

extern const variant<grouped_dense_args> grouped_dense_any = {"grouped_dense_any", NULL, NULL,
                                                              grouped_dense_any_run};
