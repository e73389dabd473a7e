/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantize.c - values to NVFP4: checks, then one stage. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"
#include "nvfp4/call.h"

typedef struct quantize_call {
    nvfp4_call base;
    quantise_args args;
} quantize_call;

static quern_status check_offsets_wanted(const quern_nvfp4_quantize_tensors *t, quern_nvfp4_global per, bool weight)
{
    const bool wanted = per == QUERN_NVFP4_GLOBAL_EXPERT && !weight;
    if (wanted == (t->offsets != NULL)) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     wanted ? "offsets is NULL: an activation with a global an expert needs them"
                            : "offsets is given: it is accepted with an activation and a global an expert");
}

/* The extents of codes, scales and global, from x's. */
static void code_shapes(const quern_tensor *x, bool weight, quern_nvfp4_global per,
                        const quern_tensor *offsets, view_rule *codes, view_rule *scales, view_rule *global)
{
    const int32_t along = weight ? x->ndim - 2 : x->ndim - 1;
    codes->ndim = scales->ndim = x->ndim;
    for (int32_t i = 0; i < x->ndim; i++) {
        codes->shape[i] = i == along ? 8 * nvfp4_blocks(x->shape[i]) : x->shape[i];
        scales->shape[i] = i == along ? nvfp4_blocks(x->shape[i]) : x->shape[i];
    }
    if (per == QUERN_NVFP4_GLOBAL_TENSOR) return;
    global->ndim = per == QUERN_NVFP4_GLOBAL_ROW ? x->ndim - 1 : 1;
    for (int32_t i = 0; i + 1 < x->ndim && per == QUERN_NVFP4_GLOBAL_ROW; i++) global->shape[i] = x->shape[i];
    if (per == QUERN_NVFP4_GLOBAL_EXPERT) global->shape[0] = weight ? x->shape[0] : offsets->shape[0];
}

static quern_status check_x(const quern_nvfp4_quantize_tensors *t, quern_nvfp4_global per, bool weight, bool run)
{
    const quern_tensor *x = t->x;
    view_rule rule = {"x", x, VIEW_ACTIVATION, x != NULL ? x->ndim : 0, {0}, false, false};
    for (int32_t i = 0; i < QUERN_MAX_DIMS; i++) rule.shape[i] = VIEW_ANY;
    if (x != NULL && (x->ndim < (weight ? 2 : 1) || x->ndim > (weight ? 3 : QUERN_MAX_DIMS - 1)))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "x has %d dimensions: %s are accepted", x->ndim,
                         weight ? "2 or 3 for a weight" : "1 to 5");
    const quern_status status = view_check(&rule, NULL, run);
    if (status != QUERN_OK) return status;
    if (weight && x->shape[x->ndim - 2] % QUERN_NVFP4_BLOCK != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x.shape[%d] is %lld: a weight's K, a multiple of 16, is accepted", x->ndim - 2,
                         (long long)x->shape[x->ndim - 2]);
    if (per == QUERN_NVFP4_GLOBAL_EXPERT && x->ndim != (weight ? 3 : 2))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x has %d dimensions: %s are accepted with a global an expert", x->ndim,
                         weight ? "3 ([E, K, N])" : "2 ([T, D])");
    return QUERN_OK;
}

static quern_status check_coded(const quern_nvfp4_quantize_tensors *t, quern_nvfp4_global per, bool weight, bool run)
{
    quern_status status;
    if ((status = nvfp4_check_global_per(per, weight)) != QUERN_OK ||
        (status = check_x(t, per, weight, run)) != QUERN_OK ||
        (status = check_offsets_wanted(t, per, weight)) != QUERN_OK)
        return status;
    view_rule rules[] = {
        {"x", t->x, VIEW_ACTIVATION, t->x->ndim, {0}, false, false},
        {"codes", t->codes, VIEW_U8, 0, {0}, false, true},
        {"scales", t->scales, VIEW_SCALE, 0, {0}, false, true},
        {"global", t->global, VIEW_F32, 0, {0}, t->given_global != NULL, true},
        {"given_global", t->given_global, VIEW_F32, 0, {0}, true, false},
        {"offsets", t->offsets, VIEW_I32, 1, {VIEW_ANY}, true, false},
    };
    for (int32_t i = 0; i < t->x->ndim; i++) rules[0].shape[i] = t->x->shape[i];
    if (t->offsets != NULL && (status = view_check(&rules[5], t->x, run)) != QUERN_OK) return status;
    code_shapes(t->x, weight, per, t->offsets, &rules[1], &rules[2], &rules[3]);
    rules[4].ndim = rules[3].ndim;
    for (int32_t i = 0; i < rules[3].ndim; i++) rules[4].shape[i] = rules[3].shape[i];
    if ((status = view_check_all(rules, 6, t->x, run)) != QUERN_OK || !run) return status;
    return t->offsets != NULL ? nvfp4_check_offsets(t->offsets, t->x->shape[0]) : QUERN_OK;
}

/* Weights as [E, K, N]. */
static quern_tensor matrices(const quern_tensor *t, bool weight)
{
    return weight && t->ndim == 2 ? view_with_batch(t) : *t;
}

static quern_status plan_quantize(quern_context *ctx, const quern_exec *exec,
                                  const quern_nvfp4_quantize_params *params,
                                  const quern_nvfp4_quantize_tensors *tensors, bool run, quantize_call *call)
{
    quern_status status;
    quern_nvfp4_quantize_params p = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors t = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    *call = (quantize_call){0};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = op_struct(&p, params, "params", "QUERN_NVFP4_QUANTIZE_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_NVFP4_QUANTIZE_TENSORS_INIT")) != QUERN_OK ||
        (status = nvfp4_check_profile(p.profile)) != QUERN_OK)
        return status;
    if (p.scales < QUERN_NVFP4_SCALES_RNE || p.scales > QUERN_NVFP4_SCALES_SEARCH)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "scales is %d: 0 (rne), 1 (four_over_six) or 2 (search) is accepted", (int)p.scales);
    if (p.profile == QUERN_NVFP4_PROFILE_HALFSTEP && p.scales != QUERN_NVFP4_SCALES_RNE)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "scales is %d with profile halfstep: 0 (rne) is accepted", (int)p.scales);
    if ((status = check_coded(&t, p.global_per, p.weight, run)) != QUERN_OK ||
        (status = nvfp4_begin(ctx, exec, t.x, &call->base)) != QUERN_OK ||
        (status = nvfp4_check_stage(&call->base, call->base.backend->quantise.run != NULL,
                                    "quantisation to NVFP4")) != QUERN_OK)
        return status;
    call->args = (quantise_args){.name = "x",
                                 .profile = (quantise_profile)p.profile,
                                 .choice = (quantise_scales)p.scales,
                                 .per = (quantise_global)p.global_per,
                                 .columns = p.weight,
                                 .x = matrices(t.x, p.weight),
                                 .offsets = view_or_absent(t.offsets),
                                 .codes = matrices(t.codes, p.weight),
                                 .scales = matrices(t.scales, p.weight),
                                 .global = nvfp4_global_view(t.global),
                                 .given = nvfp4_global_view(t.given_global)};
    return run ? nvfp4_check_globals(&call->args.given, "given_global") : QUERN_OK;
}

static size_t quantize_bytes(const quantize_call *call)
{
    return nvfp4_workspace_bytes(call->base.backend->quantise.workspace(&call->base.exec, &call->args));
}

quern_status quern_nvfp4_quantize_workspace(quern_context *ctx, const quern_nvfp4_quantize_params *params,
                                            const quern_nvfp4_quantize_tensors *tensors, size_t *bytes)
{
    quantize_call call;
    const quern_status status = plan_quantize(ctx, NULL, params, tensors, false, &call);
    return status != QUERN_OK ? status : nvfp4_give_bytes(quantize_bytes(&call), bytes);
}

quern_status quern_nvfp4_quantize(quern_context *ctx, const quern_exec *exec,
                                  const quern_nvfp4_quantize_params *params,
                                  const quern_nvfp4_quantize_tensors *tensors, void *workspace,
                                  size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    quantize_call call;
    void *aligned;
    quern_status status = plan_quantize(ctx, exec, params, tensors, true, &call);
    if (status == QUERN_OK)
        status =
            nvfp4_check_workspace(&call.base, workspace, workspace_bytes, quantize_bytes(&call), &aligned);
    return status != QUERN_OK ? status
                              : call.base.backend->quantise.run(&call.base.exec, &call.args, aligned);
}
