/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward.cu - the router's gradients. A warp a token computes the gradient of its logits from that of its
 * weights, in shared memory. Two products give those of hidden states and weight where they are wanted, a
 * thread an element, terms in order. A token with a faulty expert has none. Limit: FMA of the products.
 */
#include "route/params.cuh"
#include "variants.cuh"

enum { MOST = 512 }; /* experts that shared memory of 8 warps holds */

/* The gradient of a chosen score under `renormalize`: (d S - sum of d_j s_j) / S^2 with S = sum of s_j +
 * 1e-20, as a sum of differences, which keeps its digits where one score outweighs the others. */
__device__ __forceinline__ float renormalised(const route_params &a, const float *d_weights,
                                              const float *scores, const int32_t *chosen, int32_t slot)
{
    float sum = 0.0f, differences = 0.0f;
    for (int32_t j = 0; j < a.top_k; j++) {
        const float s = scores[chosen[j]];
        sum += s;
        differences += s * (d_weights[slot] - d_weights[j]);
    }
    if (sum + 1e-20f != sum) differences += 1e-20f * d_weights[slot];
    sum += 1e-20f;
    return differences / sum / sum;
}

/* s (d - sum of d_f s_f). d is zero but for a few; as scores sum to 1, for those it is s times the sum of
 * s_f (d - d_f). */
__device__ __forceinline__ void softmax_gradient(const route_params &a, const float *scores,
                                                 const float *given, float *d)
{
    const int lane = threadIdx.x % 32;
    float rest = 0.0f, dot = 0.0f;
    for (int32_t e = lane; e < a.experts; e += 32) {
        if (given[e] == 0.0f) rest += scores[e];
        dot += given[e] * scores[e];
    }
    rest = warp_sum(rest);
    dot = warp_sum(dot);
    for (int32_t e = lane; e < a.experts; e += 32) {
        float sum = given[e] == 0.0f ? -dot : given[e] * rest;
        for (int32_t f = 0; given[e] != 0.0f && f < a.experts; f++)
            if (given[f] != 0.0f) sum += scores[f] * (given[e] - given[f]);
        d[e] = scores[e] * sum;
    }
}

/* A warp's shared memory: of a token every expert's score, and the gradients of scores and logits. */
struct gradient_rows {
    float *scores, *given, *d;

    __device__ __forceinline__ gradient_rows(const route_params &a, float *memory, int warp)
        : scores(memory + warp * 3 * a.experts), given(scores + a.experts), d(given + a.experts)
    {
    }
    static size_t bytes(const route_params &a)
    {
        return 3 * ROUTE_WARPS * (size_t)a.experts * sizeof(float);
    }
};

__global__ void __launch_bounds__(ROUTE_THREADS) gradient_of_logits(const __grid_constant__ route_params a)
{
    extern __shared__ float memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const gradient_rows m(a, memory, warp);
    float *const scores = m.scores, *const given = m.given, *const d = m.d;
    const int64_t token = (int64_t)blockIdx.x * ROUTE_WARPS + warp;
    if (token >= a.tokens) return;
    make_scores(a, token, scores);
    for (int32_t e = lane; e < a.experts; e += 32) given[e] = 0.0f;
    __syncwarp();
    const int32_t *chosen = a.chosen + token * a.chosen_s;
    const float *d_weights = a.d_weights + token * a.d_weights_s;
    bool real = true;
    for (int32_t j = 0; j < a.top_k; j++) real = real && chosen[j] >= 0 && chosen[j] < a.experts;
    for (int32_t j = 0; real && lane == 0 && j < a.top_k; j++)
        given[chosen[j]] +=
            a.scale * (a.renormalize ? renormalised(a, d_weights, scores, chosen, j) : d_weights[j]);
    if (!real && lane == 0) raise_status(a.status, QUERN_STATUS_BAD_ID);
    __syncwarp();
    if (a.score == ROUTE_SOFTMAX) softmax_gradient(a, scores, given, d);
    for (int32_t e = lane; e < a.experts; e += 32) {
        const float x = logit_at(a, token, e);
        if (a.score == ROUTE_SIGMOID) d[e] = given[e] * scores[e] * sigmoid_of(-x);
        if (a.score == ROUTE_SQRT_SOFTPLUS)
            d[e] = scores[e] > 0.0f ? given[e] / (2.0f * scores[e]) * sigmoid_of(x) : 0.0f;
        a.d[token * a.d_s + e] = d[e];
        if (a.d_logits == NULL) continue;
        const int64_t at = token * a.d_logits_s + e;
        if (a.d_logits_dtype == QUERN_F32) ((float *)a.d_logits)[at] = d[e];
        else if (a.d_logits_dtype == QUERN_BF16) ((bf16 *)a.d_logits)[at] = from_float<bf16>(d[e]);
        else ((f16 *)a.d_logits)[at] = from_float<f16>(d[e]);
    }
}

__global__ void __launch_bounds__(ROUTE_THREADS) gradient_of_hidden(const __grid_constant__ route_params a)
{
    const int64_t i = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (i >= a.tokens * a.dim) return;
    const int64_t token = i / a.dim, c = i - token * a.dim;
    float sum = 0.0f;
    for (int32_t e = 0; e < a.experts; e++)
        sum = fmaf(a.d[token * a.d_s + e], value_at(a.weight, a.weight_dtype, e * a.weight_s + c), sum);
    const int64_t at = token * a.d_hidden_s + c;
    if (a.d_hidden_dtype == QUERN_F32) ((float *)a.d_hidden)[at] = sum;
    else if (a.d_hidden_dtype == QUERN_BF16) ((bf16 *)a.d_hidden)[at] = from_float<bf16>(sum);
    else ((f16 *)a.d_hidden)[at] = from_float<f16>(sum);
}

__global__ void __launch_bounds__(ROUTE_THREADS) gradient_of_weight(const __grid_constant__ route_params a)
{
    const int64_t i = (int64_t)blockIdx.x * ROUTE_THREADS + threadIdx.x;
    if (i >= a.experts * a.dim) return;
    const int64_t e = i / a.dim, c = i - e * a.dim;
    float sum = 0.0f;
    for (int64_t t = 0; t < a.tokens; t++)
        sum = fmaf(a.d[t * a.d_s + e], value_at(a.hidden, a.hidden_dtype, t * a.hidden_s + c), sum);
    a.d_weight[e * a.d_weight_s + c] = sum;
}

/* Those of both passes. */
static route_params params_of(const route_args *args)
{
    route_params a = route_params_of(args);
    a.d_weights = (const float *)args->d_weights.data;
    a.d_weights_s = args->d_weights.strides[0];
    a.d_s = a.experts;
    if (present(args->d_logits)) {
        a.d_logits = args->d_logits.data;
        a.d_logits_dtype = args->d_logits.dtype;
        a.d_logits_s = args->d_logits.strides[0];
    }
    if (present(args->d_hidden)) {
        a.d_hidden = args->d_hidden.data;
        a.d_hidden_dtype = args->d_hidden.dtype;
        a.d_hidden_s = args->d_hidden.strides[0];
    }
    if (present(args->d_weight)) {
        a.d_weight = (float *)args->d_weight.data;
        a.d_weight_s = args->d_weight.strides[0];
    }
    return a;
}

static size_t carve(route_params &a, const route_args *args, void *workspace)
{
    arena room = arena_on(workspace);
    const size_t matrix = (size_t)(a.tokens * a.experts) * sizeof(float);
    a.d = (float *)arena_take(&room, matrix);
    if (!present(args->logits)) a.computed = (float *)arena_take(&room, matrix);
    return arena_size(&room);
}

static bool route_backward_any_supports(const stage_exec *, const route_args *args, char why[STAGE_WHY_BYTES])
{
    const route_params a = route_params_of(args);
    if (a.experts <= MOST) return true;
    snprintf(why, STAGE_WHY_BYTES, "%d experts: the cuda backend takes gradients of up to %d", (int)a.experts,
             (int)MOST);
    return false;
}

static size_t route_backward_any_bytes(const stage_exec *, const route_args *args)
{
    route_params a = params_of(args);
    return carve(a, args, NULL);
}

static quern_status route_backward_any_run(const stage_exec *exec, const route_args *args, void *workspace)
{
    route_params a = params_of(args);
    const launcher to = {(cudaStream_t)exec->stream, NULL};
    a.status = exec->status;
    carve(a, args, workspace);
    if (a.experts == 0) return QUERN_OK;
    quern_status status = a.computed != NULL ? route_make_logits(to, a) : QUERN_OK;
    if (status == QUERN_OK)
        status = launch_shared(to, gradient_of_logits, dim3(blocks_for(a.tokens, ROUTE_WARPS)), ROUTE_THREADS,
                               gradient_rows::bytes(a), "route_backward", a);
    if (status == QUERN_OK && a.d_hidden != NULL)
        status = launch_shared(to, gradient_of_hidden, dim3(blocks_for(a.tokens * a.dim, ROUTE_THREADS)),
                               ROUTE_THREADS, 0, "route_backward, hidden", a);
    if (status == QUERN_OK && a.d_weight != NULL)
        status = launch_shared(to, gradient_of_weight, dim3(blocks_for(a.experts * a.dim, ROUTE_THREADS)),
                               ROUTE_THREADS, 0, "route_backward, weight", a);
    return status;
}

extern const variant<route_args> route_backward_any = {"route_backward_any", route_backward_any_supports,
                                                       route_backward_any_bytes, route_backward_any_run};
