/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fp8.cu - operands of the grouped product in e4m3, both in one launch: blocks that wait for B's bytes run
 * beside blocks that compute. B: the largest scale of each of 64 columns, a block a panel. Limit: B's scales
 * read, a ninth of its bytes. A: eight lanes 128 of K of some rows, 16 values of each a lane, all loaded at
 * once, which are divided by their scale and rounded once. Limit: A read and a byte a value written.
 */
#include "common/quotient.cuh"
#include "grouped_gemm/fp8.cuh"

enum {
    THREADS = 256,
    BLOCKS = 4, /* of a multiprocessor: 64 registers a thread */
    WARPS = THREADS / 32,
    EACH = 16, /* values of a lane and row */
    LANES = FP8_GROUP / EACH,
    RUNS = THREADS / LANES, /* of a block: a group of some rows each */
    MOST_ROWS = 4           /* of a run */
};

/* Of a group. A tile's copy may reach past the last row's. */
static int64_t scale_places(const gemm_params &p)
{
    return (p.tokens + 15) / 16 * 16 + 16 * (int64_t)p.ends.experts + FP8_TILE;
}

void fp8_room(gemm_plan &plan, arena *room)
{
    gemm_params &p = plan.p;
    const int64_t groups = (p.units + 1) / 2, experts = p.ends.experts;
    p.a_stride = groups * FP8_GROUP;
    p.a = arena_take(room, (size_t)(p.tokens * p.a_stride) * sizeof(bf16));
    const int64_t scales = groups * scale_places(p);
    plan.row_scale = (float *)arena_take(room, (size_t)scales * sizeof(float));
    plan.power = (float *)arena_take(room, (size_t)(experts * p.panels * UNIT) * sizeof(float));
}

fp8_params fp8_params_of(const gemm_plan &plan)
{
    const gemm_params &p = plan.p;
    return {p, plan.row_scale, plan.power, scale_places(p), (p.units + 1) / 2};
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

/* The e4m3 bytes of a lane's numbers, which the scale has brought into range, in fp8.cuh's order of 16. */
__device__ __forceinline__ uint4 ordered_bytes(const float (&x)[EACH])
{
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = two_e4m3(x[2 * i], x[2 * i + 8]) | (uint32_t)two_e4m3(x[2 * i + 1], x[2 * i + 9]) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Eight of them, from `first` on, as bf16 numbers in K's order. */
__device__ __forceinline__ uint4 rounded_bf16(const float (&x)[EACH], int first)
{
    uint32_t bytes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i += 2)
        bytes[i / 4] |= (uint32_t)two_e4m3(x[first + i], x[first + i + 1]) << i % 4 * 8;
    return make_uint4(e4m3_bf16x2(bytes[0], 0), e4m3_bf16x2(bytes[0], 1), e4m3_bf16x2(bytes[1], 0),
                      e4m3_bf16x2(bytes[1], 1));
}

/* A lane's values of a row as they are stored; zeros past the last column. */
template <typename T> struct lane_values {
    alignas(16) T value[EACH];

    __device__ __forceinline__ void load(const rows_params &a, int64_t row, int k)
    {
        const T *from = (const T *)a.a + row * a.a_stride + k;
        if (a.wide && k < a.k) {
#pragma unroll
            for (unsigned i = 0; i < sizeof value / sizeof(uint4); i++)
                ((uint4 *)value)[i] = __ldcs((const uint4 *)from + i);
        } else {
#pragma unroll
            for (int i = 0; i < EACH; i++) value[i] = k < a.k ? from[i] : from_float<T>(0.0f);
        }
    }
    __device__ __forceinline__ void numbers(float (&x)[EACH]) const
    {
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            float2 two;
            if constexpr (sizeof(T) == 2) two = unpack2<T>(((const uint32_t *)value)[i / 2]);
            else two = make_float2(value[i], value[i + 1]);
            x[i] = two.x, x[i + 1] = two.y;
        }
    }
};

/* Of magnitudes; NaN where one is. */
__device__ __forceinline__ float larger(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(fabsf(x)), "f"(fabsf(y)));
    return z;
}

/* The largest magnitude of a group, likewise. */
__device__ __forceinline__ float largest_of(const float (&x)[EACH])
{
    float most = larger(x[0], x[1]);
#pragma unroll
    for (int i = 2; i < EACH; i++) most = larger(most, x[i]);
#pragma unroll
    for (int mask = LANES / 2; mask > 0; mask /= 2) most = larger(most, __shfl_xor_sync(~0u, most, mask));
    return most;
}

/* A lane's values of a group to what they are in the workspace; `place`: of the row's scales, below 0 where
 * no expert has the row. All lanes of a warp call this. */
template <typename T, bool BYTES>
__device__ __forceinline__ void round_group(float (&x)[EACH], const rows_params &a, int64_t row,
                                            int64_t place, uint32_t group)
{
    const uint32_t lane = threadIdx.x % LANES, k0 = group * FP8_GROUP + lane * EACH;
    float most = largest_of(x);
    if (__any_sync(~0u, !isfinite(most))) {
        if (place >= 0 && !isfinite(most)) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = isfinite(x[i]) ? x[i] : 0.0f;
        most = largest_of(x);
    }
    const float scale = sizeof(T) == 2 ? divide_16_bits(x, most) : divide_by_largest(x, most);
    if (place < 0) return;
    if (lane == 0) a.scale[group * a.scale_stride + place] = scale;
    if constexpr (BYTES) *(uint4 *)((uint8_t *)a.out + row * a.stride + k0) = ordered_bytes(x);
    else {
        uint4 *out = (uint4 *)((bf16 *)a.out + row * a.stride + k0);
        out[0] = rounded_bf16(x, 0);
        out[1] = rounded_bf16(x, 8);
    }
}

/* Rows that a lane has a piece of, all loaded before any is rounded. */
template <typename T> constexpr int rows_at_once()
{
    return sizeof(T) == 2 ? MOST_ROWS : 1;
}

/* Groups, each of as many rows. */
template <typename T> __host__ __device__ __forceinline__ uint32_t runs_of(const rows_params &a)
{
    return (uint32_t)((a.tokens + rows_at_once<T>() - 1) / rows_at_once<T>() * a.groups);
}

/* Runs from RUNS * block on; one past the last is the last. `places`: of the rows' scales, sought once for a
 * block while values come. */
template <typename T, bool BYTES>
__device__ __forceinline__ void round_rows(const rows_params &a, uint32_t block, int64_t *places)
{
    enum { ROWS = rows_at_once<T>() };
    const uint32_t groups = (uint32_t)a.groups, last = runs_of<T>(a) - 1,
                   run = min(block * RUNS + threadIdx.x / LANES, last), group = run % groups;
    const int64_t first = (int64_t)(block * RUNS / groups) * ROWS, row0 = (int64_t)(run / groups) * ROWS;
    lane_values<T> values[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        values[i].load(a, min(row0 + i, a.tokens - 1), (int)(group * FP8_GROUP + threadIdx.x % LANES * EACH));
    const int64_t row = first + threadIdx.x;
    if (threadIdx.x < ROWS * RUNS && row < a.tokens) {
        const int32_t expert = a.ends.expert_of(row);
        places[threadIdx.x] =
            expert < a.ends.experts ? scale_place_of(a.ends, expert, row - a.ends.first_of(expert)) : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int64_t row = min(row0 + i, a.tokens - 1);
        float x[EACH];
        values[i].numbers(x);
        round_group<T, BYTES>(x, a, row, places[row - first], group);
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
#pragma unroll 8
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

/* A block has a panel of an expert. */
__device__ __forceinline__ void find_powers(const gemm_params &p, int64_t block, int (*most)[UNIT],
                                            float *power)
{
    const int32_t expert = (int32_t)(block / p.panels), panel = (int32_t)(block % p.panels);
    if (p.ends.end_of(expert) <= p.ends.first_of(expert)) return;
    if (p.b.repacked != NULL) largest_repacked(p.b, expert, panel, most);
    else largest_given(p.b, expert, panel, most);
    __syncthreads();
    for (int c = threadIdx.x; c < UNIT; c += THREADS) {
        int all = 0;
        for (int w = 0; w < WARPS; w++) all = max(all, most[w][c]);
        power[block * UNIT + c] = power_of(all);
    }
}

/* One block in 2^`shift` has one of B's `panels`, while there are any; all others have rows of A. */
template <typename T, bool BYTES>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    fp8_operands(const __grid_constant__ rows_params a, const __grid_constant__ gemm_params p,
                 uint32_t panels, int shift, float *power)
{
    __shared__ union {
        int most[WARPS][UNIT];
        int64_t places[RUNS * MOST_ROWS];
    } m;
    const uint32_t block = blockIdx.x, own = block >> shift;
    let_next_start();
    if (block == own << shift && own < panels) find_powers(p, own, m.most, power);
    else round_rows<T, BYTES>(a, block - min(panels, own + 1), m.places);
}

template <typename T>
static quern_status launch_operands(const rows_params &a, const gemm_plan &plan, bool bytes,
                                    cudaStream_t stream)
{
    const gemm_params &p = plan.p;
    const uint32_t panels = (uint32_t)p.ends.experts * (uint32_t)p.panels;
    /* Of K 0 there are no rows to round, but the epilogue still multiplies by powers. */
    const unsigned grid = panels + (a.groups > 0 ? blocks_for(runs_of<T>(a), (int)RUNS) : 0);
    int shift = 0;
    while (grid >> (shift + 1) >= panels) shift++;
    if (bytes) fp8_operands<T, true><<<grid, THREADS, 0, stream>>>(a, p, panels, shift, plan.power);
    else fp8_operands<T, false><<<grid, THREADS, 0, stream>>>(a, p, panels, shift, plan.power);
    return LAUNCHED("grouped_gemm, operands in e4m3");
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
    if (args->tokens == 0 || plan.p.ends.experts == 0 || plan.p.panels == 0) return QUERN_OK;
    return args->a.dtype == QUERN_F32    ? launch_operands<float>(a, plan, bytes, stream)
           : args->a.dtype == QUERN_BF16 ? launch_operands<bf16>(a, plan, bytes, stream)
                                         : launch_operands<f16>(a, plan, bytes, stream);
}
