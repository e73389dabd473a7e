/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp8.cu - operands of the grouped product in e4m3. A: a warp a row and 128 of K, four values a lane, which
 * are divided by their scale and rounded once. Limit: A read and a byte a value written. B: the largest scale
 * of each of 64 columns, a block a panel. Limit: B's scales read, a ninth of its bytes.
 */
#include "grouped_gemm/fp8.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, EACH = 4 };

void fp8_room(gemm_plan &plan, arena *room)
{
    gemm_params &p = plan.p;
    const int64_t groups = (p.units + 1) / 2, experts = p.ends.experts;
    p.a_stride = groups * FP8_GROUP;
    p.a = arena_take(room, (size_t)(p.tokens * p.a_stride) * sizeof(bf16));
    plan.row_scale =
        (float *)arena_take(room, (size_t)(groups * (p.tokens + 4 * experts + FP8_TILE + 8)) * sizeof(float));
    plan.power = (float *)arena_take(room, (size_t)(experts * p.panels * UNIT) * sizeof(float));
}

fp8_params fp8_params_of(const gemm_plan &plan)
{
    const gemm_params &p = plan.p;
    return {p, plan.row_scale, plan.power, (p.tokens + 3) / 4 * 4 + 4 * (int64_t)p.ends.experts + FP8_TILE,
            (p.units + 1) / 2};
}

struct rows_params {
    int64_t tokens, a_stride, stride, scale_stride;
    int32_t k, groups; /* k: a multiple of 16 */
    const void *a;
    quern_dtype dtype;
    bool wide; /* rows allow loads of four */
    void *out;
    float *scale;
    expert_ends ends;
    int32_t *status;
};

/* Four e4m3 bytes of numbers that the scale has brought into range. */
__device__ __forceinline__ uint32_t e4m3_bytes(const float (&x)[EACH])
{
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        bytes |= ((uint32_t)saturated_e4m3(fabsf(x[i])) | (__float_as_uint(x[i]) >> 24 & 0x80)) << 8 * i;
    return bytes;
}

/* Four lanes' words of 16 values in K's order: what each lane of four has of them in that of fp8.cuh. */
__device__ __forceinline__ uint32_t in_order(uint32_t bytes)
{
    const int lane = threadIdx.x % 32, from = lane / 4 * 4 + lane % 4 / 2;
    const uint32_t low = __shfl_sync(~0u, bytes, from), high = __shfl_sync(~0u, bytes, from + 2);
    return __byte_perm(low, high, lane % 2 == 0 ? 0x1504 : 0x3726);
}

/* Four values of a row; zeros past the last column. */
__device__ __forceinline__ void load_four(float (&x)[EACH], const rows_params &a, int64_t row, int k)
{
    const int64_t at = row * a.a_stride + k;
    if (a.wide && k < a.k) {
        if (a.dtype == QUERN_F32) {
            const float4 v = __ldcs((const float4 *)((const float *)a.a + at));
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
            return;
        }
        const uint2 v = __ldcs((const uint2 *)((const uint16_t *)a.a + at));
        const float2 low = a.dtype == QUERN_BF16 ? unpack2<bf16>(v.x) : unpack2<f16>(v.x),
                     high = a.dtype == QUERN_BF16 ? unpack2<bf16>(v.y) : unpack2<f16>(v.y);
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
        return;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = k < a.k ? load_any(a.a, a.dtype, at + i) : 0.0f;
}

/* A group's four values to what they are in the workspace. */
template <bool BYTES>
__device__ __forceinline__ void round_group(float (&x)[EACH], const rows_params &a, int64_t row, int64_t at,
                                            int group)
{
    const int lane = threadIdx.x % 32, k0 = group * FP8_GROUP + lane * EACH;
    bool bad = false;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (!isfinite(x[i])) {
            bad = true;
            x[i] = 0.0f;
        }
        most = max(most, __float_as_uint(fabsf(x[i])));
    }
    most = __reduce_max_sync(~0u, most);
    if (bad) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
    float scale = __fdiv_rn(__uint_as_float(most), 448.0f);
    if (scale == 0.0f) scale = 1.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = __fdiv_rn(x[i], scale);
    if (lane == 0) a.scale[group * a.scale_stride + at] = scale;
    const uint32_t bytes = e4m3_bytes(x);
    if constexpr (BYTES) {
        *(uint32_t *)((uint8_t *)a.out + row * a.stride + k0) = in_order(bytes);
    } else {
        const uint2 both = make_uint2(e4m3_bf16x2(bytes, 0), e4m3_bf16x2(bytes, 1));
        *(uint2 *)((bf16 *)a.out + row * a.stride + k0) = both;
    }
}

template <bool BYTES>
__global__ void __launch_bounds__(THREADS) fp8_rows(const __grid_constant__ rows_params a)
{
    const int64_t row = blockIdx.x;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t expert = a.ends.expert_of(row);
    if (expert >= a.ends.experts) return;
    const int64_t at = scales_of(a.ends, expert) + row - a.ends.first_of(expert);
    for (int group = warp; group < a.groups; group += WARPS) {
        float x[EACH];
        load_four(x, a, row, group * FP8_GROUP + lane * EACH);
        round_group<BYTES>(x, a, row, at, group);
    }
}

__device__ __forceinline__ float power_of(int byte)
{
    const float least = __fdiv_rn(6.0f * e4m3_value(byte), 448.0f);
    return byte == 0 ? 1.0f : __uint_as_float((__float_as_uint(least) + 0x7fffff) & 0x7f800000);
}

/* The largest bytes of a and b, four at once. */
__device__ __forceinline__ uint32_t largest_of(uint32_t a, uint32_t b)
{
    return __vmaxu4(a, b);
}

/* The largest scales of a panel's columns in repacked weights: each thread has two of them, and one unit in
 * eight. */
__device__ __forceinline__ void largest_repacked(const weight_source &w, int32_t expert, int panel,
                                                 int (*most)[UNIT])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint8_t *from = w.repacked + expert * w.repacked_expert + (int64_t)panel * w.units * UNIT_BYTES +
                          UNIT_CODES + lane * 8;
    uint32_t all = 0;
    for (int unit = warp; unit < w.units; unit += WARPS)
        for (int part = 0; part < 2; part++) {
            const uint8_t *at = from + (int64_t)unit * UNIT_BYTES + part * 4;
            const uint32_t word = at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
            all = largest_of(all, word);
        }
    const int column = lane / 8 * 16 + lane % 8;
    most[warp][column] = max((int)(all & 0xff), (int)(all >> 8 & 0xff));
    most[warp][column + 8] = max((int)(all >> 16 & 0xff), (int)(all >> 24));
}

/* The same in the caller's layout. */
__device__ __forceinline__ void largest_given(const weight_source &w, int32_t expert, int panel,
                                              int (*most)[UNIT])
{
    for (int i = threadIdx.x; i < WARPS * UNIT; i += THREADS) {
        const int part = i / UNIT, column = panel * UNIT + i % UNIT;
        int all = 0;
        for (int block = part; column < w.n && block < w.k / FP4_BLOCK; block += WARPS) {
            const int byte = *scale_place(w, expert, block, column);
            all = is_scale(byte) ? max(all, byte) : all;
        }
        most[part][i % UNIT] = all;
    }
}

__global__ void __launch_bounds__(THREADS) fp8_powers(const __grid_constant__ gemm_params p, float *power)
{
    __shared__ int most[WARPS][UNIT];
    const int32_t expert = blockIdx.x / p.panels, panel = blockIdx.x % p.panels;
    if (p.ends.end_of(expert) <= p.ends.first_of(expert)) return;
    if (p.b.repacked != NULL) largest_repacked(p.b, expert, panel, most);
    else largest_given(p.b, expert, panel, most);
    __syncthreads();
    for (int c = threadIdx.x; c < UNIT; c += THREADS) {
        int all = 0;
        for (int w = 0; w < WARPS; w++) all = max(all, most[w][c]);
        power[((int64_t)expert * p.panels + panel) * UNIT + c] = power_of(all);
    }
}

quern_status fp8_ready(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan,
                       bool bytes)
{
    const fp8_params f = fp8_params_of(plan);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    rows_params a = {};
    a.tokens = args->tokens;
    a.a = args->a.data;
    a.dtype = args->a.dtype;
    a.a_stride = args->a.strides[0];
    a.wide = rows_aligned(args->a, 4 * bytes_of(args->a.dtype));
    a.out = (void *)plan.p.a;
    a.stride = plan.p.a_stride;
    a.scale = plan.row_scale;
    a.scale_stride = f.scale_stride;
    a.k = (int32_t)args->k;
    a.groups = f.groups;
    a.ends = plan.p.ends;
    a.status = exec->status;
    if (f.groups > 0 && bytes) fp8_rows<true><<<(unsigned)args->tokens, THREADS, 0, stream>>>(a);
    if (f.groups > 0 && !bytes) fp8_rows<false><<<(unsigned)args->tokens, THREADS, 0, stream>>>(a);
    const quern_status status = LAUNCHED("grouped_gemm, rows to e4m3");
    const int64_t panels = (int64_t)plan.p.ends.experts * plan.p.panels;
    if (status != QUERN_OK || panels == 0) return status;
    fp8_powers<<<(unsigned)panels, THREADS, 0, stream>>>(plan.p, plan.power);
    return LAUNCHED("grouped_gemm, powers of columns");
}
