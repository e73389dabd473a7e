/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.cu - the gradient of the grouped product's A: d_a = (d_c G_B) B^T G_A, through the weights as they
 * are stored.
 *
 * d_c becomes bf16 rows in the workspace, in f32 and f16 as three parts, each column by its global's ratio to
 * the larger of gate's and up's; the larger multiplies the sums. A block of four warps owns 64 of K and 64
 * tokens of an expert and walks the panels of N: it decodes a unit, 64 columns by 64 of K, into shared memory
 * with N along the rows, and multiplies by mma. A row's sums run over N in order. Limit: the tensor cores;
 * decoding is repeated for each 64 tokens.
 */
#include "grouped_gemm/any/kernel.cuh"
#include "grouped_gemm/backward/params.cuh"
#include "variants.cuh"

using namespace any_gemm;

enum { READY_THREADS = 256 };

__device__ __forceinline__ float b_global_of(const backward_params &a, int32_t expert, int part)
{
    if (a.b_global == NULL) return 1.0f;
    return a.b_global[expert * a.b_global_expert + (a.b_parts == 2 ? part : 0)];
}

__device__ __forceinline__ float larger_global(const backward_params &a, int32_t expert)
{
    return fmaxf(b_global_of(a, expert, 0), b_global_of(a, expert, 1));
}

/* A thread's column of a row of d_c, the least part first. */
__global__ void __launch_bounds__(READY_THREADS) ready_gradient(const __grid_constant__ backward_params a)
{
    const int64_t i = (int64_t)blockIdx.x * READY_THREADS + threadIdx.x;
    if (i >= a.tokens * a.width) return;
    const int64_t row = i / a.width, c = i - row * a.width;
    float x = 0.0f;
    const int32_t expert = a.ends.end != NULL ? a.ends.expert_of(row) : 0;
    if (c < a.b.n && expert < a.ends.experts) {
        x = load_any(a.d_c, a.d_c_dtype, row * a.d_c_stride + c);
        if (a.b_parts == 2) x *= b_global_of(a, expert, (int)(c / a.run % 2)) / larger_global(a, expert);
    }
    bf16 *to = a.d + row * a.stride + c;
    for (int part = a.parts - 1; part >= 0; part--) {
        const float whole = __uint_as_float(__float_as_uint(x) & 0xffff0000);
        to[part * a.width] = from_float<bf16>(isnan(x) ? x : whole);
        x = isfinite(x) ? x - whole : 0.0f;
    }
}

struct backward_shared {
    char d[STAGE_BYTES], w[STAGE_BYTES];
    tile_list tiles;
};

/* The unit as [64 of K][64 columns] in bf16, over 2^8. */
__device__ __forceinline__ void decode_transposed(char *to, const unit_part &w)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < UNIT_STEPS; s++) {
        uint32_t a[4];
        decode_step<bf16>(a, w.codes[s], w.scales[s / 2], s);
#pragma unroll
        for (int reg = 0; reg < 4; reg++) {
            const int column = column_of(warp, lane, reg), k = s * 16 + 2 * pair_of(lane, reg);
            *(uint16_t *)(to + tile_at<UNIT>(k, column / 8) + column % 8 * 2) = (uint16_t)a[reg];
            *(uint16_t *)(to + tile_at<UNIT>(k + 1, column / 8) + column % 8 * 2) = (uint16_t)(a[reg] >> 16);
        }
    }
}

__device__ __forceinline__ void load_gradient(const backward_params &a, char *tile, const tile_place &t,
                                              int64_t column)
{
#pragma unroll
    for (int i = 0; i < STAGE_BYTES / 16 / THREADS; i++) {
        const int chunk = i * THREADS + threadIdx.x, row = chunk / 8;
        const bool here = row < t.rows;
        const bf16 *from = a.d + (here ? (t.row0 + row) * a.stride + column + chunk % 8 * 8 : 0);
        cp_async16(smem_address(tile) + tile_at<TOKENS>(row, chunk % 8), from, here);
    }
    cp_async_commit();
}

__device__ __forceinline__ void store_gradient(const backward_params &a, const float (&c)[TOKEN_TILES][4],
                                               const tile_place &t, const gemm_params &p)
{
    const int lane = threadIdx.x % 32, k = t.panel * UNIT + threadIdx.x / 32 * 16 + lane / 4;
    const float larger = larger_global(a, t.expert);
#pragma unroll
    for (int i = 0; i < TOKEN_TILES * 4; i++) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2, to = k + i % 4 / 2 * 8;
        if (token >= t.rows || to >= a.b.k) continue;
        const int64_t row = t.row0 + token;
        store_any(a.d_a, a.d_a_dtype, row * a.d_a_stride + to,
                  c[i / 4][i % 4] * weight_scale<bf16>() * (a_global_of(p, t.expert, row) * larger));
    }
}

__global__ void __launch_bounds__(THREADS)
    gradient_of_a(const __grid_constant__ backward_params a, const __grid_constant__ gemm_params p)
{
    extern __shared__ __align__(128) char memory[];
    backward_shared &m = *(backward_shared *)memory;
    const int steps = a.parts * a.b.panels, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    make_tiles(m.tiles, p, TOKENS, a.b.units, 1);
    const int32_t tiles = m.tiles.count;
    for (int32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const tile_place t = tile_at(m.tiles, p, tile, TOKENS, 1); /* its panel is a unit of K */
        float c[TOKEN_TILES][4] = {};
        for (int step = 0; step < steps; step++) {
            const int panel = step % a.b.panels;
            load_gradient(a, m.d, t, (int64_t)step * UNIT);
            decode_transposed(m.w, load_part(p.b, t.expert, panel, t.panel));
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll
            for (int s = 0; s < UNIT_STEPS; s++) {
                uint32_t w[4];
                load_a<UNIT>(w, smem_address(m.w), warp * 16, s * 16, lane);
#pragma unroll
                for (int n = 0; n < TOKEN_TILES; n += 2) {
                    uint32_t d[4];
                    load_b<TOKENS>(d, smem_address(m.d), n * 8, s * 16, lane);
                    mma16816<bf16>(c[n], w, d[0], d[1]);
                    mma16816<bf16>(c[n + 1], w, d[2], d[3]);
                }
            }
            __syncthreads();
        }
        store_gradient(a, c, t, p);
    }
    const int64_t first = a.ends.end_of(a.ends.experts - 1);
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < (a.tokens - first) * a.b.k;
         i += (int64_t)gridDim.x * THREADS)
        store_any(a.d_a, a.d_a_dtype, (first + i / a.b.k) * a.d_a_stride + i % a.b.k, 0.0f);
}

backward_params backward_params_of(const grouped_gemm_args *args, void *workspace)
{
    backward_params a = {};
    a.tokens = args->tokens;
    a.ends = expert_ends_of(args->offsets, args->tokens);
    a.b = weight_source_of(args->b_repacked, args->b_codes, args->b_scales, args->k_major, args->order,
                           args->n, args->k);
    a.width = (int64_t)a.b.panels * UNIT;
    a.d_c = args->d_c.data;
    a.d_c_dtype = args->d_c.dtype;
    a.d_c_stride = args->d_c.strides[0];
    a.d_a = args->d_a.data;
    a.d_a_dtype = args->d_a.dtype;
    a.d_a_stride = args->d_a.strides[0];
    a.run = (int32_t)args->rule.granularity;
    if (present(args->b_global)) {
        a.b_global = (const float *)args->b_global.data;
        a.b_global_expert = args->b_global.shape[0] > 1 ? args->b_global.strides[0] : 0;
        a.b_parts = (int32_t)args->b_global.shape[1];
    }
    a.parts = a.d_c_dtype == QUERN_BF16 && a.b_parts != 2 ? 1 : 3;
    a.stride = a.parts * a.width;
    a.d = room_at<bf16>(workspace);
    return a;
}

bool gradient_takes(const grouped_gemm_args *args, char why[STAGE_WHY_BYTES])
{
    grouped_gemm_args floats = *args;
    floats.int8 = false; /* the gradient is straight through */
    return gemm_takes(&floats, why);
}

size_t gradient_bytes(const stage_exec *, const grouped_gemm_args *args)
{
    const backward_params a = backward_params_of(args, NULL);
    return room_for((size_t)(a.tokens * a.stride) * sizeof(bf16));
}

gemm_params gradient_terms(const stage_exec *exec, const grouped_gemm_args *args, const backward_params &a)
{
    gemm_params p = {};
    p.tokens = a.tokens;
    p.ends = a.ends;
    p.b = a.b;
    p.b.status = exec->status;
    p.a_per = args->a_per;
    if (present(args->a_global)) {
        p.a_global = (const float *)args->a_global.data;
        p.a_global_stride = args->a_global.shape[0] > 1 ? args->a_global.strides[0] : 0;
    }
    return p;
}

quern_status gradient_ready(const stage_exec *exec, const backward_params &a)
{
    return launch_shared({(cudaStream_t)exec->stream, NULL}, ready_gradient,
                         dim3(blocks_for(a.tokens * a.width, READY_THREADS)), READY_THREADS, 0,
                         "grouped_gemm_backward, ready", a);
}

static bool grouped_gemm_backward_any_supports(const stage_exec *exec, const grouped_gemm_args *args,
                                               char why[STAGE_WHY_BYTES])
{
    return gradient_takes(args, why) &&
           shared_fits(exec, sizeof(backward_shared), "the grouped product's gradient", why);
}

static quern_status grouped_gemm_backward_any_run(const stage_exec *exec, const grouped_gemm_args *args,
                                                  void *workspace)
{
    enum { BLOCKS_A_MULTIPROCESSOR = 4 };
    const backward_params a = backward_params_of(args, workspace);
    if (args->tokens == 0 || args->k == 0) return QUERN_OK;
    const quern_status status = gradient_ready(exec, a);
    if (status != QUERN_OK) return status;
    return launch_shared({(cudaStream_t)exec->stream, NULL}, gradient_of_a,
                         dim3((unsigned)exec->multiprocessors * BLOCKS_A_MULTIPROCESSOR), THREADS,
                         sizeof(backward_shared), "grouped_gemm_backward", a, gradient_terms(exec, args, a));
}

extern const variant<grouped_gemm_args> grouped_gemm_backward_any = {
    "grouped_gemm_backward_any", grouped_gemm_backward_any_supports, gradient_bytes,
    grouped_gemm_backward_any_run};
