/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp8.cu - operands of the grouped product in e4m3. A: two warps a row, half a warp 128 of K, eight values a
 * lane, which are divided by their scale and rounded once. Limit: A read and a byte a value written. B: the
 * largest scale of each of 64 columns, a block a panel. Limit: B's scales read, a ninth of its bytes.
 */
#include "common/quotient.cuh"
#include "grouped_gemm/fp8.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, EACH = 8, LANES = FP8_GROUP / EACH, ROWS = 4 /* a block */ };

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
    bool wide; /* rows allow loads of 16 bytes */
    void *out;
    float *scale;
    expert_ends ends;
    int32_t *status;
};

/* The e4m3 bytes of eight numbers that the scale has brought into range. */
__device__ __forceinline__ uint2 e4m3_bytes(const float (&x)[EACH])
{
    uint32_t bytes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < EACH; i += 2) bytes[i / 4] |= (uint32_t)two_e4m3(x[i], x[i + 1]) << i % 4 * 8;
    return make_uint2(bytes[0], bytes[1]);
}

/* The two halves of 16 values in K's order, of two neighbouring lanes: what each has of them in that of
 * fp8.cuh. */
__device__ __forceinline__ uint2 in_order(uint2 bytes)
{
    const bool second = threadIdx.x % 2 != 0;
    const uint32_t other = __shfl_xor_sync(~0u, second ? bytes.x : bytes.y, 1),
                   low = second ? other : bytes.x, high = second ? bytes.y : other;
    return make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
}

/* Eight values of a row; zeros past the last column. */
template <typename T>
__device__ __forceinline__ void load_eight(float (&x)[EACH], const rows_params &a, int64_t row, int k)
{
    const T *from = (const T *)a.a + row * a.a_stride + k;
    alignas(16) T raw[EACH];
    if (a.wide && k < a.k) {
#pragma unroll
        for (unsigned i = 0; i < sizeof raw / sizeof(uint4); i++)
            ((uint4 *)raw)[i] = __ldcs((const uint4 *)from + i);
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) raw[i] = k < a.k ? from[i] : from_float<T>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = to_float<T>(raw[i]);
}

/* The bits of the largest magnitude of a group. */
__device__ __forceinline__ uint32_t largest_of(const float (&x)[EACH])
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) most = max(most, __float_as_uint(fabsf(x[i])));
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) most = max(most, __shfl_xor_sync(~0u, most, mask));
    return most;
}

/* A group's eight values to what they are in the workspace. */
template <bool BYTES>
__device__ __forceinline__ void round_group(float (&x)[EACH], const rows_params &a, int64_t row, int64_t at,
                                            int group)
{
    const int lane = threadIdx.x % LANES, k0 = group * FP8_GROUP + lane * EACH;
    uint32_t most = largest_of(x);
    if (__any_sync(~0u, most >= INFINITE_BITS)) {
        if (most >= INFINITE_BITS) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = isfinite(x[i]) ? x[i] : 0.0f;
        most = largest_of(x);
    }
    float scale = __fdiv_rn(__uint_as_float(most), 448.0f);
    if (scale == 0.0f) scale = 1.0f;
    divide_all(x, scale);
    const uint2 bytes = e4m3_bytes(x), ordered = BYTES ? in_order(bytes) : bytes;
    if (group >= a.groups) return;
    if (lane == 0) a.scale[group * a.scale_stride + at] = scale;
    if constexpr (BYTES) *(uint2 *)((uint8_t *)a.out + row * a.stride + k0) = ordered;
    else
        *(uint4 *)((bf16 *)a.out + row * a.stride + k0) =
            make_uint4(e4m3_bf16x2(bytes.x, 0), e4m3_bf16x2(bytes.x, 1), e4m3_bf16x2(bytes.y, 0),
                       e4m3_bf16x2(bytes.y, 1));
}

template <typename T, bool BYTES>
__global__ void __launch_bounds__(THREADS) fp8_rows(const __grid_constant__ rows_params a)
{
    enum { EACH_ROW = THREADS / ROWS, AT_ONCE = EACH_ROW / LANES };
    const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / EACH_ROW;
    let_next_start();
    if (row >= a.tokens) return;
    const int32_t expert = a.ends.expert_of(row);
    if (expert >= a.ends.experts) return;
    const int64_t at = scales_of(a.ends, expert) + row - a.ends.first_of(expert);
    const int half = threadIdx.x % EACH_ROW / LANES;
    /* All of a warp go the same way; the second half may have no group left. */
    for (int group = half; group - half % 2 < a.groups; group += AT_ONCE) {
        float x[EACH];
        load_eight<T>(x, a, row, group * FP8_GROUP + threadIdx.x % LANES * EACH);
        round_group<BYTES>(x, a, row, at, group);
    }
}

__device__ __forceinline__ float power_of(int byte)
{
    const float least = __fdiv_rn(6.0f * e4m3_value(byte), 448.0f);
    return byte == 0 ? 1.0f : __uint_as_float((__float_as_uint(least) + 0x7fffff) & 0x7f800000);
}

__device__ __forceinline__ uint32_t word_at(const uint8_t *at)
{
    return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24;
}

/* The largest scales of a panel's columns in repacked weights: each thread has two of them, and one unit in
 * eight. */
__device__ __forceinline__ void largest_repacked(const weight_source &w, int32_t expert, int panel,
                                                 int (*most)[UNIT])
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint8_t *from = w.repacked + expert * w.repacked_expert + (int64_t)panel * w.units * UNIT_BYTES +
                          UNIT_CODES + lane * 8;
    const bool wide = (uintptr_t)from % 8 == 0;
    uint32_t all = 0;
#pragma unroll 4
    for (int unit = warp; unit < w.units; unit += WARPS) {
        const uint8_t *at = from + (int64_t)unit * UNIT_BYTES;
        const uint2 both = wide ? __ldg((const uint2 *)at) : make_uint2(word_at(at), word_at(at + 4));
        all = __vmaxu4(all, __vmaxu4(both.x, both.y));
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

/* A block has a panel of an expert. It ends once the rows are rounded, too: the product waits for it. */
__global__ void __launch_bounds__(THREADS) fp8_powers(const __grid_constant__ gemm_params p, float *power)
{
    __shared__ int most[WARPS][UNIT];
    const int32_t expert = blockIdx.x / p.panels, panel = blockIdx.x % p.panels;
    let_next_start();
    if (p.ends.end_of(expert) <= p.ends.first_of(expert)) {
        wait_for_before();
        return;
    }
    if (p.b.repacked != NULL) largest_repacked(p.b, expert, panel, most);
    else largest_given(p.b, expert, panel, most);
    __syncthreads();
    for (int c = threadIdx.x; c < UNIT; c += THREADS) {
        int all = 0;
        for (int w = 0; w < WARPS; w++) all = max(all, most[w][c]);
        power[((int64_t)expert * p.panels + panel) * UNIT + c] = power_of(all);
    }
    wait_for_before();
}

template <typename T> static quern_status round_rows(const rows_params &a, bool bytes, cudaStream_t stream)
{
    const unsigned grid = blocks_for(a.tokens, ROWS);
    if (bytes) fp8_rows<T, true><<<grid, THREADS, 0, stream>>>(a);
    else fp8_rows<T, false><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("grouped_gemm, rows to e4m3");
}

quern_status fp8_ready(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan,
                       bool bytes)
{
    const fp8_params f = fp8_params_of(plan);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    rows_params a = {};
    a.tokens = args->tokens;
    a.a = args->a.data;
    a.a_stride = args->a.strides[0];
    a.wide = rows_aligned(args->a, 16);
    a.out = (void *)plan.p.a;
    a.stride = plan.p.a_stride;
    a.scale = plan.row_scale;
    a.scale_stride = f.scale_stride;
    a.k = (int32_t)args->k;
    a.groups = f.groups;
    a.ends = plan.p.ends;
    a.status = exec->status;
    const int64_t panels = (int64_t)plan.p.ends.experts * plan.p.panels;
    if (args->tokens == 0 || panels == 0) return QUERN_OK;
    /* Of K 0 there are no rows to round, but the epilogue still multiplies by powers. */
    const quern_status status = f.groups == 0                 ? QUERN_OK
                                : args->a.dtype == QUERN_F32  ? round_rows<float>(a, bytes, stream)
                                : args->a.dtype == QUERN_BF16 ? round_rows<bf16>(a, bytes, stream)
                                                              : round_rows<f16>(a, bytes, stream);
    if (status != QUERN_OK) return status;
    if (f.groups > 0)
        return launch_behind(stream, fp8_powers, dim3((unsigned)panels), THREADS, 0,
                             "grouped_gemm, powers of columns", plan.p, plan.power);
    fp8_powers<<<(unsigned)panels, THREADS, 0, stream>>>(plan.p, plan.power);
    return LAUNCHED("grouped_gemm, powers of columns");
}
