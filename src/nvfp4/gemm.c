/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.c - the grouped product with NVFP4 weights: checks, then one stage. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "nvfp4/weights.h"

#include <math.h>

typedef struct gemm_call {
    nvfp4_call base;
    nvfp4_weights weights;
    grouped_gemm_args args;
} gemm_call;

/* The extents of a call. */
typedef struct gemm_shape {
    int64_t tokens, n, k, experts, out; /* out: columns of C */
} gemm_shape;

static quern_status check_params(const quern_nvfp4_gemm_params *p)
{
    if (p->activation < QUERN_NVFP4_ACTIVATION_NONE || p->activation > QUERN_NVFP4_ACTIVATION_SWIGLU)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "activation is %d: 0 (none) or 1 (swiglu) is accepted",
                         (int)p->activation);
    if (!(p->limit >= 0.0f) || isinf(p->limit))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "limit is %g: 0 (no clamp) or a finite positive number is accepted",
                         (double)p->limit);
    if (!isfinite(p->alpha) || !isfinite(p->beta))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "alpha is %g and beta %g: finite numbers are accepted",
                         (double)p->alpha, (double)p->beta);
    if (p->granularity < 1 || p->granularity > INT32_MAX ||
        (p->activation != QUERN_NVFP4_ACTIVATION_NONE && 32 % p->granularity != 0))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "granularity is %lld: %s is accepted",
                         (long long)p->granularity,
                         p->activation != QUERN_NVFP4_ACTIVATION_NONE ? "a divisor of 32 with an activation"
                                                                      : "1 or more");
    if (p->accumulate && p->activation != QUERN_NVFP4_ACTIVATION_NONE)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "accumulate is true with an activation: one or the other is accepted");
    if (p->n < 0 || p->n > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "n is %lld: 0 to %d is accepted", (long long)p->n,
                         INT32_MAX);
    const quern_status status = nvfp4_check_profile(p->profile);
    return status == QUERN_OK ? nvfp4_check_global_per(p->a_global_per, false) : status;
}

/* Which of the alternatives are there. */
static quern_status check_presence(const quern_nvfp4_gemm_params *p, const quern_nvfp4_gemm_tensors *t)
{
    if ((t->a != NULL) == (t->a_codes != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "a and a_codes: exactly one of them is accepted");
    if (p->a8 && t->a == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "a8 is true without a: activations in floats are accepted");
    if ((t->a_codes != NULL) != (t->a_scales != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "a_codes and a_scales: both or neither are accepted");
    if (t->pad_row_offsets != NULL && t->a_scales == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "pad_row_offsets is given without a_scales: both or neither are accepted");
    if ((t->b_repacked != NULL) == (t->b_codes != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "b_codes and b_repacked: exactly one of them is accepted");
    if (t->b_repacked != NULL && p->n == 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "n is 0 with b_repacked: the columns of B are accepted");
    if ((t->c != NULL) == (t->c_codes != NULL))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "c and c_codes: exactly one of them is accepted");
    if (p->accumulate && t->c == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "accumulate is true without c: an output in floats is accepted");
    return QUERN_OK;
}

/* The extents, from A and B; weights and their rules where B is not repacked. */
static quern_status read_shape(const quern_nvfp4_gemm_params *p, const quern_nvfp4_gemm_tensors *t, bool run,
                               nvfp4_weights *w, view_rule rules[NVFP4_WEIGHT_RULES], gemm_shape *s)
{
    quern_status status;
    const view_rule firsts[] = {
        {"a", t->a, VIEW_ACTIVATION, 2, {VIEW_ANY, VIEW_ANY}, t->a_codes != NULL, false},
        {"a_codes", t->a_codes, VIEW_U8, 2, {VIEW_ANY, VIEW_ANY}, t->a != NULL, false},
        {"offsets", t->offsets, VIEW_I32, 1, {VIEW_ANY}, false, false}};
    for (int i = 0; i < 3; i++)
        if ((status = view_check(&firsts[i], NULL, run)) != QUERN_OK) return status;
    const quern_tensor *a = t->a != NULL ? t->a : t->a_codes;
    *s = (gemm_shape){.tokens = a->shape[0],
                      .n = p->n,
                      .k = a->shape[1] * (t->a != NULL ? 1 : 2),
                      .experts = t->offsets->shape[0]};
    if (t->b_codes != NULL) {
        if ((status = nvfp4_weights_of(t->b_codes, t->b_scales, p->b_codes, p->b_scales, false, w, rules)) !=
            QUERN_OK)
            return status;
        if (p->n != 0 && p->n != w->n)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "n is %lld: b_codes' %lld columns, or 0, is accepted", (long long)p->n,
                             (long long)w->n);
        s->n = w->n;
        if (w->k != s->k)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "a has K = %lld: b_codes' %lld is accepted",
                             (long long)s->k, (long long)w->k);
        if (w->experts != s->experts)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "offsets.shape[0] is %lld: b_codes' %lld experts are accepted",
                             (long long)s->experts, (long long)w->experts);
    }
    if (s->k % QUERN_NVFP4_BLOCK != 0 || s->tokens > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "a is [%lld, %lld]: below 2^31 rows, and K a multiple of 16, are accepted",
                         (long long)s->tokens, (long long)s->k);
    const bool swiglu = p->activation == QUERN_NVFP4_ACTIVATION_SWIGLU,
               parts = t->b_global != NULL && t->b_global->ndim == 2;
    if ((swiglu || parts) && s->n % (2 * p->granularity) != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "N is %lld: gate and up in runs of %lld, a multiple of %lld, is accepted",
                         (long long)s->n, (long long)p->granularity, 2 * (long long)p->granularity);
    s->out = swiglu ? s->n / 2 : s->n;
    return QUERN_OK;
}

static view_rule global_rule(const char *name, const quern_tensor *t, int32_t ndim, int64_t first,
                             int64_t second)
{
    return (view_rule){name, t, VIEW_F32, ndim, {first, second}, true, false};
}

static quern_status check_tensors(const quern_nvfp4_gemm_params *p, const quern_nvfp4_gemm_tensors *t,
                                  const view_rule weights[NVFP4_WEIGHT_RULES], const gemm_shape *s, bool run)
{
    const quern_tensor *a = t->a != NULL ? t->a : t->a_codes;
    const int64_t blocks = nvfp4_blocks(s->out), repacked = prepack_bytes(s->n, s->k);
    const int32_t b_ndim = t->b_global != NULL ? (t->b_global->ndim < 2 ? t->b_global->ndim : 2) : 0;
    const bool swizzled = t->pad_row_offsets != NULL;
    const view_rule rules[] = {
        {"a", t->a, VIEW_ACTIVATION, 2, {s->tokens, s->k}, true, false},
        {"a_codes", t->a_codes, VIEW_U8, 2, {s->tokens, s->k / 2}, true, false},
        {"a_scales",
         t->a_scales,
         VIEW_SCALE,
         swizzled ? 1 : 2,
         {swizzled ? VIEW_ANY : s->tokens, s->k / 16},
         true,
         false},
        {"pad_row_offsets", t->pad_row_offsets, VIEW_I32, 1, {s->experts + 1}, true, false},
        global_rule("a_global", t->a_global, p->a_global_per != QUERN_NVFP4_GLOBAL_TENSOR,
                    p->a_global_per == QUERN_NVFP4_GLOBAL_EXPERT ? s->experts : s->tokens, 0),
        {"b_repacked", t->b_repacked, VIEW_U8, 2, {s->experts, repacked}, true, false},
        global_rule("b_global", t->b_global, b_ndim, s->experts, 2),
        {"offsets", t->offsets, VIEW_I32, 1, {s->experts}, false, false},
        {"bias", t->bias, VIEW_ACTIVATION, 2, {s->experts, s->n}, true, false},
        {"c", t->c, VIEW_ACTIVATION, 2, {s->tokens, s->out}, true, true},
        {"c_codes", t->c_codes, VIEW_U8, 2, {s->tokens, 8 * blocks}, true, true},
        {"c_scales",
         t->c_codes != NULL ? t->c_scales : NULL,
         VIEW_SCALE,
         2,
         {s->tokens, blocks},
         t->c_codes == NULL,
         true},
        {"c_global", t->c_codes != NULL ? t->c_global : NULL, VIEW_F32, 0, {0}, t->c_codes == NULL, false},
        weights[0],
        weights[1],
    };
    const int32_t count =
        (int32_t)(sizeof rules / sizeof *rules) - (t->b_codes != NULL ? 0 : NVFP4_WEIGHT_RULES);
    const quern_status status = view_check_all(rules, count, a, run);
    return status == QUERN_OK && run ? nvfp4_check_offsets(t->offsets, s->tokens) : status;
}

/* Experts' scales must lie within a_scales, each at a tile. */
static quern_status check_padding(const quern_nvfp4_gemm_tensors *t, const gemm_shape *s)
{
    if (t->pad_row_offsets == NULL || t->pad_row_offsets->device != QUERN_CPU) return QUERN_OK;
    const int32_t *pad = t->pad_row_offsets->data, *ends = t->offsets->data;
    const int64_t row_bytes = (s->k / 16 + 3) / 4 * 4,
                  most = row_bytes > 0 ? t->a_scales->shape[0] / row_bytes : INT32_MAX;
    for (int64_t e = 0; e < s->experts; e++) {
        const int64_t rows = ends[e] - (e > 0 ? ends[e - 1] : 0), needed = (rows + 127) / 128 * 128;
        if (pad[e] < 0 || pad[e] % 128 != 0 || pad[e] + needed > most)
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "pad_row_offsets[%lld] is %d for %lld rows: a multiple of 128 within the %lld "
                             "rows of a_scales is accepted",
                             (long long)e, pad[e], (long long)rows, (long long)most);
    }
    return QUERN_OK;
}

/* B's globals as [1, 1], [E, 1] or [E, 2]. */
static quern_tensor b_global_view(const quern_tensor *g)
{
    return g != NULL && g->ndim == 2 ? *g : nvfp4_global_view(g);
}

static void fill(const quern_nvfp4_gemm_params *p, const quern_nvfp4_gemm_tensors *t, const gemm_shape *s,
                 gemm_call *call)
{
    const nvfp4_weights *w = &call->weights;
    grouped_gemm_args *args = &call->args;
    *args = (grouped_gemm_args){.tokens = s->tokens,
                                .n = s->n,
                                .k = s->k,
                                .int8 = p->a8,
                                .k_major = w->k_major,
                                .order = w->order,
                                .accumulate = p->accumulate,
                                .swiglu = p->activation == QUERN_NVFP4_ACTIVATION_SWIGLU,
                                .limit = p->limit,
                                .alpha = p->alpha,
                                .beta = p->beta,
                                .granularity = p->granularity};
    args->a_per = (quantise_global)p->a_global_per;
    args->profile = (quantise_profile)p->profile;
    args->a = view_or_absent(t->a);
    args->a_codes = view_or_absent(t->a_codes);
    args->a_scales = view_or_absent(t->a_scales);
    args->pad_row_offsets = view_or_absent(t->pad_row_offsets);
    args->a_global = nvfp4_global_view(t->a_global);
    if (t->b_codes != NULL) {
        args->b_codes = w->codes;
        args->b_scales = w->scales;
    }
    args->b_repacked = view_or_absent(t->b_repacked);
    args->b_global = b_global_view(t->b_global);
    args->offsets = *t->offsets;
    args->bias = view_or_absent(t->bias);
    args->c = view_or_absent(t->c);
    if (t->c_codes != NULL) {
        args->c_codes = *t->c_codes;
        args->c_scales = *t->c_scales;
        args->c_global = nvfp4_global_view(t->c_global);
    }
}

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_nvfp4_gemm_params *params,
                         const quern_nvfp4_gemm_tensors *tensors, bool run, gemm_call *call)
{
    quern_status status;
    gemm_shape s;
    view_rule rules[NVFP4_WEIGHT_RULES] = {{0}};
    quern_nvfp4_gemm_params p = QUERN_NVFP4_GEMM_PARAMS_INIT;
    quern_nvfp4_gemm_tensors t = QUERN_NVFP4_GEMM_TENSORS_INIT;
    *call = (gemm_call){0};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = op_struct(&p, params, "params", "QUERN_NVFP4_GEMM_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_NVFP4_GEMM_TENSORS_INIT")) != QUERN_OK ||
        (status = check_params(&p)) != QUERN_OK || (status = check_presence(&p, &t)) != QUERN_OK ||
        (status = read_shape(&p, &t, run, &call->weights, rules, &s)) != QUERN_OK ||
        (status = check_tensors(&p, &t, rules, &s, run)) != QUERN_OK ||
        (status = nvfp4_begin(ctx, exec, t.a != NULL ? t.a : t.a_codes, &call->base)) != QUERN_OK ||
        (status = nvfp4_check_stage(&call->base, call->base.backend->grouped_gemm.run != NULL,
                                    "products with NVFP4 weights")) != QUERN_OK)
        return status;
    fill(&p, &t, &s, call);
    if (!run) return QUERN_OK;
    if ((status = check_padding(&t, &s)) != QUERN_OK ||
        (status = nvfp4_check_globals(&call->args.a_global, "a_global")) != QUERN_OK ||
        (status = nvfp4_check_globals(&call->args.b_global, "b_global")) != QUERN_OK)
        return status;
    return nvfp4_check_globals(&call->args.c_global, "c_global");
}

static size_t bytes_of(const gemm_call *call)
{
    return nvfp4_workspace_bytes(call->base.backend->grouped_gemm.workspace(&call->base.exec, &call->args));
}

quern_status quern_nvfp4_gemm_workspace(quern_context *ctx, const quern_nvfp4_gemm_params *params,
                                        const quern_nvfp4_gemm_tensors *tensors, size_t *bytes)
{
    gemm_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, false, &call);
    return status != QUERN_OK ? status : nvfp4_give_bytes(bytes_of(&call), bytes);
}

quern_status quern_nvfp4_gemm(quern_context *ctx, const quern_exec *exec,
                              const quern_nvfp4_gemm_params *params, const quern_nvfp4_gemm_tensors *tensors,
                              void *workspace, size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    gemm_call call;
    void *aligned;
    quern_status status = plan(ctx, exec, params, tensors, true, &call);
    if (status == QUERN_OK)
        status = nvfp4_check_workspace(&call.base, workspace, workspace_bytes, bytes_of(&call), &aligned);
    return status != QUERN_OK ? status
                              : call.base.backend->grouped_gemm.run(&call.base.exec, &call.args, aligned);
}
