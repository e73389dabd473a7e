/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the router's kernels: how they work, and their arguments. Slot t top_k + j is the j-th expert
 * of token t.
 *
 *   logits  a warp computes 4 tokens x 4 experts in f32, of few tokens a block. Lanes, and shares of the
 *           dimension, which are a block's warps, add in a fixed order.
 *   choose  a warp a token, scores in shared memory: it takes the best expert top_k times, and of equal ones
 *           the lowest.
 *   sort    a counting sort of the slots by expert, in chunks: count, scan, place. It is stable: a slot comes
 *           behind those of its expert in the warps before its own, and in its own warp before it.
 *   order   the sort of up to 1024 slots in one block, a thread a slot: those of its expert before it in its
 *           warp, in the warps before, and of the experts before
 *   few     all three in one block, where launches would take longer than the work: a thread counts the slots
 *           before its expert's end, or before its slot.
 *
 * An id outside the table, and an expert outside [0, E) in the table or in given routing, are faults: the
 * slot gets expert 0 and weight 0, and the status word a bit.
 */
#ifndef QUERN_CUDA_ROUTE_PARAMS_CUH
#define QUERN_CUDA_ROUTE_PARAMS_CUH

#include "common/launch.cuh"
#include "common/rows.cuh"
#include "common/topk.cuh"
#include "common/values.cuh"

enum {
    ROUTE_THREADS = 256,
    ROUTE_WARPS = ROUTE_THREADS / 32,
    ROUTE_TILE = 4,     /* tokens, and experts, of a warp that makes logits */
    ROUTE_CHUNK = 2048, /* slots */
    ROUTE_FEW_TILES = 2048,
    ROUTE_FEW = 16, /* tokens, and below slots, up to which one block routes */
    ROUTE_FEW_SLOTS = 256,
    ROUTE_AT_ONCE = 8, /* logits that a lane loads before it uses them */
    ROUTE_MOST_EXPERTS = 1024,
    ROUTE_ORDER_BYTES = 48 * 1024
};

struct route_params {
    route_score score;
    int32_t top_k, experts;
    bool renormalize;
    float scale;
    int64_t tokens, dim;
    const void *logits, *hidden, *weight;
    quern_dtype logits_dtype, hidden_dtype, weight_dtype;
    int64_t logits_s, hidden_s, weight_s;
    const float *bias;
    const void *input_ids, *table;
    bool ids64, table64;
    int64_t vocabulary, table_s;
    const int32_t *given_experts; /* routing that the caller gives; NULL: none */
    const float *given_weights;
    int64_t given_experts_s, given_weights_s;
    int32_t *chosen;
    float *weights;
    int64_t chosen_s, weights_s;
    int32_t *offsets, *permutation;
    float *computed; /* [T, E] logits, workspace; NULL: the caller gives them */
    int32_t *status;
    int32_t *counts; /* [chunks][E], workspace */
    int64_t chunks;
    /* Backward. */
    const float *d_weights;
    int64_t d_weights_s;
    float *d; /* [T, E] rows of d_s */
    int64_t d_s;
    void *d_logits, *d_hidden;
    quern_dtype d_logits_dtype, d_hidden_dtype;
    int64_t d_logits_s, d_hidden_s;
    float *d_weight;
    int64_t d_weight_s;
};

__device__ __forceinline__ float logit_at(const route_params &a, int64_t token, int32_t e)
{
    return a.computed != NULL ? a.computed[token * a.experts + e]
                              : value_at(a.logits, a.logits_dtype, token * a.logits_s + e);
}

__device__ __forceinline__ float sigmoid_of(float x)
{
    const float small = expf(-fabsf(x));
    return x >= 0.0f ? 1.0f / (1.0f + small) : small / (1.0f + small);
}

__device__ __forceinline__ float warp_largest(float x)
{
    for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}
__device__ __forceinline__ float warp_sum(float x)
{
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

/* Copies a row of logits to shared memory and returns a lane's largest; a warp calls. */
template <typename T>
__device__ __forceinline__ float load_logits(const T *row, int32_t experts, float *scores)
{
    float most = -INFINITY;
    for (int32_t first = threadIdx.x % 32; first < experts; first += 32 * ROUTE_AT_ONCE) {
        T x[ROUTE_AT_ONCE];
#pragma unroll
        for (int i = 0; i < ROUTE_AT_ONCE; i++) x[i] = row[min(first + i * 32, experts - 1)];
#pragma unroll
        for (int i = 0; i < ROUTE_AT_ONCE; i++) {
            if (first + i * 32 >= experts) break;
            scores[first + i * 32] = to_float(x[i]);
            most = fmaxf(most, scores[first + i * 32]);
        }
    }
    return most;
}

/* Writes a token's scores to shared memory; a warp calls. */
__device__ __forceinline__ void make_scores(const route_params &a, int64_t token, float *scores)
{
    const int lane = threadIdx.x % 32;
    const int64_t at = token * a.logits_s;
    float sum = 0.0f;
    float most = a.computed != NULL ? load_logits(a.computed + token * a.experts, a.experts, scores)
                 : a.logits_dtype == QUERN_F32  ? load_logits((const float *)a.logits + at, a.experts, scores)
                 : a.logits_dtype == QUERN_BF16 ? load_logits((const bf16 *)a.logits + at, a.experts, scores)
                                                : load_logits((const f16 *)a.logits + at, a.experts, scores);
    if (a.score == ROUTE_SOFTMAX) {
        most = warp_largest(most);
        for (int32_t e = lane; e < a.experts; e += 32) sum += scores[e] = expf(scores[e] - most);
        sum = warp_sum(sum);
    }
    for (int32_t e = lane; e < a.experts; e += 32) {
        const float x = scores[e];
        if (a.score == ROUTE_SOFTMAX) scores[e] = x / sum;
        else if (a.score == ROUTE_SIGMOID) scores[e] = sigmoid_of(x);
        else scores[e] = sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))) + (isnan(x) ? x : 0.0f));
    }
    __syncwarp();
}

/* The arguments of a call, without pointers into the workspace. */
route_params route_params_of(const route_args *args);
/* Computes a.computed from hidden states and weight. */
quern_status route_make_logits(const launcher &to, const route_params &a);

#endif
