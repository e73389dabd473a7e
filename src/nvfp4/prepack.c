/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* prepack.c - experts' weights to the backend's own layout and back: checks, then one stage. */
#include <quern/moe.h>

#include "core/error.h"
#include "core/float_state.h"
#include "core/op.h"
#include "nvfp4/weights.h"

typedef struct prepack_call {
    nvfp4_call base;
    nvfp4_weights weights;
    prepack_args args;
} prepack_call;

int64_t quern_moe_prepack_bytes(int64_t n, int64_t k)
{
    return n < 0 || k < 0 ? 0 : prepack_bytes(n, k);
}

static quern_status plan(quern_context *ctx, const quern_exec *exec, const quern_moe_prepack_params *params,
                         const quern_moe_prepack_tensors *tensors, bool run, prepack_call *call)
{
    quern_status status;
    view_rule rules[NVFP4_WEIGHT_RULES + 1];
    nvfp4_weights *w = &call->weights;
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors t = QUERN_MOE_PREPACK_TENSORS_INIT;
    *call = (prepack_call){0};
    if (ctx == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "ctx is NULL: create one with quern_context_create()");
    if ((status = op_struct(&p, params, "params", "QUERN_MOE_PREPACK_PARAMS_INIT")) != QUERN_OK ||
        (status = op_struct(&t, tensors, "tensors", "QUERN_MOE_PREPACK_TENSORS_INIT")) != QUERN_OK ||
        (status = nvfp4_weights_of(t.b_codes, t.b_scales, p.b_codes, p.b_scales, p.inverse, w, rules)) !=
            QUERN_OK)
        return status;
    rules[NVFP4_WEIGHT_RULES] = (view_rule){
        "b_repacked", t.b_repacked, VIEW_U8, 2, {w->experts, prepack_bytes(w->n, w->k)}, false, !p.inverse};
    if ((status = view_check_all(rules, NVFP4_WEIGHT_RULES + 1, &w->codes, run)) != QUERN_OK ||
        (status = nvfp4_begin(ctx, exec, &w->codes, &call->base)) != QUERN_OK)
        return status;
    call->args =
        (prepack_args){p.inverse, w->k_major, w->order, w->n, w->k, w->codes, w->scales, *t.b_repacked};
    return nvfp4_check_stage(&call->base, call->base.backend->prepack.run != NULL,
                             "repacking of NVFP4 weights");
}

quern_status quern_moe_prepack_workspace(quern_context *ctx, const quern_moe_prepack_params *params,
                                         const quern_moe_prepack_tensors *tensors, size_t *bytes)
{
    prepack_call call;
    const quern_status status = plan(ctx, NULL, params, tensors, false, &call);
    return status != QUERN_OK ? status : nvfp4_give_bytes(0, bytes);
}

quern_status quern_moe_prepack(quern_context *ctx, const quern_exec *exec,
                               const quern_moe_prepack_params *params,
                               const quern_moe_prepack_tensors *tensors, void *workspace,
                               size_t workspace_bytes)
{
    DEFAULT_FLOAT_STATE;
    prepack_call call;
    (void)workspace;
    (void)workspace_bytes;
    const quern_status status = plan(ctx, exec, params, tensors, true, &call);
    return status != QUERN_OK ? status : call.base.backend->prepack.run(&call.base.exec, &call.args, NULL);
}
