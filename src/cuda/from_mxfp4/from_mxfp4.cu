/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * from_mxfp4.cu - MXFP4 to NVFP4 with one global: a pass finds the largest exponent of a nonzero block, then
 * one converts, a thread a block of 32 codes (16 bytes). Blocks within 17 binades of the largest keep their
 * codes. A block whose exponent with its codes is beyond f32 becomes zeros. Limit: codes read twice, written
 * once.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

extern "C" {
#include "core/mxfp4.h"
}

enum { THREADS = 256 };

struct mx_params {
    rows_view in, exponents, codes, scales;
    int64_t rows, blocks;
    bool wide_in, wide_out;
    /* 1 + the largest exponent byte, 0: there is none. Stands where the global goes at the end. */
    int32_t *largest;
    int64_t *rounded;
    int32_t *status;
};

struct mx_codes {
    uint32_t w[4];
};

__device__ __forceinline__ mx_codes load_codes(const mx_params &a, int64_t row, int64_t block)
{
    const uint8_t *p = a.in.row<const uint8_t>(row) + block * MX_BYTES;
    mx_codes c = {};
    if (a.wide_in) {
        const uint4 raw = __ldg((const uint4 *)p);
        c = {{raw.x, raw.y, raw.z, raw.w}};
    } else {
#pragma unroll
        for (int i = 0; i < MX_BYTES; i++) c.w[i / 4] |= (uint32_t)p[i] << i % 4 * 8;
    }
    return c;
}

__device__ __forceinline__ bool is_zero(const mx_codes &c)
{
    return ((c.w[0] | c.w[1] | c.w[2] | c.w[3]) & 0x77777777) == 0;
}

/* 0xFF is NaN; values of 2^128 and more are beyond f32. */
__device__ __forceinline__ bool is_bad(const mx_codes &c, int exponent)
{
    if (exponent < 0xfd) return false;
    bool bad = exponent == 0xff;
#pragma unroll
    for (int i = 0; i < MX_BLOCK; i++)
        bad = bad || (int)(c.w[i / 8] >> i % 8 * 4 & 7) >= (exponent == 0xfd ? 6 : 4);
    return bad;
}

/* The magnitude m * 2^-down as a code, ties to even. */
__device__ __forceinline__ uint32_t lowered(uint32_t code, int down)
{
    const uint32_t table[5] = {0x54322100, 0x32211000, 0x21100000, 0x10000000, 0};
    return (table[min(down, 5) - 1] >> (code & 7) * 4 & 7) | (code & 8);
}

__global__ void __launch_bounds__(THREADS) mx_scan(const __grid_constant__ mx_params a)
{
    int32_t most = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < a.rows * a.blocks;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t row = i / a.blocks, block = i - row * a.blocks;
        const int exponent = a.exponents.row<const uint8_t>(row)[block];
        const mx_codes c = load_codes(a, row, block);
        if (!is_zero(c) && !is_bad(c, exponent)) most = max(most, exponent + 1);
    }
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0 && most > 0) atomicMax(a.largest, most);
}

__global__ void __launch_bounds__(THREADS) mx_convert(const __grid_constant__ mx_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int largest = *a.largest - 1;
    bool changed = false;
    if (i < a.rows * a.blocks) {
        const int64_t row = i / a.blocks, block = i - row * a.blocks;
        const int exponent = a.exponents.row<const uint8_t>(row)[block],
                  power = exponent - largest + MX_LARGEST_POWER;
        mx_codes c = load_codes(a, row, block);
        if (is_bad(c, exponent)) {
            raise_status(a.status, QUERN_STATUS_BAD_SCALE);
            c = {};
        }
        int scale = 0;
        if (!is_zero(c)) {
            scale = power < MX_LEAST_POWER ? 1 : power >= -6 ? (power + 7) * 8 : 1 << (power + 9);
            changed = power < MX_LEAST_POWER;
#pragma unroll
            for (int n = 0; n < MX_BLOCK; n++) {
                if (!changed) break;
                const uint32_t code = c.w[n / 8] >> n % 8 * 4 & 15;
                c.w[n / 8] ^= (code ^ lowered(code, MX_LEAST_POWER - power)) << n % 8 * 4;
            }
        }
        uint8_t *to = a.codes.row<uint8_t>(row) + block * MX_BYTES,
                *scales = a.scales.row<uint8_t>(row) + 2 * block;
        if (a.wide_out) *(uint4 *)to = make_uint4(c.w[0], c.w[1], c.w[2], c.w[3]);
        else
            for (int b = 0; b < MX_BYTES; b++) to[b] = (uint8_t)(c.w[b / 4] >> b % 4 * 8);
        scales[0] = scales[1] = (uint8_t)scale;
    }
    const unsigned many = __ballot_sync(~0u, changed);
    if (a.rounded != NULL && many != 0 && threadIdx.x % 32 == 0)
        atomicAdd((unsigned long long *)a.rounded, (unsigned long long)__popc(many));
}

__global__ void mx_global(int32_t *at)
{
    const int largest = *at - 1;
    *(float *)at = largest < 0 ? 1.0f : scalbnf(1.0f, largest - MX_BIAS - MX_LARGEST_POWER);
}

static quern_status from_mxfp4_any_run(const stage_exec *exec, const from_mxfp4_args *args, void *)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    mx_params a = {};
    a.in = rows_view_of(args->codes_in);
    a.exponents = rows_view_of(args->exponents);
    a.codes = rows_view_of(args->codes);
    a.scales = rows_view_of(args->scales);
    a.rows = rows_of(args->exponents);
    a.blocks = columns_of(args->exponents);
    a.wide_in = rows_aligned(args->codes_in, 16);
    a.wide_out = rows_aligned(args->codes, 16);
    a.largest = (int32_t *)args->global.data;
    a.status = exec->status;
    a.rounded = present(args->rounded_blocks) ? (int64_t *)args->rounded_blocks.data : NULL;
    cudaError_t code = cudaMemsetAsync(a.largest, 0, sizeof *a.largest, stream);
    if (code == cudaSuccess && a.rounded != NULL)
        code = cudaMemsetAsync(a.rounded, 0, sizeof *a.rounded, stream);
    if (code != cudaSuccess) return cuda_report(code, "from_mxfp4, clearing");
    const int64_t n = a.rows * a.blocks;
    const unsigned grid = blocks_for(n > 0 ? n : 1, THREADS), most = (unsigned)exec->multiprocessors * 8,
                   fewer = grid < most ? grid : most;
    mx_scan<<<fewer, THREADS, 0, stream>>>(a);
    mx_convert<<<grid, THREADS, 0, stream>>>(a);
    mx_global<<<1, 1, 0, stream>>>(a.largest);
    return LAUNCHED("from_mxfp4");
}

extern const variant<from_mxfp4_args> from_mxfp4_any = {"from_mxfp4_any", NULL, NULL, from_mxfp4_any_run};
