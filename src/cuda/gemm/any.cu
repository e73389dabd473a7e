/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * any.cu - c = a b of matrices of any dtypes and strides, on the f32 cores.
 *
 * A block makes 64 x 64 of c, a thread 4 x 4: 16 rows of k at a time stand in shared memory, in f32. Sums run
 * over k in order, 256 at a time and then over those, so a row of c has the same bits however many rows there
 * are. Limit: f32 multiply-adds.
 */
#include "common/entry.cuh"
#include "common/launch.cuh"
#include "variants.cuh"

enum { TILE = 64, DEPTH = 16, LEVEL = 256, EACH = 4, THREADS = 256 };

struct gemm_operand {
    any_floats x;
    int64_t row, k; /* strides along m or n, and along k */
};

struct gemm_kernel {
    gemm_operand a, b;
    void *c;
    quern_dtype c_dtype;
    int64_t c_row, m, n, k;
    bool add;
};

/* Rows first ... of an operand, 16 of k: tile[k][row]. Lanes follow the direction in which memory runs. */
__device__ __forceinline__ void load_tile(float (*tile)[TILE + 1], const gemm_operand &o, int64_t first,
                                          int64_t rows, int64_t k0, int64_t k)
{
    for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
        const int r = o.k == 1 ? i / DEPTH : i % TILE, d = o.k == 1 ? i % DEPTH : i / TILE;
        tile[d][r] = first + r < rows && k0 + d < k ? o.x.at((first + r) * o.row + (k0 + d) * o.k) : 0.0f;
    }
}

__device__ __forceinline__ void store_c(const gemm_kernel &a, int64_t row, int64_t column, float x)
{
    if (row >= a.m || column >= a.n) return;
    const int64_t at = row * a.c_row + column;
    if (a.c_dtype == QUERN_F32) ((float *)a.c)[at] = a.add ? ((float *)a.c)[at] + x : x;
    else if (a.c_dtype == QUERN_BF16) ((bf16 *)a.c)[at] = __float2bfloat16_rn(x);
    else ((__half *)a.c)[at] = __float2half_rn(x);
}

__global__ void __launch_bounds__(THREADS) gemm_any_tile(const __grid_constant__ gemm_kernel a)
{
    __shared__ float rows[DEPTH][TILE + 1], columns[DEPTH][TILE + 1];
    const int64_t row0 = (int64_t)blockIdx.x * TILE, column0 = (int64_t)blockIdx.y * TILE;
    const int y = threadIdx.x / 16, x = threadIdx.x % 16;
    float total[EACH][EACH] = {}, sum[EACH][EACH] = {};
    for (int64_t k0 = 0; k0 < a.k; k0 += DEPTH) {
        __syncthreads();
        load_tile(rows, a.a, row0, a.m, k0, a.k);
        load_tile(columns, a.b, column0, a.n, k0, a.k);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fmaf(rows[d][y + 16 * i], columns[d][x + 16 * j], sum[i][j]);
        if ((k0 + DEPTH) % LEVEL != 0 && k0 + DEPTH < a.k) continue;
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                total[i][j] += sum[i][j];
                sum[i][j] = 0.0f;
            }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) store_c(a, row0 + y + 16 * i, column0 + x + 16 * j, total[i][j]);
}

static gemm_operand operand_of(const quern_tensor &t, bool along_k)
{
    return {any_floats_of(t), along_k ? 1 : t.strides[0], along_k ? t.strides[0] : 1};
}

static bool supports(const stage_exec *, const gemm_args *args, char *)
{
    return !present(args->live);
}

static quern_status run(const stage_exec *exec, const gemm_args *args, void *)
{
    gemm_kernel a = {};
    a.a = operand_of(args->a, args->a_transposed);
    a.b = operand_of(args->b, !args->b_transposed);
    a.c = args->c.data;
    a.c_dtype = args->c.dtype;
    a.c_row = args->c.strides[0];
    a.m = args->c.shape[0];
    a.n = args->c.shape[1];
    a.k = args->a.shape[args->a_transposed ? 0 : 1];
    a.add = args->accumulate;
    if (a.m == 0 || a.n == 0) return QUERN_OK;
    const int64_t most = 65535 * (int64_t)TILE; /* columns of a launch */
    for (int64_t first = 0; first < a.n; first += most) {
        gemm_kernel part = a;
        part.n = a.n - first < most ? a.n - first : most;
        part.b.x.p = (const char *)a.b.x.p + first * a.b.row * bytes_of(args->b.dtype);
        part.c = (char *)a.c + first * bytes_of(args->c.dtype);
        gemm_any_tile<<<dim3(blocks_for(a.m, TILE), blocks_for(part.n, TILE)), THREADS, 0,
                        (cudaStream_t)exec->stream>>>(part);
    }
    return LAUNCHED("a product");
}

extern const variant<gemm_args> gemm_any = {"gemm_any", supports, NULL, run};
