/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "direct.h"

#include <quern/nvfp4.h>

#include <stdlib.h>
#include <string.h>

static const char *const profiles[] = {"rne", "halfstep", "modelopt", "compressed_tensors", NULL};
static const char *const scales[] = {"rne", "four_over_six", "search", NULL};
static const char *const globals[] = {"tensor", "expert", "row", NULL};
static const char *const layouts[] = {"activation", "weight", NULL};

/* ---- quantize ---- */

static const char *const quantize_tensors[] = {"x",      "offsets", "given_global", "codes", "scales",
                                               "global", NULL};
static const quern_nvfp4_quantize_params quantize_defaults = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
#define AT(member) offsetof(quern_nvfp4_quantize_params, member)
static const direct_param quantize_params[] = {{"profile", AT(profile), DIRECT_CHOICE, profiles},
                                               {"scales", AT(scales), DIRECT_CHOICE, scales},
                                               {"global_per", AT(global_per), DIRECT_CHOICE, globals},
                                               {"weight", AT(weight), DIRECT_FLAG, layouts},
                                               {NULL, 0, DIRECT_FLAG, NULL}};
#undef AT

static quern_status quantize_workspace(quern_context *ctx, const void *params, const void *tensors,
                                       size_t *bytes)
{
    return quern_nvfp4_quantize_workspace(ctx, params, tensors, bytes);
}

static quern_status quantize_run(quern_context *ctx, const quern_exec *exec, const void *params,
                                 const void *tensors, void *workspace, size_t bytes)
{
    return quern_nvfp4_quantize(ctx, exec, params, tensors, workspace, bytes);
}

/* ---- quantisation fused with what follows a product ---- */

static const char *const fused_tensors[] = {"x",           "gate_global", "up_global", "gate_codes",
                                            "gate_scales", "up_codes",    "up_scales", NULL};
static const quern_nvfp4_fused_quantize_params fused_defaults = QUERN_NVFP4_FUSED_QUANTIZE_PARAMS_INIT;
#define AT(member) offsetof(quern_nvfp4_fused_quantize_params, member)
static const direct_param fused_params[] = {{"profile", AT(profile), DIRECT_CHOICE, profiles},
                                            {"swiglu", AT(swiglu), DIRECT_FLAG, NULL},
                                            {"limit", AT(limit), DIRECT_NUMBER, NULL},
                                            {"alpha", AT(alpha), DIRECT_NUMBER, NULL},
                                            {"beta", AT(beta), DIRECT_NUMBER, NULL},
                                            {"granularity", AT(granularity), DIRECT_INTEGER, NULL},
                                            {NULL, 0, DIRECT_FLAG, NULL}};
#undef AT

static quern_status fused_workspace(quern_context *ctx, const void *params, const void *tensors,
                                    size_t *bytes)
{
    return quern_nvfp4_fused_quantize_workspace(ctx, params, tensors, bytes);
}

static quern_status fused_run(quern_context *ctx, const quern_exec *exec, const void *params,
                              const void *tensors, void *workspace, size_t bytes)
{
    return quern_nvfp4_fused_quantize(ctx, exec, params, tensors, workspace, bytes);
}

/* ---- layouts ---- */

static const char *const swizzle_tensors[] = {"linear", "swizzled", "tokens_per_expert", "pad_row_offsets",
                                              NULL};
static const quern_nvfp4_swizzle_params swizzle_defaults = QUERN_NVFP4_SWIZZLE_PARAMS_INIT;
#define AT(member) offsetof(quern_nvfp4_swizzle_params, member)
static const direct_param swizzle_params[] = {{"inverse", AT(inverse), DIRECT_FLAG, NULL},
                                              {"weight", AT(weight), DIRECT_FLAG, layouts},
                                              {NULL, 0, DIRECT_FLAG, NULL}};
#undef AT

static quern_status swizzle_workspace(quern_context *ctx, const void *params, const void *tensors,
                                      size_t *bytes)
{
    return quern_nvfp4_swizzle_workspace(ctx, params, tensors, bytes);
}

static quern_status swizzle_run(quern_context *ctx, const quern_exec *exec, const void *params,
                                const void *tensors, void *workspace, size_t bytes)
{
    return quern_nvfp4_swizzle(ctx, exec, params, tensors, workspace, bytes);
}

static const char *const interleave_tensors[] = {"x", "out", NULL};
static const quern_nvfp4_interleave_params interleave_defaults = QUERN_NVFP4_INTERLEAVE_PARAMS_INIT;
#define AT(member) offsetof(quern_nvfp4_interleave_params, member)
static const direct_param interleave_params[] = {{"inverse", AT(inverse), DIRECT_FLAG, NULL},
                                                 {"granularity", AT(granularity), DIRECT_INTEGER, NULL},
                                                 {NULL, 0, DIRECT_FLAG, NULL}};
#undef AT

static quern_status interleave_workspace(quern_context *ctx, const void *params, const void *tensors,
                                         size_t *bytes)
{
    return quern_nvfp4_interleave_workspace(ctx, params, tensors, bytes);
}

static quern_status interleave_run(quern_context *ctx, const quern_exec *exec, const void *params,
                                   const void *tensors, void *workspace, size_t bytes)
{
    return quern_nvfp4_interleave(ctx, exec, params, tensors, workspace, bytes);
}

/* ---- the list ---- */

static const direct_op operations[] = {
    {"nvfp4-quantize", quantize_tensors, quantize_params, &quantize_defaults, sizeof quantize_defaults,
     quantize_workspace, quantize_run},
    {"nvfp4-fused-quantize", fused_tensors, fused_params, &fused_defaults, sizeof fused_defaults,
     fused_workspace, fused_run},
    {"nvfp4-swizzle", swizzle_tensors, swizzle_params, &swizzle_defaults, sizeof swizzle_defaults,
     swizzle_workspace, swizzle_run},
    {"nvfp4-interleave", interleave_tensors, interleave_params, &interleave_defaults,
     sizeof interleave_defaults, interleave_workspace, interleave_run},
};

const direct_op *direct_at(size_t i)
{
    return i < sizeof operations / sizeof *operations ? &operations[i] : NULL;
}

int32_t direct_tensor_count(const direct_op *op)
{
    int32_t count = 0;
    while (op->tensors[count] != NULL) count++;
    return count;
}

static bool set_choice(int32_t *to, const char *const *words, const char *text)
{
    for (int32_t i = 0; words[i] != NULL; i++)
        if (strcmp(words[i], text) == 0) {
            *to = i;
            return true;
        }
    return false;
}

bool direct_set(const direct_op *op, void *params, const char *name, const char *text)
{
    static const char *const flags[] = {"false", "true", NULL};
    const direct_param *p = op->params;
    char *end = NULL;
    int32_t choice;
    while (p->name != NULL && strcmp(p->name, name) != 0) p++;
    if (p->name == NULL) return false;
    void *to = (char *)params + p->offset;
    switch (p->kind) {
    case DIRECT_FLAG:
    case DIRECT_CHOICE:
        if (!set_choice(&choice, p->words != NULL ? p->words : flags, text)) return false;
        if (p->kind == DIRECT_FLAG) *(bool *)to = choice != 0;
        else memcpy(to, &choice, sizeof choice);
        return true;
    case DIRECT_INTEGER: *(int64_t *)to = strtoll(text, &end, 10); break;
    case DIRECT_NUMBER: *(float *)to = strtof(text, &end); break;
    }
    return end != text && *end == '\0';
}
