/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - what the kernels of the grouped product share: a call as they take it, tiles from
 * offsets on the device, the epilogue.
 *
 * The columns of B, 64 a panel, are the rows of the products, tokens their columns: decoded weights stay in
 * registers. Sums run over K in steps of 16, whatever the number of tokens, so a row's bits depend on nothing
 * but the row.
 *
 * A in f32 is three bf16 numbers a value, whose products follow one another; A in NVFP4 becomes code times
 * scale in bf16, which is exact. Both, and 16-bit rows that the copy engine cannot read, are written to the
 * workspace first (plan.cu).
 */
#ifndef QUERN_CUDA_GROUPED_GEMM_PARAMS_CUH
#define QUERN_CUDA_GROUPED_GEMM_PARAMS_CUH

#include "grouped_gemm/weights.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "common/swiglu.cuh"

enum { GEMM_MOST_EXPERTS = 1024, SWIGLU_RUN = 8 };

struct gemm_params {
    int64_t tokens;
    expert_ends ends;
    weight_source b;
    /* The product sums over `units` of 64 and has `panels` of 64 columns, of which `width` are real: K and N
     * of B, or under `transposed` N and K. */
    int32_t units, panels, width;
    bool transposed;
    const void *a; /* [tokens][a_stride], bf16 or f16; `parts` of them, each units * 64 columns, for f32 */
    int64_t a_stride;
    int32_t parts;
    const float *a_global, *b_global; /* NULL: 1 */
    int64_t a_global_stride, b_global_expert;
    quantise_global a_per;
    int32_t b_parts; /* 2: gate and up have globals of their own, by runs of */
    int32_t run;
    bool b_larger; /* the larger of the two counts for all columns */
    const void *bias;
    quern_dtype bias_dtype;
    int64_t bias_stride;
    bool swiglu; /* of runs of SWIGLU_RUN */
    swiglu_rule rule;
    void *c;
    quern_dtype c_dtype;
    int64_t c_stride;
    bool c_wide; /* rows of c allow 16-byte stores */
};

/* A tile is TOKENS rows of an expert and PANELS panels. Tiles of PANELS panels come first, then each expert's
 * tiles of fewer: those take less time, so that blocks end together. first: the first whole tile of each
 * expert. All threads of a block call. */
struct tile_list {
    int32_t first[GEMM_MOST_EXPERTS + 1];
    int32_t end[GEMM_MOST_EXPERTS]; /* of experts' rows, where there are offsets */
    int32_t across, whole, count;   /* whole tiles side by side; all whole ones; all tiles */
    int32_t panels, rest;           /* of whole tiles, and of those of fewer */

    __device__ __forceinline__ int64_t end_of(const gemm_params &p, int32_t e) const
    {
        return p.ends.end != NULL ? end[e] : p.ends.rows;
    }
    __device__ __forceinline__ int64_t first_of(const gemm_params &p, int32_t e) const
    {
        return e > 0 ? end_of(p, e - 1) : 0;
    }
};

/* Offsets are loaded by all threads at once: a load takes longer than all else here. */
__device__ __forceinline__ void load_ends(tile_list &list, const gemm_params &p)
{
    if (p.ends.end != NULL)
        for (int32_t e = threadIdx.x; e < p.ends.experts; e += blockDim.x) {
            const int32_t own = __ldg(p.ends.end + e);
            list.end[e] = own < 0 ? 0 : own > p.ends.rows ? (int32_t)p.ends.rows : own;
            if (list.end[e] != own && blockIdx.x == 0) raise_status(p.b.status, QUERN_STATUS_BAD_OFFSETS);
        }
    __syncthreads();
}

/* `all` panels, `panels` of them a tile. A lane has experts that follow one another. */
__device__ __forceinline__ void make_tiles(tile_list &list, const gemm_params &p, int tokens, int all,
                                           int panels)
{
    load_ends(list, p);
    if (threadIdx.x < 32) {
        const int32_t lane = threadIdx.x, each = (p.ends.experts + 31) / 32, e0 = lane * each,
                      e1 = min(e0 + each, p.ends.experts), across = max(all / panels, 1);
        int32_t own = 0;
        for (int32_t e = e0; e < e1; e++) {
            const int64_t rows = list.end_of(p, e) - list.first_of(p, e);
            if (rows < 0 && blockIdx.x == 0) raise_status(p.b.status, QUERN_STATUS_BAD_OFFSETS);
            list.first[e] = own;
            own += rows > 0 ? (int32_t)((rows + tokens - 1) / tokens) * across : 0;
        }
        int32_t sum = own;
        for (int delta = 1; delta < 32; delta *= 2) {
            const int32_t lower = __shfl_up_sync(~0u, sum, delta);
            if (lane >= delta) sum += lower;
        }
        for (int32_t e = e0; e < e1; e++) list.first[e] += sum - own;
        if (lane == 31) {
            list.first[p.ends.experts] = sum;
            list.across = across;
            list.whole = sum;
            list.panels = min(all, panels);
            list.rest = all - across * panels;
            list.count = all > across * panels ? sum / across * (across + 1) : sum;
        }
    }
    __syncthreads();
}

struct tile_place {
    int32_t expert, panel, rows; /* rows: of the expert from row0 on */
    int64_t row0;
};
__device__ __forceinline__ tile_place tile_at(const tile_list &list, const gemm_params &p, int32_t tile,
                                              int tokens, int panels)
{
    const int32_t whole = list.whole, across = list.across,
                  at = tile < whole ? tile : (tile - whole) * across;
    int32_t low = 0, high = p.ends.experts;
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        if (list.first[middle] <= at) low = middle;
        else high = middle;
    }
    const int64_t first = list.first_of(p, low), rows = list.end_of(p, low) - first;
    const int32_t down = (int32_t)((rows + tokens - 1) / tokens), in = at - list.first[low];
    const int32_t part = tile < whole ? in % down : in / across, column = tile < whole ? in / down : across;
    return {low, column * panels, (int32_t)(rows - (int64_t)part * tokens), first + (int64_t)part * tokens};
}

/* The tile that a block takes after `tile`: blocks take turns. But of pairs of panels, tiles of one take half
 * as long: the first of these go to the blocks that have a pair less than others, two each. */
__device__ __forceinline__ int32_t next_tile(const tile_list &list, int32_t tile, bool pairs)
{
    const int32_t next = tile + (int32_t)gridDim.x, whole = list.whole,
                  idle = (int32_t)gridDim.x - whole % (int32_t)gridDim.x;
    if (!pairs || next < whole) return next;
    if (tile < whole) return next + (next - whole < idle ? 0 : idle);
    return tile - whole < idle ? tile + idle : next;
}

/* Whether a tile has a panel of its number `number`. */
__device__ __forceinline__ bool has_panel(const tile_list &list, int32_t tile, int number)
{
    return number < (tile < list.whole ? list.panels : list.rest);
}

/* Where warps that multiply begin: with a tile of no rows, before the first one. Until tokens come they have
 * nothing to do, and storing no rows brings code that runs once a tile nearer than memory. */
__device__ __forceinline__ int32_t before_first(int32_t tiles)
{
    return (int32_t)blockIdx.x < tiles ? (int32_t)blockIdx.x - (int32_t)gridDim.x : tiles;
}
__device__ __forceinline__ tile_place tile_or_empty(const tile_list &list, const gemm_params &p, int32_t tile,
                                                    int tokens, int panels)
{
    tile_place t = tile_at(list, p, tile >= 0 ? tile : (int32_t)blockIdx.x, tokens, panels);
    if (tile < 0) t.rows = 0;
    return t;
}

__device__ __forceinline__ float load_any(const void *p, quern_dtype dtype, int64_t at)
{
    return dtype == QUERN_F32    ? ((const float *)p)[at]
           : dtype == QUERN_BF16 ? to_float(((const bf16 *)p)[at])
                                 : to_float(((const f16 *)p)[at]);
}

__device__ __forceinline__ void store_any(void *p, quern_dtype dtype, int64_t at, float x)
{
    if (dtype == QUERN_F32) ((float *)p)[at] = x;
    else if (dtype == QUERN_BF16) ((bf16 *)p)[at] = from_float<bf16>(x);
    else ((f16 *)p)[at] = from_float<f16>(x);
}

/* A global; 0 where it is none. */
__device__ __forceinline__ float checked_global(const gemm_params &p, float g)
{
    if (!is_global(g)) raise_status(p.b.status, QUERN_STATUS_BAD_GLOBAL);
    return is_global(g) ? g : 0.0f;
}

/* A's global of a row. */
__device__ __forceinline__ float a_global_of(const gemm_params &p, int32_t expert, int64_t row)
{
    if (p.a_global == NULL) return 1.0f;
    const int64_t at = p.a_per == QUANTISE_GLOBAL_ROW ? row : p.a_per == QUANTISE_GLOBAL_EXPERT ? expert : 0;
    return checked_global(p, __ldg(p.a_global + at * p.a_global_stride));
}

/* B's global and the bias of a column. */
struct column_terms {
    float global, bias;
};
__device__ __forceinline__ column_terms column_terms_of(const gemm_params &p, int32_t expert, int column)
{
    column_terms t = {1.0f, 0.0f};
    if (column >= p.width) return t;
    if (p.b_global != NULL) {
        const float *of = p.b_global + expert * p.b_global_expert;
        const bool two = p.b_parts == 2;
        t.global = checked_global(p, __ldg(of + (two && !p.b_larger ? column / p.run % 2 : 0)));
        if (two && p.b_larger) t.global = fmaxf(t.global, checked_global(p, __ldg(of + 1)));
    }
    if (p.bias != NULL) t.bias = load_any(p.bias, p.bias_dtype, expert * p.bias_stride + column);
    return t;
}

/* A sum times the factors of its operands. */
__device__ __forceinline__ float scaled(float sum, float unit, float a_global, float b_global)
{
    return __fmul_rn(__fmul_rn(sum, unit), __fmul_rn(a_global, b_global));
}

/* A sum's result, before SwiGLU. */
__device__ __forceinline__ float finished(const gemm_params &p, float sum, float unit, float a_global,
                                          const column_terms &t)
{
    const float x = scaled(sum, unit, a_global, t.global);
    return p.bias != NULL ? __fadd_rn(x, t.bias) : x;
}

/* Zeros in the rows past the last expert's; all threads of a grid call. */
__device__ __forceinline__ void finish_tail(const tile_list &list, const gemm_params &p)
{
    const int64_t first = list.end_of(p, p.ends.experts - 1), width = p.swiglu ? p.width / 2 : p.width;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < (p.tokens - first) * width;
         i += (int64_t)gridDim.x * blockDim.x)
        store_any(p.c, p.c_dtype, (first + i / width) * p.c_stride + i % width, 0.0f);
}

/* How a call is run: whether A is converted first, and whether the product or stages behind it write C. */
struct gemm_plan {
    gemm_params p;
    bool f16_product; /* else bf16 */
    bool ready;       /* A is written to the workspace first */
    float
        *h; /* [tokens, n]: results in f32 that go on to C's old values, SwiGLU or quantisation; NULL: none */
    /* Of e4m3 operands (fp8.cuh). */
    float *row_scale, *power;
    float *act; /* [tokens, n / 2]: SwiGLU in f32 that quantisation takes; NULL: none */
    size_t bytes;
};

/* `direct`: whether the kernel reads 16-bit rows as they are, which then have this alignment. */
gemm_plan gemm_plan_of(const stage_exec *exec, const grouped_gemm_args *args, int64_t alignment,
                       void *workspace);
/* Takes workspace for e4m3 operands, and sets p.a and its stride. */
void fp8_room(gemm_plan &plan, arena *room);
bool gemm_takes(const grouped_gemm_args *args, char why[STAGE_WHY_BYTES]);
/* The launches before the product, and behind it. */
quern_status gemm_ready(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan);
quern_status gemm_finish(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan);

#endif
