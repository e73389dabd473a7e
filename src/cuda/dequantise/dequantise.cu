/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dequantise.cu - NVFP4 back to values. A thread makes 8 values of a row from 4 bytes of codes, or a block of
 * 16 along a column. A scale byte that is no number counts as 0 and sets
 * its bit. Limit: codes and scales read and out written
 * once.
 */
#include "common/chunk.cuh"
#include "common/fp4.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

struct dequantise_params {
    rows_view codes, scales, global, out;
    int64_t rows, columns, expert_rows;
    expert_ends ends;
    quantise_global per;
    bool reciprocal, wide, wide_codes;
    int32_t *status;
    int64_t k, codes_s[2], scales_s[2], out_s[2]; /* of matrices */
};

__device__ __forceinline__ float scale_value(const dequantise_params &a, int byte)
{
    if (!is_scale(byte)) raise_status(a.status, QUERN_STATUS_BAD_SCALE);
    return is_scale(byte) ? e4m3_value(byte) : 0.0f;
}

/* A global that is none makes zeros: under R = 1 / G, too. */
__device__ __forceinline__ float global_value(const dequantise_params &a, float g)
{
    if (is_global(g)) return g;
    raise_status(a.status, QUERN_STATUS_BAD_GLOBAL);
    return a.reciprocal ? INFINITY : 0.0f;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) dequantise_rows(const __grid_constant__ dequantise_params a)
{
    const int64_t per = (a.columns + CHUNK - 1) / CHUNK, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    a.ends.check(a.status);
    if (i >= a.rows * per) return;
    const int64_t row = i / per, c = (i - row * per) * CHUNK;
    const int64_t expert = a.ends.end != NULL                ? a.ends.expert_of(row)
                           : a.per == QUANTISE_GLOBAL_EXPERT ? row / a.expert_rows
                                                             : 0;
    chunk x = {};
    if (a.ends.end == NULL || expert < a.ends.experts) {
        const int64_t at = a.per == QUANTISE_GLOBAL_ROW ? row : a.per == QUANTISE_GLOBAL_EXPERT ? expert : 0;
        const float global = global_value(a, *a.global.row<const float>(at)),
                    scale = scale_value(a, a.scales.row<const uint8_t>(row)[c / FP4_BLOCK]);
        const uint8_t *codes = a.codes.row<const uint8_t>(row) + c / 2;
        uint32_t word = 0;
        if (a.wide_codes) word = __ldg((const uint32_t *)codes);
        else
            for (int b = 0; b < 4; b++) word |= (uint32_t)codes[b] << 8 * b;
#pragma unroll
        for (int e = 0; e < CHUNK; e++) x.x[e] = fp4_value(a.reciprocal, global, word >> 4 * e & 15, scale);
    }
    T *out = a.out.row<T>(row) + c;
    if (c + CHUNK <= a.columns) {
        store_chunk<T>(out, x, a.wide);
        return;
    }
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
        if (c + e < a.columns) out[e] = from_float<T>(x.x[e]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) dequantise_columns(const __grid_constant__ dequantise_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, blocks = a.k / FP4_BLOCK;
    if (i >= a.rows * a.columns) return;
    const int64_t row = i / a.columns, n = i - row * a.columns, e = row / blocks, block = row - e * blocks;
    const float global = global_value(a, *a.global.row<const float>(a.per == QUANTISE_GLOBAL_EXPERT ? e : 0));
    const float scale =
        scale_value(a, ((const uint8_t *)a.scales.p)[e * a.scales_s[0] + block * a.scales_s[1] + n]);
    const uint8_t *codes = (const uint8_t *)a.codes.p + e * a.codes_s[0] + block * 8 * a.codes_s[1] + n;
    T *out = (T *)a.out.p + e * a.out_s[0] + block * FP4_BLOCK * a.out_s[1] + n;
    uint8_t pair[FP4_BLOCK / 2];
#pragma unroll
    for (int p = 0; p < FP4_BLOCK / 2; p++) pair[p] = __ldg(codes + p * a.codes_s[1]);
#pragma unroll
    for (int k = 0; k < FP4_BLOCK; k++)
        out[k * a.out_s[1]] =
            from_float<T>(fp4_value(a.reciprocal, global, pair[k / 2] >> 4 * (k % 2) & 15, scale));
}

static dequantise_params params_of(const dequantise_args *args)
{
    const quern_tensor &out = args->out;
    dequantise_params a = {};
    a.codes = rows_view_of(args->codes);
    a.scales = rows_view_of(args->scales);
    a.global = rows_view_of(args->global);
    a.out = rows_view_of(out);
    a.per = args->per;
    a.reciprocal = args->profile == QUANTISE_PROFILE_COMPRESSED_TENSORS;
    a.columns = columns_of(out);
    if (args->columns) {
        a.k = out.shape[1];
        a.rows = out.shape[0] * (a.k / FP4_BLOCK);
        for (int i = 0; i < 2; i++) {
            a.codes_s[i] = args->codes.strides[i];
            a.scales_s[i] = args->scales.strides[i];
            a.out_s[i] = out.strides[i];
        }
        return a;
    }
    a.rows = rows_of(out);
    a.ends = expert_ends_of(args->offsets, a.rows);
    a.expert_rows = out.ndim == 3 ? out.shape[1] : 1;
    a.wide = rows_aligned(out, 16);
    a.wide_codes = rows_aligned(args->codes, 4);
    return a;
}

template <typename T>
static quern_status dequantise_as(const dequantise_params &a, bool columns, cudaStream_t stream)
{
    const int64_t n = a.rows * (columns ? a.columns : (a.columns + CHUNK - 1) / CHUNK);
    if (n == 0) return QUERN_OK;
    if (columns) dequantise_columns<T><<<blocks_for(n, THREADS), THREADS, 0, stream>>>(a);
    else dequantise_rows<T><<<blocks_for(n, THREADS), THREADS, 0, stream>>>(a);
    return LAUNCHED("dequantise");
}

static quern_status dequantise_any_run(const stage_exec *exec, const dequantise_args *args, void *)
{
    dequantise_params a = params_of(args);
    a.status = exec->status;
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (args->out.dtype == QUERN_F32) return dequantise_as<float>(a, args->columns, stream);
    return args->out.dtype == QUERN_BF16 ? dequantise_as<bf16>(a, args->columns, stream)
                                         : dequantise_as<f16>(a, args->columns, stream);
}

extern const variant<dequantise_args> dequantise_any = {"dequantise_any", NULL, NULL, dequantise_any_run};
