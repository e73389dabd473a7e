/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_route.c - the router: logits, scores, the choice of each token, then a counting sort of all slots by
 * expert. Limit: the product that makes the logits; the sort walks T k slots twice on one thread.
 */
#include "core/parallel.h"
#include "core/view.h"
#include "cpu/kernels/rows/views.h"
#include "cpu/route/route.h"
#include "cpu/levels.h"

#include <math.h>

static route_job plan(const stage_exec *exec, const route_args *args)
{
    const bool given = args->logits.ndim > 0;
    if (args->given_experts.ndim > 0)
        return (route_job){.args = args,
                           .dense = cpu_kernels_for(exec->cpu_level)->attention,
                           .tokens = args->given_experts.shape[0],
                           .experts = args->offsets.shape[0]};
    return (route_job){.args = args,
                       .dense = cpu_kernels_for(exec->cpu_level)->attention,
                       .tokens = given ? args->logits.shape[0] : args->hidden.shape[0],
                       .experts = given ? args->logits.shape[1] : args->weight.shape[0],
                       .dim = given ? 0 : args->hidden.shape[1]};
}

/* Whether the gradient of the logits is made where it is to stand. */
static bool writes_d_logits(const route_args *args)
{
    return args->d_logits.ndim > 0 && args->d_logits.dtype == QUERN_F32;
}

static void carve(const stage_exec *exec, route_job *job, arena *a, bool backward)
{
    const size_t matrix = (size_t)(job->tokens * job->experts) * sizeof(float);
    const bool given = job->args->logits.ndim > 0;
    if (job->args->given_experts.ndim > 0) return;
    job->scores = arena_take(a, (size_t)exec->threads * 3 * (size_t)job->experts * sizeof(float));
    if (!given) job->own = arena_take(a, matrix);
    if (!given) job->scratch = arena_take(a, (size_t)exec->threads * sizeof(route_scratch));
    if (backward && !writes_d_logits(job->args)) job->d_own = arena_take(a, matrix);
    const int64_t shape[] = {job->tokens, job->experts};
    job->logits = given ? job->args->logits : view_on(&job->args->hidden, job->own, QUERN_F32, 2, shape);
}

static size_t workspace_of(const stage_exec *exec, const route_args *args, bool backward)
{
    route_job job = plan(exec, args);
    arena a = arena_on(NULL);
    carve(exec, &job, &a, backward);
    return a.used;
}

size_t cpu_route_workspace(const stage_exec *exec, const route_args *args)
{
    return workspace_of(exec, args, false);
}

size_t cpu_route_backward_workspace(const stage_exec *exec, const route_args *args)
{
    return workspace_of(exec, args, true);
}

/* A token's logits in f32; `room` holds a row. */
static const float *logits_of(const route_job *job, int64_t token, float *room)
{
    const quern_tensor *t = &job->logits;
    const void *row = view_row(t, token);
    if (t->dtype == QUERN_F32) return row;
    job->dense->rows->convert(row, t->dtype, room, QUERN_F32, job->experts);
    return room;
}

static int32_t *entry(const quern_tensor *t, int64_t row, int64_t column)
{
    return (int32_t *)t->data + row * t->strides[0] + column;
}

/* An element of token ids or of the table, i32 or i64. */
static int64_t index_at(const quern_tensor *t, int64_t at)
{
    return t->dtype == QUERN_I64 ? ((const int64_t *)t->data)[at] : ((const int32_t *)t->data)[at];
}

/* The table's expert j of a token. */
static int64_t table_expert(const route_args *args, int64_t token, int64_t j)
{
    return index_at(&args->tid2eid, index_at(&args->input_ids, token) * args->tid2eid.strides[0] + j);
}

/* Greater keys first; among equals the lower index stays ahead; NaN counts as least. */
static bool is_better(float key, float than)
{
    return key > than || (isnan(than) && !isnan(key));
}

/* The top_k greatest keys, as expert ids in rising order. */
static void choose(const float *keys, int64_t experts, int64_t top_k, int32_t *chosen)
{
    int64_t held = 0;
    for (int64_t e = 0; e < experts; e++) { /* chosen is sorted, best first */
        int64_t at = held;
        while (at > 0 && is_better(keys[e], keys[chosen[at - 1]])) at--;
        if (at == top_k) continue;
        if (held < top_k) held++;
        for (int64_t j = held - 1; j > at; j--) chosen[j] = chosen[j - 1];
        chosen[at] = (int32_t)e;
    }
    for (int64_t i = 1; i < held; i++)
        for (int64_t j = i; j > 0 && chosen[j - 1] > chosen[j]; j--) {
            const int32_t lower = chosen[j];
            chosen[j] = chosen[j - 1];
            chosen[j - 1] = lower;
        }
}

static void write_weights(const route_args *args, int64_t token, const float *scores, const int32_t *chosen)
{
    float *weights = (float *)args->weights.data + token * args->weights.strides[0], sum = 0.0f;
    for (int64_t j = 0; j < args->top_k; j++) sum += scores[chosen[j]];
    for (int64_t j = 0; j < args->top_k; j++)
        weights[j] =
            (args->renormalize ? scores[chosen[j]] / (sum + 1e-20f) : scores[chosen[j]]) * args->scale;
}

static void route_token(void *arg, int64_t token, int32_t thread)
{
    const route_job *job = arg;
    const route_args *args = job->args;
    int32_t *chosen = entry(&args->experts, token, 0);
    if (args->given_experts.ndim > 0) {
        const float *from = (const float *)args->given_weights.data + token * args->given_weights.strides[0];
        float *to = (float *)args->weights.data + token * args->weights.strides[0];
        for (int64_t j = 0; j < args->top_k; j++) {
            chosen[j] = *entry(&args->given_experts, token, j);
            to[j] = from[j];
        }
        return;
    }
    float *scores = job->scores + thread * 3 * job->experts, *keys = scores;
    route_scores(args->score, logits_of(job, token, scores + 2 * job->experts), job->experts, scores);
    if (args->tid2eid.ndim > 0) {
        for (int64_t j = 0; j < args->top_k; j++) chosen[j] = (int32_t)table_expert(args, token, j);
    } else {
        if (args->bias.ndim > 0) {
            keys = scores + job->experts;
            for (int64_t e = 0; e < job->experts; e++)
                keys[e] = scores[e] + ((const float *)args->bias.data)[e];
        }
        choose(keys, job->experts, args->top_k, chosen);
    }
    write_weights(args, token, scores, chosen);
}

/* A counting sort of the slots, by expert, then by slot: counts, inclusive sums, each slot to its place. */
static void sort_slots(const route_job *job)
{
    const route_args *args = job->args;
    int32_t *ends = args->offsets.data, *permutation = args->permutation.data;
    for (int64_t e = 0; e < job->experts; e++) ends[e] = 0;
    for (int64_t t = 0; t < job->tokens; t++)
        for (int64_t j = 0; j < args->top_k; j++) ends[*entry(&args->experts, t, j)]++;
    for (int64_t e = 1; e < job->experts; e++) ends[e] += ends[e - 1];
    for (int64_t t = job->tokens - 1; t >= 0;
         t--) /* from the back, so that ends[e] runs down to the expert's first row */
        for (int64_t j = args->top_k - 1; j >= 0; j--)
            permutation[--ends[*entry(&args->experts, t, j)]] = (int32_t)(t * args->top_k + j);
    for (int64_t e = 0; e + 1 < job->experts; e++) ends[e] = ends[e + 1];
    if (job->experts > 0) ends[job->experts - 1] = (int32_t)(job->tokens * args->top_k);
}

/* Checks that each token id has a row in the table, and that the row's entries are experts. */
static quern_status check_table(const stage_exec *exec, const route_job *job)
{
    const route_args *args = job->args;
    for (int64_t t = 0; args->tid2eid.ndim > 0 && t < job->tokens; t++) {
        const int64_t id = index_at(&args->input_ids, t);
        if (id < 0 || id >= args->tid2eid.shape[0])
            return stage_report(exec, (stage_fault){QUERN_STATUS_BAD_ID, &args->input_ids, t,
                                                    .most = args->tid2eid.shape[0] - 1});
        for (int64_t j = 0; j < args->top_k; j++) {
            const int64_t expert = table_expert(args, t, j);
            if (expert < 0 || expert >= job->experts)
                return stage_report(exec, (stage_fault){QUERN_STATUS_BAD_ID, &args->tid2eid,
                                                        id * args->top_k + j, .most = job->experts - 1});
        }
    }
    return QUERN_OK;
}

static quern_status check_experts(const stage_exec *exec, const route_job *job, const quern_tensor *experts)
{
    for (int64_t t = 0; t < job->tokens; t++)
        for (int64_t j = 0; j < job->args->top_k; j++) {
            const int32_t e = *entry(experts, t, j);
            if (e < 0 || e >= job->experts)
                return stage_report(exec, (stage_fault){QUERN_STATUS_BAD_ID, experts,
                                                        t * job->args->top_k + j, .most = job->experts - 1});
        }
    return QUERN_OK;
}

quern_status cpu_route(const stage_exec *exec, const route_args *args, void *workspace)
{
    route_job job = plan(exec, args);
    arena a = arena_on(workspace);
    carve(exec, &job, &a, false);
    const quern_status status = args->given_experts.ndim > 0 ? check_experts(exec, &job, &args->given_experts)
                                                             : check_table(exec, &job);
    if (status != QUERN_OK) return status;
    if (job.own != NULL) route_products(exec, &job);
    parallel_for(exec, job.tokens, route_token, &job);
    sort_slots(&job);
    return QUERN_OK;
}

/* The gradient of a chosen score under `renormalize`: (d S - sum of d_j s_j) / S^2 with S = sum of s_j +
 * 1e-20. As a sum of differences it keeps its digits where one score outweighs the others. One weight alone
 * is 1, and the gradient 0, unless its score is as small as 1e-20. */
static float renormalized_gradient(const float *d_weights, const float *scores, const int32_t *chosen,
                                   int64_t k, int64_t slot)
{
    float sum = 0.0f, differences = 0.0f;
    for (int64_t j = 0; j < k; j++) {
        sum += scores[chosen[j]];
        differences += scores[chosen[j]] * (d_weights[slot] - d_weights[j]);
    }
    if (sum + 1e-20f != sum) differences += 1e-20f * d_weights[slot];
    sum += 1e-20f;
    return differences / sum / sum;
}

/* Writes the gradient of a token's scores to d[E]; it is zero but for the chosen experts. */
static void score_gradient(const route_args *args, int64_t token, const float *scores, int64_t experts,
                           float *d)
{
    const int32_t *chosen = entry(&args->experts, token, 0);
    const float *d_weights = (const float *)args->d_weights.data + token * args->d_weights.strides[0];
    for (int64_t e = 0; e < experts; e++) d[e] = 0.0f;
    for (int64_t j = 0; j < args->top_k; j++)
        d[chosen[j]] += args->scale * (args->renormalize
                                           ? renormalized_gradient(d_weights, scores, chosen, args->top_k, j)
                                           : d_weights[j]);
}

/* s (d - sum of d_f s_f), in place; `given` is room. d is zero but for a few. As scores sum to 1, for those
 * it is s times the sum of s_f (d - d_f), which keeps its digits where one score outweighs the others. */
static void softmax_gradient(const float *scores, int64_t experts, float *d, float *given)
{
    float rest = 0.0f, dot = 0.0f;
    for (int64_t e = 0; e < experts; e++) {
        given[e] = d[e];
        if (d[e] == 0.0f) rest += scores[e];
        dot += d[e] * scores[e];
    }
    for (int64_t e = 0; e < experts; e++) {
        float sum = given[e] == 0.0f ? -dot : given[e] * rest;
        for (int64_t f = 0; given[e] != 0.0f && f < experts; f++)
            if (given[f] != 0.0f) sum += scores[f] * (given[e] - given[f]);
        d[e] = scores[e] * sum;
    }
}

/* Turns the gradient of the scores into that of the logits, in place; `room` is as large. */
static void logit_gradient(route_score score, const float *logits, const float *scores, int64_t experts,
                           float *d, float *room)
{
    if (score == ROUTE_SOFTMAX) softmax_gradient(scores, experts, d, room);
    for (int64_t e = 0; score == ROUTE_SIGMOID && e < experts; e++)
        d[e] *= scores[e] * route_sigmoid(-logits[e]);
    for (int64_t e = 0; score == ROUTE_SQRT_SOFTPLUS && e < experts; e++)
        d[e] = scores[e] > 0.0f ? d[e] / (2.0f * scores[e]) * route_sigmoid(logits[e]) : 0.0f;
}

static void backward_token(void *arg, int64_t token, int32_t thread)
{
    const route_job *job = arg;
    const route_args *args = job->args;
    float *scores = job->scores + thread * 3 * job->experts;
    const float *logits = logits_of(job, token, scores + 2 * job->experts);
    float *d = job->d_own != NULL ? job->d_own + token * job->experts
                                  : (float *)args->d_logits.data + token * args->d_logits.strides[0];
    route_scores(args->score, logits, job->experts, scores);
    score_gradient(args, token, scores, job->experts, d);
    logit_gradient(args->score, logits, scores, job->experts, d, scores + job->experts);
    if (args->d_logits.ndim > 0 && !writes_d_logits(args))
        job->dense->rows->convert(d, QUERN_F32, view_row(&args->d_logits, token), args->d_logits.dtype,
                                  job->experts);
}

quern_status cpu_route_backward(const stage_exec *exec, const route_args *args, void *workspace)
{
    route_job job = plan(exec, args);
    arena a = arena_on(workspace);
    carve(exec, &job, &a, true);
    const quern_status status = check_experts(exec, &job, &args->experts);
    if (status != QUERN_OK) return status;
    if (job.own != NULL) route_products(exec, &job);
    parallel_for(exec, job.tokens, backward_token, &job);
    const float *d = job.d_own != NULL ? job.d_own : args->d_logits.data;
    if (job.own != NULL)
        route_gradients(exec, &job, d, job.d_own != NULL ? job.experts : args->d_logits.strides[0]);
    return QUERN_OK;
}
