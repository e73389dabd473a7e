/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - what the router's kernels share, and how they work.
 *
 * logits: a warp makes those of 4 tokens for 4 experts, in f32; its lanes share the dimension in an order
 * that nothing changes. choose: a warp a token, its scores in shared memory; the best of them k times over,
 * ties to the lowest expert. sort: a counting sort of the slots by expert in chunks: count, scan, place. A
 * slot's rank in its chunk follows from counts of its warp's earlier slots and of the warps before, so the
 * order is that of the slots. For few tokens one block does all three, as each launch takes longer: a thread
 * an expert, or a slot, counts the slots before it.
 *
 * An id without a row in the table, or an entry of it, or of the routing that is handed in, that is no
 * expert, gives that slot expert 0 and weight 0.
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
    ROUTE_FEW = 16,     /* tokens for which one block does it all, unless they have more slots than */
    ROUTE_FEW_SLOTS = 256,
    ROUTE_MOST_EXPERTS = 1024
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
    const int32_t *given_experts; /* routing that is handed in; NULL: it is not */
    const float *given_weights;
    int64_t given_experts_s, given_weights_s;
    int32_t *chosen;
    float *weights;
    int64_t chosen_s, weights_s;
    int32_t *offsets, *permutation;
    float *own; /* [T, E] logits, workspace; NULL: given */
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
    return a.own != NULL ? a.own[token * a.experts + e]
                         : value_at(a.logits, a.logits_dtype, token * a.logits_s + e);
}

__device__ __forceinline__ float sigmoid_of(float x)
{
    const float small = expf(-fabsf(x));
    return x >= 0.0f ? 1.0f / (1.0f + small) : small / (1.0f + small);
}

__device__ __forceinline__ float warp_largest(float x)
{
    for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}
__device__ __forceinline__ float warp_sum(float x)
{
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

/* A token's scores into shared memory; a warp calls. */
__device__ __forceinline__ void make_scores(const route_params &a, int64_t token, float *scores)
{
    const int lane = threadIdx.x % 32;
    float most = -INFINITY, sum = 0.0f;
    for (int32_t e = lane; e < a.experts; e += 32) {
        const float x = logit_at(a, token, e);
        scores[e] = x;
        most = fmaxf(most, x);
    }
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

/* The arguments of a call, without what stands in the workspace. */
route_params route_params_of(const route_args *args);
/* Launches what makes `own` from hidden states and weight. */
quern_status route_make_logits(const launcher &to, const route_params &a);

#endif
