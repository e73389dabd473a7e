/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the arguments of hyper-connections' kernels. Sums over all channels of a token's copies are
 * split into slices of at most SLICE channels of one copy: [slice][token][J + 1], J products with fn and the
 * squares.
 */
#ifndef QUERN_CUDA_HYPER_PARAMS_CUH
#define QUERN_CUDA_HYPER_PARAMS_CUH

#include "common/chunk.cuh"
#include "common/entry.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/values.cuh"

enum { COPIES_MOST = 8, WEIGHTS_MOST = COPIES_MOST * (COPIES_MOST + 2), SLICE = 2048 };

/* Rows of a token, or of its copies: row (t, i) at t token + i copy. */
struct token_rows {
    void *p;
    int64_t token, copy;
};

static inline token_rows token_rows_of(const quern_tensor &t)
{
    return {present(t) ? t.data : NULL, present(t) ? t.strides[0] : 0, t.ndim > 2 ? t.strides[1] : 0};
}

/* The tensors and numbers of a call; fn, base and scale: where it makes weights. */
struct hyper_call {
    int32_t width, iterations;
    int64_t tokens;
    float eps, rms_eps;
    token_rows x, f, h, out, d_h, d_out, d_x, d_f;
    token_rows pre_in, pre, post, comb, d_pre, d_post, d_comb, d_pre_in; /* floats */
    const float *fn, *base, *scale;
    int64_t fn_row;
    any_floats norm;
};

static inline hyper_call hyper_call_of(const hyper_args *args)
{
    hyper_call p = {};
    p.width = (int)args->x.shape[2];
    p.iterations = (int)args->iterations;
    p.tokens = args->x.shape[0];
    p.eps = args->eps;
    p.rms_eps = args->rms_eps;
    p.x = token_rows_of(args->x), p.f = token_rows_of(args->f);
    p.h = token_rows_of(args->h), p.out = token_rows_of(args->out);
    p.d_h = token_rows_of(args->d_h), p.d_out = token_rows_of(args->d_out);
    p.d_x = token_rows_of(args->d_x), p.d_f = token_rows_of(args->d_f);
    p.pre_in = token_rows_of(args->pre_in), p.pre = token_rows_of(args->pre);
    p.post = token_rows_of(args->post), p.comb = token_rows_of(args->comb);
    p.d_pre = token_rows_of(args->d_pre), p.d_post = token_rows_of(args->d_post);
    p.d_comb = token_rows_of(args->d_comb), p.d_pre_in = token_rows_of(args->d_pre_in);
    p.norm = any_floats_of(args->weight);
    if (!present(args->fn)) return p;
    p.fn = (const float *)args->fn.data;
    p.fn_row = args->fn.strides[0];
    p.base = (const float *)args->base.data;
    p.scale = (const float *)args->scale.data;
    return p;
}

/* A row's 16 bytes that few blocks read again. */
__device__ __forceinline__ uint4 load_once(const void *from)
{
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

struct hyper_params : hyper_call {
    quern_dtype dtype; /* of x, f, h, out and their gradients */
    bool wide;         /* their rows can be read 16 bytes at a time */
    bool head, mixes;
    int32_t copies, weights; /* n, J; the width is C */
    int32_t slices;          /* of a copy */
    bool norm_wide;          /* norm can be read eight at a time */
    float *sums;             /* [copies slices][tokens][J + 1] */
    float *of_tokens;        /* [tokens][J]: the weights */
    float *d_of_tokens;      /* [tokens][J] */
    float *d_sums;           /* [tokens][J + 1]: the gradients of the sums, and the factor of x */
    float2 *norms;           /* [tokens]: 1 / the root mean square of the collapsed copies; a mean */
    uint4 *packed;           /* fn for the tensor cores, or NULL */
    double *d_small;         /* [runs][2 J]: the gradients of the logits, and times their means */
    float *d_norm_parts;     /* [runs][C], or NULL */
    float *d_fn_parts;       /* [shares][J][n C], or NULL */
};

/* Which of the scales weight j has. */
__device__ __forceinline__ int part_of(int copies, int j)
{
    return j < copies ? 0 : j < 2 * copies ? 1 : 2;
}

/* The factors of a token's copies on the way in. */
__device__ __forceinline__ const float *pre_of(const hyper_params &p, int64_t token)
{
    return p.pre_in.p != NULL ? (const float *)p.pre_in.p + token * p.pre_in.token
                              : p.of_tokens + token * p.weights;
}

__device__ __forceinline__ chunk load_row(const hyper_params &p, const token_rows &r, int64_t token, int copy,
                                          int channel)
{
    const int64_t at = token * r.token + copy * r.copy + channel;
    const int count = p.width - channel;
    if (count >= CHUNK && p.dtype == QUERN_F32) return load_chunk<float>((const float *)r.p + at, p.wide);
    if (count >= CHUNK && p.dtype == QUERN_BF16) return load_chunk<bf16>((const bf16 *)r.p + at, p.wide);
    if (count >= CHUNK) return load_chunk<f16>((const f16 *)r.p + at, p.wide);
    chunk c = {};
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        if (i < count) c.x[i] = value_at(r.p, p.dtype, at + i);
    return c;
}

__device__ __forceinline__ void store_row(const hyper_params &p, const token_rows &r, int64_t token, int copy,
                                          int channel, const chunk &c)
{
    const int64_t at = token * r.token + copy * r.copy + channel;
    const int count = p.width - channel;
    if (count >= CHUNK && p.dtype == QUERN_F32) store_chunk<float>((float *)r.p + at, c, p.wide);
    else if (count >= CHUNK && p.dtype == QUERN_BF16) store_chunk<bf16>((bf16 *)r.p + at, c, p.wide);
    else if (count >= CHUNK) store_chunk<f16>((f16 *)r.p + at, c, p.wide);
    else
#pragma unroll
        for (int i = 0; i < CHUNK; i++)
            if (i < count) put_at(r.p, p.dtype, at + i, c.x[i]);
}

/* Weights of the norm. */
__device__ __forceinline__ chunk load_norm(const hyper_params &p, int channel)
{
    if (p.norm_wide && p.norm.dtype == QUERN_F32)
        return load_chunk<float>((const float *)p.norm.p + channel, true);
    if (p.norm_wide && p.norm.dtype == QUERN_BF16)
        return load_chunk<bf16>((const bf16 *)p.norm.p + channel, true);
    chunk c = {};
#pragma unroll
    for (int i = 0; i < CHUNK; i++)
        if (channel + i < p.width) c.x[i] = p.norm.at(channel + i);
    return c;
}

/* Eight floats of shared memory. */
__device__ __forceinline__ chunk load_shared(const float *from)
{
    const float4 low = *(const float4 *)from, high = *(const float4 *)(from + 4);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ void store_shared(float *to, const chunk &c)
{
    *(float4 *)to = make_float4(c.x[0], c.x[1], c.x[2], c.x[3]);
    *(float4 *)(to + 4) = make_float4(c.x[4], c.x[5], c.x[6], c.x[7]);
}

/* to += factor from. */
__device__ __forceinline__ void add_scaled(chunk &to, float factor, const chunk &from)
{
#pragma unroll
    for (int i = 0; i < CHUNK; i++) to.x[i] = fmaf(factor, from.x[i], to.x[i]);
}

/* The sum of x over all threads of a block; `parts`: a float a warp. */
__device__ __forceinline__ float block_sum(float x, float *parts)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float all = 0.0f;
    for (int w = 0; w < (int)blockDim.x / 32; w++) all += parts[w];
    return all;
}

quern_status hyper_dots(const hyper_params &p, cudaStream_t stream);
quern_status hyper_weights(const hyper_params &p, cudaStream_t stream);
quern_status hyper_combine(const hyper_params &p, cudaStream_t stream);
/* `runs`: of tokens, which have sums of their own; `shares`: the same, of fn's gradient. */
quern_status hyper_weights_backward(const hyper_params &p, int64_t runs, cudaStream_t stream);
quern_status hyper_tokens_backward(const hyper_params &p, int64_t runs, cudaStream_t stream);
quern_status hyper_copies_backward(const hyper_params &p, cudaStream_t stream);
quern_status hyper_fn_backward(const hyper_params &p, int64_t shares, cudaStream_t stream);

#endif
