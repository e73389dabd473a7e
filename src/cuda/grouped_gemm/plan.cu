/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plan.cu - a grouped product as launches: A to 16-bit rows where it is f32, NVFP4 or out of line; the
 * product; SwiGLU of other runs than the kernels' own, and quantisation, by their stages' kernels.
 */
#include "grouped_gemm/params.cuh"
#include "variants.cuh"

/* The stages whose kernels make the output of some calls. */
extern const variant<swiglu_args> swiglu_forward_any;
extern const variant<quantise_args> quantise_any;

enum { THREADS = 256, TOGETHER = 8 };

bool gemm_takes(const grouped_gemm_args *args, char why[STAGE_WHY_BYTES])
{
    if (args->int8) {
        snprintf(why, STAGE_WHY_BYTES,
                 "a8 int8: the cuda backend multiplies NVFP4 weights by floats, FP8 or NVFP4");
        return false;
    }
    if (present(args->offsets) && args->offsets.shape[0] > GEMM_MOST_EXPERTS) {
        snprintf(why, STAGE_WHY_BYTES, "%lld experts: the cuda backend takes up to %d",
                 (long long)args->offsets.shape[0], (int)GEMM_MOST_EXPERTS);
        return false;
    }
    return true;
}

/* Whether the kernel's own epilogue makes C. */
static bool is_direct(const grouped_gemm_args *args)
{
    return present(args->c) && !present(args->c_old) &&
           (!args->swiglu || args->rule.granularity == SWIGLU_RUN);
}

static quern_tensor matrix_at(void *data, quern_dtype dtype, int64_t rows, int64_t columns)
{
    quern_tensor t = {};
    t.data = data;
    t.dtype = dtype;
    t.device = QUERN_CUDA;
    t.ndim = 2;
    t.shape[0] = rows;
    t.shape[1] = t.strides[0] = columns;
    t.strides[1] = 1;
    return t;
}

static quantise_args quantise_of(const grouped_gemm_args *args, const float *h)
{
    quantise_args q = {};
    q.profile = args->profile;
    q.x = matrix_at((void *)h, QUERN_F32, args->tokens, args->swiglu ? args->n / 2 : args->n);
    q.per = args->c_global.shape[0] > 1 ? QUANTISE_GLOBAL_EXPERT : QUANTISE_GLOBAL_TENSOR;
    q.offsets = args->offsets;
    q.given = args->c_global;
    q.codes = args->c_codes;
    q.scales = args->c_scales;
    return q;
}

static void fill_globals(gemm_params &p, const grouped_gemm_args *args)
{
    const bool one = !present(args->offsets);
    p.a_per = args->a_per;
    if (present(args->a_global)) {
        p.a_global = (const float *)args->a_global.data;
        p.a_global_stride = args->a_global.shape[0] > 1 ? args->a_global.strides[0] : 0;
    }
    if (present(args->b_global)) {
        p.b_global = (const float *)args->b_global.data;
        p.b_global_expert = args->b_global.shape[0] > 1 && !one ? args->b_global.strides[0] : 0;
        p.b_parts = (int32_t)args->b_global.shape[1];
    }
    p.run = (int32_t)args->rule.granularity;
    if (present(args->bias)) {
        p.bias = args->bias.data;
        p.bias_dtype = args->bias.dtype;
        p.bias_stride = args->bias.strides[0];
    }
}

static void fill_output(gemm_plan &plan, const grouped_gemm_args *args, arena *room)
{
    gemm_params &p = plan.p;
    if (is_direct(args)) {
        p.swiglu = args->swiglu;
        p.c = args->c.data;
        p.c_dtype = args->c.dtype;
        p.c_stride = args->c.strides[0];
        p.c_wide = rows_aligned(args->c, 16);
    } else {
        plan.h = (float *)arena_take(room, (size_t)(args->tokens * args->n) * sizeof(float));
        if (args->swiglu && !present(args->c))
            plan.act = (float *)arena_take(room, (size_t)(args->tokens * args->n / 2) * sizeof(float));
        p.c = plan.h;
        p.c_dtype = QUERN_F32;
        p.c_stride = args->n;
        p.c_wide = args->n % 4 == 0;
    }
}

gemm_plan gemm_plan_of(const stage_exec *exec, const grouped_gemm_args *args, int64_t alignment,
                       void *workspace)
{
    gemm_plan plan = {};
    gemm_params &p = plan.p;
    arena room = arena_on(workspace);
    p.tokens = args->tokens;
    p.ends = expert_ends_of(args->offsets, args->tokens);
    p.b = weight_source_of(args->b_repacked, args->b_codes, args->b_scales, args->k_major, args->order,
                           args->n, args->k);
    p.b.status = exec->status;
    p.units = p.b.units;
    p.panels = p.b.panels;
    p.width = p.b.n;
    const bool floats = present(args->a), wide = floats && args->a.dtype == QUERN_F32;
    plan.f16_product = floats && !args->fp8 && args->a.dtype == QUERN_F16;
    p.parts = wide && !args->fp8 ? 3 : 1;
    plan.ready = !floats || args->fp8 || wide || !rows_aligned(args->a, alignment);
    if (args->fp8) {
        fp8_room(plan, &room);
    } else {
        /* The workspace may not depend on where tensors stand, so there is always room. */
        p.a_stride = (int64_t)p.parts * p.units * UNIT;
        p.a = arena_take(&room, (size_t)(args->tokens * p.a_stride) * sizeof(bf16));
    }
    if (!plan.ready) {
        p.a = args->a.data;
        p.a_stride = args->a.strides[0];
    }
    p.rule = args->rule;
    fill_globals(p, args);
    fill_output(plan, args, &room);
    plan.bytes = arena_size(&room);
    return plan;
}

struct ready_params {
    int64_t tokens, columns, stride; /* columns: of a part, whole units */
    int32_t k, parts;
    void *out;
    const void *a;
    int64_t a_stride;
    const uint8_t *codes, *scales;
    int64_t codes_stride, scales_stride;
    const int32_t *pad_row_offsets;
    expert_ends ends;
    int32_t *status;
};

/* The scale of 16 codes of a row. */
__device__ __forceinline__ float a_scale_of(const ready_params &a, int64_t row, int block)
{
    int64_t at = row * a.scales_stride + block;
    if (a.pad_row_offsets != NULL) {
        const int32_t expert = a.ends.expert_of(row);
        if (expert >= a.ends.experts) return 0.0f;
        const int64_t r = a.pad_row_offsets[expert] + row - a.ends.first_of(expert),
                      tiles = (a.k / 16 + 3) / 4;
        at = (r / 128 * tiles + block / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + block % 4;
        if (r < 0 || at >= a.scales_stride) return 0.0f; /* scales_stride: of all bytes */
    }
    const int byte = a.scales[at];
    if (!is_scale(byte)) raise_status(a.status, QUERN_STATUS_BAD_SCALE);
    return is_scale(byte) ? e4m3_value(byte) : 0.0f;
}

/* A thread writes 8 columns. KIND: f32 as three parts, NVFP4, or 16-bit elements as they are. */
enum ready_kind { READY_F32, READY_NVFP4, READY_16_BITS };
template <ready_kind KIND>
__global__ void __launch_bounds__(THREADS) make_ready(const __grid_constant__ ready_params a)
{
    const int64_t per = a.columns / TOGETHER, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.tokens * per) return;
    const int64_t row = i / per;
    const int k = (int)(i - row * per) * TOGETHER;
    uint16_t *out = (uint16_t *)a.out + row * a.stride + k;
    uint16_t x[3][TOGETHER] = {};
#pragma unroll
    for (int e = 0; e < TOGETHER; e++) {
        if (k >= a.k) break;
        if constexpr (KIND == READY_16_BITS) x[0][e] = ((const uint16_t *)a.a)[row * a.a_stride + k + e];
        if constexpr (KIND == READY_F32) {
            /* 24 bits are 8, 8 and 8. */
            float rest = ((const float *)a.a)[row * a.a_stride + k + e];
#pragma unroll
            for (int part = 0; part < 3; part++) {
                x[part][e] = (uint16_t)(__float_as_uint(rest) >> 16);
                const float whole = __uint_as_float(__float_as_uint(rest) & 0xffff0000);
                if (part == 0 && isnan(rest)) x[0][e] = 0x7fc0;
                rest = isfinite(rest) ? rest - whole : 0.0f;
            }
        }
    }
    if constexpr (KIND == READY_NVFP4) {
        if (k < a.k) {
            const float scale = a_scale_of(a, row, k / FP4_BLOCK);
#pragma unroll
            for (int e = 0; e < TOGETHER; e++) {
                const int code = a.codes[row * a.codes_stride + (k + e) / 2] >> e % 2 * 4 & 15;
                x[0][e] = (uint16_t)(__float_as_uint(signed_e2m1(code) * scale) >> 16);
            }
        }
    }
    /* The least part comes first: while sums are small, so is what adding to them loses. */
#pragma unroll
    for (int part = 0; part < 3; part++)
        if (part < a.parts) *(uint4 *)(out + (a.parts - 1 - part) * a.columns) = *(const uint4 *)x[part];
}

quern_status gemm_ready(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan)
{
    const int64_t columns = (int64_t)plan.p.units * UNIT, n = args->tokens * (columns / TOGETHER);
    if (!plan.ready || n == 0) return QUERN_OK;
    ready_params a = {};
    a.tokens = args->tokens;
    a.columns = columns;
    a.stride = plan.p.a_stride;
    a.k = (int32_t)args->k;
    a.parts = plan.p.parts;
    a.out = (void *)plan.p.a;
    a.a = args->a.data;
    a.a_stride = args->a.strides[0];
    a.codes = (const uint8_t *)args->a_codes.data;
    a.codes_stride = args->a_codes.strides[0];
    a.scales = (const uint8_t *)args->a_scales.data;
    a.scales_stride = args->a_scales.strides[0];
    a.ends = plan.p.ends;
    a.status = exec->status;
    if (present(args->pad_row_offsets)) {
        a.pad_row_offsets = (const int32_t *)args->pad_row_offsets.data;
        a.scales_stride = args->a_scales.shape[0];
    }
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const unsigned grid = blocks_for(n, THREADS);
    if (!present(args->a)) make_ready<READY_NVFP4><<<grid, THREADS, 0, stream>>>(a);
    else if (args->a.dtype == QUERN_F32) make_ready<READY_F32><<<grid, THREADS, 0, stream>>>(a);
    else make_ready<READY_16_BITS><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("grouped_gemm, ready");
}

struct add_params {
    const float *h;
    const void *old;
    void *c;
    quern_dtype dtype;
    int64_t tokens, n, old_stride, c_stride;
};

__global__ void __launch_bounds__(THREADS) add_old(const __grid_constant__ add_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.tokens * a.n) return;
    const int64_t row = i / a.n, column = i - row * a.n;
    const float x = __fadd_rn(a.h[i], load_any(a.old, a.dtype, row * a.old_stride + column));
    store_any(a.c, a.dtype, row * a.c_stride + column, x);
}

quern_status gemm_finish(const stage_exec *exec, const grouped_gemm_args *args, const gemm_plan &plan)
{
    if (plan.h == NULL || args->tokens == 0 || args->n == 0) return QUERN_OK;
    const float *values = plan.h;
    if (present(args->c_old)) {
        const add_params a = {plan.h,       args->c_old.data, args->c.data,           args->c.dtype,
                              args->tokens, args->n,          args->c_old.strides[0], args->c.strides[0]};
        add_old<<<blocks_for(a.tokens * a.n, THREADS), THREADS, 0, (cudaStream_t)exec->stream>>>(a);
        return LAUNCHED("grouped_gemm, adding");
    }
    if (args->swiglu) {
        swiglu_args s = {};
        s.rule = args->rule;
        s.h = matrix_at(plan.h, QUERN_F32, args->tokens, args->n);
        s.act = present(args->c) ? args->c : matrix_at(plan.act, QUERN_F32, args->tokens, args->n / 2);
        const quern_status status = swiglu_forward_any.run(exec, &s, NULL);
        if (status != QUERN_OK || present(args->c)) return status;
        values = plan.act;
    }
    const quantise_args q = quantise_of(args, values);
    return quantise_any.run(exec, &q, NULL);
}
