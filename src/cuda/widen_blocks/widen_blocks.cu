/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* widen_blocks.cu - e4m3 with a scale for every 128 x 128 to floats, transposed through shared memory, 32 x
 * 32 at a time. Limit: codes read and out written once. */
#include "common/fp4.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { TILE = 32, LINES = 8 };

struct widen_kernel {
    const uint8_t *codes;
    int64_t codes_row, n, k;
    const void *scales;
    bool powers; /* bytes of exponents, else f32 */
    int64_t scale_row, scale_column;
    void *out;
    quern_dtype dtype;
    int64_t out_row;
    int32_t *status;
};

__device__ __forceinline__ float scale_at(const widen_kernel &a, int64_t n, int64_t k)
{
    const int64_t at = n / WIDEN_BLOCK * a.scale_row + k / WIDEN_BLOCK * a.scale_column;
    if (!a.powers) return ((const float *)a.scales)[at];
    const int byte = ((const uint8_t *)a.scales)[at];
    if (byte == 255) raise_status(a.status, QUERN_STATUS_BAD_SCALE);
    return byte == 255 ? 0.0f : byte > 0 ? __uint_as_float((uint32_t)byte << 23) : 0x1p-127f;
}

__device__ __forceinline__ float value_of(int code)
{
    const float size = (code & 0x7f) == 0x7f ? NAN : e4m3_value(code & 0x7f);
    return code & 0x80 ? -size : size;
}

__global__ void __launch_bounds__(TILE *LINES) widen_tile(const __grid_constant__ widen_kernel a)
{
    __shared__ float tile[TILE][TILE + 1];
    const int64_t n0 = (int64_t)blockIdx.x * TILE, k0 = (int64_t)blockIdx.y * TILE;
    const float scale = scale_at(a, n0, k0);
    for (int i = threadIdx.y; i < TILE; i += LINES)
        if (n0 + i < a.n && k0 + threadIdx.x < a.k)
            tile[i][threadIdx.x] = value_of(a.codes[(n0 + i) * a.codes_row + k0 + threadIdx.x]) * scale;
    __syncthreads();
    for (int i = threadIdx.y; i < TILE; i += LINES) {
        if (k0 + i >= a.k || n0 + threadIdx.x >= a.n) continue;
        const int64_t at = (k0 + i) * a.out_row + n0 + threadIdx.x;
        const float x = tile[threadIdx.x][i];
        if (a.dtype == QUERN_F32) ((float *)a.out)[at] = x;
        else ((bf16 *)a.out)[at] = __float2bfloat16_rn(x);
    }
}

static quern_status run(const stage_exec *exec, const widen_blocks_args *args, void *)
{
    widen_kernel a = {};
    a.codes = (const uint8_t *)args->codes.data;
    a.codes_row = args->codes.strides[0];
    a.n = args->codes.shape[0];
    a.k = args->codes.shape[1];
    a.scales = args->scales.data;
    a.powers = args->scales.dtype != QUERN_F32;
    a.scale_row = args->scales.strides[0];
    a.scale_column = args->scales.strides[1];
    a.out = args->out.data;
    a.dtype = args->out.dtype;
    a.out_row = args->out.strides[0];
    a.status = exec->status;
    if (a.n == 0 || a.k == 0) return QUERN_OK;
    widen_tile<<<dim3(blocks_for(a.n, TILE), blocks_for(a.k, TILE)), dim3(TILE, LINES), 0,
                 (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("widen_blocks");
}

extern const variant<widen_blocks_args> widen_blocks_any = {"widen_blocks_any", NULL, NULL, run};
