/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* formats.c - which format a tensor is of: by its dtype, and by what stands beside it. */
#include "checkpoint/checkpoint.h"

#include <string.h>

const char *quern_format_name(quern_format format)
{
    static const char *const names[] = {
        "plain",      "scales",   "nvfp4 modelopt", "nvfp4 compressed-tensors",
        "nvfp4 gguf", "mxfp4",    "mxfp4 blocks",   "mxfp4 gguf",
        "fp8 blocks", "fp8 rows", "fp8 tensor",     "ggml"};
    return (unsigned)format < sizeof names / sizeof *names ? names[format] : "?";
}

/* Compares a name with the first `size` bytes of `module` and a suffix. */
static int compare(const char *name, const char *module, size_t size, const char *suffix)
{
    const int order = strncmp(name, module, size);
    return order != 0 ? order : strcmp(name + size, suffix);
}

const stored_tensor *checkpoint_of_module(const quern_checkpoint *c, const char *name, size_t size,
                                          name_role role)
{
    const char *suffix = checkpoint_name_suffix(role);
    size_t low = 0, high = c->count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        const stored_tensor *t = &c->tensors[c->by_name[middle]];
        const int order = compare(t->name, name, size, suffix);
        if (order == 0) return t;
        if (order > 0) high = middle;
        else low = middle + 1;
    }
    return NULL;
}

const stored_tensor *checkpoint_tensor(const quern_checkpoint *c, const char *name)
{
    return checkpoint_of_module(c, name, strlen(name), NAME_OTHER);
}

const stored_tensor *checkpoint_beside(const quern_checkpoint *c, const stored_tensor *t, name_role role)
{
    return checkpoint_of_module(c, t->name, t->parts.module, role);
}

static bool is(const stored_tensor *t, const char *dtype)
{
    return t != NULL && strcmp(t->dtype, dtype) == 0;
}

/* Bytes of codes: I8 and F4 are DeepSeek's and torch's way to say so. */
static bool is_codes(const stored_tensor *t)
{
    return is(t, "U8") || is(t, "I8") || is(t, "F4");
}

static bool is_exponents(const stored_tensor *t)
{
    return is(t, "F8_E8M0") || is(t, "U8");
}

static quern_format fp8_format(const stored_tensor *weight, const stored_tensor *scale)
{
    int64_t elements = 1;
    for (int32_t i = 0; i < scale->ndim; i++) elements *= scale->shape[i];
    if (elements == 1) return QUERN_FORMAT_FP8_TENSOR;
    /* [N] or [N, 1]; a single column of blocks has fewer */
    const bool rows = elements == scale->shape[0] && weight->ndim > 0 && elements == weight->shape[0];
    return rows || scale->ndim < 2 ? QUERN_FORMAT_FP8_ROWS : QUERN_FORMAT_FP8_BLOCKS;
}

/* The format of a ".weight" of safetensors. */
static quern_format weight_format(const quern_checkpoint *c, const stored_tensor *t)
{
    static const name_role scales[] = {NAME_SCALE, NAME_WEIGHT_SCALE_INV, NAME_WEIGHT_SCALE};
    if (is_codes(t)) {
        if (is(checkpoint_beside(c, t, NAME_WEIGHT_SCALE), "F8_E4M3") ||
            checkpoint_beside(c, t, NAME_WEIGHT_SCALE_2) != NULL)
            return QUERN_FORMAT_NVFP4_MODELOPT;
        return is_exponents(checkpoint_beside(c, t, NAME_SCALE)) ? QUERN_FORMAT_MXFP4 : QUERN_FORMAT_PLAIN;
    }
    if (!is(t, "F8_E4M3")) return QUERN_FORMAT_PLAIN;
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        const stored_tensor *scale = checkpoint_beside(c, t, scales[i]);
        if (scale != NULL) return fp8_format(t, scale);
    }
    return QUERN_FORMAT_PLAIN;
}

/* Whether a tensor with a scale's name stands beside one that it scales. */
static bool scales_another(const quern_checkpoint *c, const stored_tensor *t)
{
    const name_role role = t->parts.role;
    if (role == NAME_SCALES) return checkpoint_beside(c, t, NAME_BLOCKS) != NULL;
    if (role == NAME_WEIGHT_GLOBAL_SCALE) return true;
    if (role < NAME_WEIGHT_SCALE || role > NAME_INPUT_GLOBAL_SCALE) return false;
    return checkpoint_beside(c, t, NAME_WEIGHT) != NULL ||
           checkpoint_beside(c, t, NAME_WEIGHT_PACKED) != NULL ||
           checkpoint_beside(c, t, NAME_OTHER) != NULL; /* a stack, whose name ends in its module's */
}

static quern_format format_of(const quern_checkpoint *c, const stored_tensor *t)
{
    if (scales_another(c, t)) return QUERN_FORMAT_SCALES;
    if (c->gguf != NULL) {
        if (is(t, "NVFP4")) return QUERN_FORMAT_NVFP4_GGUF;
        if (is(t, "MXFP4")) return QUERN_FORMAT_MXFP4_GGUF;
        return t->element < 0 ? QUERN_FORMAT_GGML : QUERN_FORMAT_PLAIN;
    }
    if (t->parts.role == NAME_WEIGHT_PACKED && is_codes(t)) return QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS;
    if (t->parts.role == NAME_BLOCKS && is(t, "U8")) return QUERN_FORMAT_MXFP4_BLOCKS;
    return t->parts.role == NAME_WEIGHT ? weight_format(c, t) : QUERN_FORMAT_PLAIN;
}

void checkpoint_classify(quern_checkpoint *c)
{
    for (size_t i = 0; i < c->count; i++) c->tensors[i].format = format_of(c, &c->tensors[i]);
}
