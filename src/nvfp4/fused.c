/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fused.c - a product's interleaved output to NVFP4: checks, then one stage. */
#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "core/view.h"
#include "nvfp4/call.h"

#include <math.h>

typedef struct fused_call {
    nvfp4_call base;
    fused_quantise_args args;
} fused_call;

static quern_status check_params(const quern_nvfp4_fused_quantize_params *p)
{
    if (!(p->limit >= 0.0f) || isinf(p->limit))
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "limit is %g: 0 (no clamp) or a finite positive number is accepted",
                         (double)p->limit);
    if (!isfinite(p->alpha) || !isfinite(p->beta))
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "alpha is %g and beta %g: finite numbers are accepted",
                         (double)p->alpha, (double)p->beta);
    if (p->granularity < 1 || p->granularity > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "granularity is %lld: 1 to %d is accepted",
                         (long long)p->granularity, INT32_MAX);
    return nvfp4_check_profile(p->profile);
}

static quern_status check_tensors(const quern_nvfp4_fused_quantize_params *p,
                                  const quern_nvfp4_fused_quantize_tensors *t, bool run)
{
    const view_rule x = {"x", t->x, VIEW_ACTIVATION, 2, {VIEW_ANY, VIEW_ANY}, false, false};
    const quern_status status = view_check(&x, NULL, run);
    if (status != QUERN_OK) return status;
    const int64_t rows = t->x->shape[0], columns = t->x->shape[1], blocks = nvfp4_blocks(columns / 2);
    if (columns % 2 != 0 || columns / 2 % p->granularity != 0)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "x.shape[1] is %lld: gate and up in runs of %lld, a multiple of %lld, is accepted",
                         (long long)columns, (long long)p->granularity, 2 * (long long)p->granularity);
    const bool gate = t->gate_codes != NULL || p->swiglu, up = t->up_codes != NULL;
    if (!gate && !up)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "gate_codes and up_codes are NULL: at least one is needed");
    if (up && p->swiglu)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "up_codes is given with swiglu: the result goes to gate_codes alone");
    const view_rule rules[] = {
        {"x", t->x, VIEW_ACTIVATION, 2, {rows, columns}, false, false},
        {"gate_global", gate ? t->gate_global : NULL, VIEW_F32, 0, {0}, !gate, false},
        {"up_global", up ? t->up_global : NULL, VIEW_F32, 0, {0}, !up, false},
        {"gate_codes", t->gate_codes, VIEW_U8, 2, {rows, 8 * blocks}, !gate, true},
        {"gate_scales", gate ? t->gate_scales : NULL, VIEW_SCALE, 2, {rows, blocks}, !gate, true},
        {"up_codes", t->up_codes, VIEW_U8, 2, {rows, 8 * blocks}, !up, true},
        {"up_scales", up ? t->up_scales : NULL, VIEW_SCALE, 2, {rows, blocks}, !up, true},
    };
    return view_check_all(rules, sizeof rules / sizeof *rules, t->x, run);
}

static void fill_part(fused_quantise_args *args, int part, const quern_tensor *codes,
                      const quern_tensor *scales, const quern_tensor *global)
{
    args->codes[part] = *codes;
    args->scales[part] = *scales;
    args->global[part] = nvfp4_global_view(global);
}

static quern_status plan(quern_context *ctx, const quern_exec *exec,
                         const quern_nvfp4_fused_quantize_params *params,
                         const quern_nvfp4_fused_quantize_tensors *tensors, bool run, fused_call *call)
{
    quern_status status;
    quern_nvfp4_fused_quantize_params p = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_fused_quantize_tensors t = QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT;
    *call = (fused_call){0};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = op_struct(&p, params, "params", "QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_NVFP4_FUSED_QUANTIZE_TENSORS_INIT")) != QUERN_OK ||
        (status = check_params(&p)) != QUERN_OK || (status = check_tensors(&p, &t, run)) != QUERN_OK ||
        (status = nvfp4_begin(ctx, exec, t.x, &call->base)) != QUERN_OK ||
        (status = nvfp4_check_stage(&call->base, call->base.backend->fused_quantise.run != NULL,
                                    "fused quantisation to NVFP4")) != QUERN_OK)
        return status;
    call->args = (fused_quantise_args){.profile = (quantise_profile)p.profile,
                                       .swiglu = p.swiglu,
                                       .limit = p.limit,
                                       .alpha = p.alpha,
                                       .beta = p.beta,
                                       .granularity = p.granularity,
                                       .x = *t.x};
    if (t.gate_codes != NULL) fill_part(&call->args, 0, t.gate_codes, t.gate_scales, t.gate_global);
    if (t.up_codes != NULL) fill_part(&call->args, 1, t.up_codes, t.up_scales, t.up_global);
    if (run) status = nvfp4_check_globals(&call->args.global[0], "gate_global");
    if (run && status == QUERN_OK) status = nvfp4_check_globals(&call->args.global[1], "up_global");
    return status;
}

static size_t bytes_of(const fused_call *call)
{
    return nvfp4_workspace_bytes(call->base.backend->fused_quantise.workspace(&call->base.exec, &call->args));
}

quern_status quern_nvfp4_fused_quantize_workspace(quern_context *ctx,
                                                  const quern_nvfp4_fused_quantize_params *params,
                                                  const quern_nvfp4_fused_quantize_tensors *tensors,
                                                  size_t *bytes)
{
    fused_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, false, &call);
    return status != QUERN_OK ? status : nvfp4_give_bytes(bytes_of(&call), bytes);
}

quern_status quern_nvfp4_fused_quantize(quern_context *ctx, const quern_exec *exec,
                                        const quern_nvfp4_fused_quantize_params *params,
                                        const quern_nvfp4_fused_quantize_tensors *tensors, void *workspace,
                                        size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    fused_call call;
    void *aligned;
    quern_status status = plan(ctx, exec, params, tensors, true, &call);
    if (status == QUERN_OK)
        status = nvfp4_check_workspace(&call.base, workspace, workspace_bytes, bytes_of(&call), &aligned);
    return status != QUERN_OK ? status
                              : call.base.backend->fused_quantise.run(&call.base.exec, &call.args, aligned);
}
