/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * fused_quantise.cu - a product's interleaved output to quantised gate and up, or to quantised SwiGLU. A
 * thread has a block of 16 columns of the result: 32 columns of x. Runs of 8 are read 16 bytes at a time;
 * where rows follow one another without padding, block i of the result is made of columns 32 i on, all of
 * which a thread loads at once. A value that is not finite counts as 0 and sets its bit. Limit: x read once.
 */
#include "common/fp4_bf16.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "common/swiglu.cuh"
#include "variants.cuh"

enum { THREADS = 256, RUN = 8 };

struct fused_params {
    rows_view x, codes[2], scales[2];
    const float *global[2];
    int64_t rows, width, blocks;
    divider by_blocks;
    bool part[2], swiglu, reciprocal, runs, wide_codes[2], flat;
    swiglu_rule rule;
    int32_t *status;
};

/* Sixteen gates (or ups) from column c on. */
template <typename T>
__device__ __forceinline__ void load_part(const fused_params &a, float (&x)[FP4_BLOCK], const T *row,
                                          int64_t c, bool up)
{
    const int64_t q = a.rule.granularity;
    if (a.runs && c + FP4_BLOCK <= a.width) {
        uint4 raw[2][sizeof(T) / 2];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (unsigned i = 0; i < sizeof(T) / 2; i++)
                raw[r][i] = __ldcs((const uint4 *)(row + 2 * c + r * 2 * RUN + (up ? RUN : 0)) + i);
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i++) x[i] = to_float<T>(((const T *)raw[i / RUN])[i % RUN]);
    } else {
        for (int i = 0; i < FP4_BLOCK; i++)
            x[i] = c + i < a.width ? to_float<T>(row[gate_column(c + i, q) + (up ? q : 0)]) : 0.0f;
    }
}

__device__ __forceinline__ void make_finite(const fused_params &a, float (&x)[FP4_BLOCK])
{
    bool bad;
    largest_finite(x, &bad);
    if (bad) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
}

template <fp4_kind KIND>
__device__ __forceinline__ fp4_block part_block(const fused_params &a, float global,
                                                const float (&x)[FP4_BLOCK])
{
    if (is_global(global))
        return quantise_block<KIND, true>(global, a.reciprocal, x, __uint_as_float(largest_bits(x)));
    raise_status(a.status, QUERN_STATUS_BAD_GLOBAL);
    return {{0, 0}, 0};
}

template <fp4_kind KIND>
__device__ __forceinline__ void store_part(const fused_params &a, int part, int64_t row, int64_t block,
                                           const float (&x)[FP4_BLOCK])
{
    const fp4_block b = part_block<KIND>(a, *a.global[part], x);
    uint8_t *codes = a.codes[part].row<uint8_t>(row) + 8 * block;
    if (a.wide_codes[part]) __stcs((uint2 *)codes, make_uint2(b.codes[0], b.codes[1]));
    else
        for (int i = 0; i < 8; i++) codes[i] = (uint8_t)(b.codes[i / 4] >> i % 4 * 8);
    a.scales[part].row<uint8_t>(row)[block] = (uint8_t)b.scale;
}

template <typename T, fp4_kind KIND>
__global__ void __launch_bounds__(THREADS) fused_quantise(const __grid_constant__ fused_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * a.blocks) return;
    const int64_t row = a.by_blocks.of(i), block = i - row * a.blocks, c = block * FP4_BLOCK;
    const T *x = a.x.row<const T>(row);
    float gate[FP4_BLOCK], up[FP4_BLOCK];
    if (a.part[0] || a.swiglu) {
        load_part<T>(a, gate, x, c, false);
        make_finite(a, gate);
    }
    if (a.part[1] || a.swiglu) {
        load_part<T>(a, up, x, c, true);
        make_finite(a, up);
    }
    if (a.swiglu) { /* it may be infinite: that saturates */
#pragma unroll
        for (int e = 0; e < FP4_BLOCK; e++)
            gate[e] = c + e < a.width ? swiglu_of(a.rule, gate[e], up[e]) : 0.0f;
    }
    if (a.part[0]) store_part<KIND>(a, 0, row, block, gate);
    if (a.part[1]) store_part<KIND>(a, 1, row, block, up);
}

/* Gate and up of a block, in runs of 8 that alternate. */
template <typename T> struct raw_pair {
    uint4 words[2 * sizeof(T)];

    __device__ __forceinline__ void load(const T *x)
    {
#pragma unroll
        for (unsigned i = 0; i < 2 * sizeof(T); i++) words[i] = __ldcs((const uint4 *)x + i);
    }
    __device__ __forceinline__ void values(float (&x)[FP4_BLOCK], int part) const
    {
#pragma unroll
        for (int i = 0; i < FP4_BLOCK; i++)
            x[i] = to_float<T>(((const T *)words)[i / RUN * 2 * RUN + part * RUN + i % RUN]);
    }
};

/* The values of a part, of which what is not finite becomes 0, and the largest magnitude. counts: the part is
 * of use. */
template <typename T>
__device__ __forceinline__ float finite_values(const fused_params &a, const raw_pair<T> &raw, int part,
                                               bool counts, float (&x)[FP4_BLOCK])
{
    raw.values(x, part);
    if constexpr (__is_same(T, bf16)) {
        const uint4 &low = raw.words[part], &high = raw.words[2 + part];
        const uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const uint32_t most = largest_bf16(pairs);
        if (most < INFINITE_BITS) return __uint_as_float(most);
    }
    bool bad;
    const float largest = largest_finite(x, &bad);
    if (bad && counts) raise_status(a.status, QUERN_STATUS_NOT_FINITE);
    return largest;
}

template <fp4_kind KIND>
__device__ __forceinline__ void store_flat(const fused_params &a, int part, int64_t block, float global,
                                           const float (&x)[FP4_BLOCK])
{
    const fp4_block b = part_block<KIND>(a, global, x);
    __stcs((uint2 *)a.codes[part].p + block, make_uint2(b.codes[0], b.codes[1]));
    ((uint8_t *)a.scales[part].p)[block] = (uint8_t)b.scale;
}

/* SwiGLU of finite gates, of which the largest is given, and ups, over the gates. It may be infinite: that
 * saturates. */
__device__ __forceinline__ void swiglu_block(const swiglu_rule &rule, float largest, float (&gate)[FP4_BLOCK],
                                             float (&up)[FP4_BLOCK])
{
    if (largest * fabsf(rule.alpha) <= SWIGLU_NEAR) {
        const float slope = rule.alpha * -1.44269504089f; /* log2(e) */
        if (rule.limit > 0.0f) {
#pragma unroll
            for (int e = 0; e < FP4_BLOCK; e++) {
                gate[e] = fminf(gate[e], rule.limit);
                up[e] = fmaxf(fminf(up[e], rule.limit), -rule.limit);
            }
        }
#pragma unroll
        for (int e = 0; e < FP4_BLOCK; e++) gate[e] = swiglu_near(slope, rule.beta, gate[e], up[e]);
    } else {
#pragma unroll
        for (int e = 0; e < FP4_BLOCK; e++) gate[e] = swiglu_of(rule, gate[e], up[e]);
    }
}

template <typename T, fp4_kind KIND>
__global__ void __launch_bounds__(THREADS) fused_flat(const __grid_constant__ fused_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * a.blocks) return;
    raw_pair<T> raw;
    raw.load((const T *)a.x.p + i * 2 * FP4_BLOCK);
    float global[2], largest[2], x[2][FP4_BLOCK];
#pragma unroll
    for (int p = 0; p < 2; p++) global[p] = a.part[p] ? *a.global[p] : 1.0f;
#pragma unroll
    for (int p = 0; p < 2; p++)
        largest[p] = finite_values(a, raw, p, a.part[p] || a.swiglu, x[p]);
    if (a.swiglu) swiglu_block(a.rule, largest[0], x[0], x[1]);
    if (a.part[0]) store_flat<KIND>(a, 0, i, global[0], x[0]);
    if (a.part[1]) store_flat<KIND>(a, 1, i, global[1], x[1]);
}

static fused_params params_of(const fused_quantise_args *args)
{
    fused_params a = {};
    a.x = rows_view_of(args->x);
    a.rows = args->x.shape[0];
    a.width = args->x.shape[1] / 2;
    a.blocks = (a.width + FP4_BLOCK - 1) / FP4_BLOCK;
    a.by_blocks = divider_by(a.blocks);
    a.swiglu = args->swiglu;
    a.rule = args->rule;
    a.reciprocal = args->profile == QUANTISE_PROFILE_COMPRESSED_TENSORS;
    a.runs = args->rule.granularity == RUN && rows_aligned(args->x, 16);
    a.flat = a.runs && a.width % FP4_BLOCK == 0 && rows_follow(a.x, 2 * a.width);
    for (int p = 0; p < 2; p++) {
        a.part[p] = present(args->codes[p]);
        if (!a.part[p]) continue;
        a.codes[p] = rows_view_of(args->codes[p]);
        a.scales[p] = rows_view_of(args->scales[p]);
        a.global[p] = (const float *)args->global[p].data;
        a.wide_codes[p] = rows_aligned(args->codes[p], 8);
        a.flat = a.flat && a.wide_codes[p] && rows_follow(a.codes[p], a.blocks * 8) &&
                 rows_follow(a.scales[p], a.blocks);
    }
    return a;
}

template <typename T, fp4_kind KIND>
static void launch_kind(const fused_params &a, int64_t n, cudaStream_t stream)
{
    const unsigned grid = blocks_for(n, THREADS);
    if (a.flat) fused_flat<T, KIND><<<grid, THREADS, 0, stream>>>(a);
    else fused_quantise<T, KIND><<<grid, THREADS, 0, stream>>>(a);
}

template <typename T> static quern_status fused_as(const fused_params &a, fp4_kind kind, cudaStream_t stream)
{
    const int64_t n = a.rows * a.blocks;
    if (n == 0) return QUERN_OK;
    if (kind == FP4_RNE) launch_kind<T, FP4_RNE>(a, n, stream);
    else if (kind == FP4_HALF_STEPS) launch_kind<T, FP4_HALF_STEPS>(a, n, stream);
    else if (kind == FP4_MODELOPT) launch_kind<T, FP4_MODELOPT>(a, n, stream);
    else launch_kind<T, FP4_COMPRESSED>(a, n, stream);
    return LAUNCHED("fused_quantise");
}

static quern_status fused_quantise_any_run(const stage_exec *exec, const fused_quantise_args *args, void *)
{
    fused_params a = params_of(args);
    a.status = exec->status;
    const fp4_kind kind = fp4_rule_of(args->profile, QUANTISE_SCALES_RNE).kind;
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (args->x.dtype == QUERN_F32) return fused_as<float>(a, kind, stream);
    return args->x.dtype == QUERN_BF16 ? fused_as<bf16>(a, kind, stream) : fused_as<f16>(a, kind, stream);
}

extern const variant<fused_quantise_args> fused_quantise_any = {"fused_quantise_any", NULL, NULL,
                                                                fused_quantise_any_run};
