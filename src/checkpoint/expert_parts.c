/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* expert_parts.c - finds the tensors of a layer's experts, whatever they are called and however they are
 * stored. */
#include "checkpoint/experts.h"

#include "core/error.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const words[PARTS] = {"gate", "up", "down"};

static bool has_dtype(const stored_tensor *t, const char *dtype)
{
    return t != NULL && strcmp(t->dtype, dtype) == 0;
}

/* Codes, blocks or values of experts: not their scales and biases. */
static bool is_weight(const stored_tensor *t)
{
    const name_role role = t->parts.role;
    return role == NAME_WEIGHT || role == NAME_WEIGHT_PACKED || role == NAME_BLOCKS ||
           (role == NAME_OTHER && t->parts.stacked);
}

static void note(layer_experts *l, const stored_tensor *t)
{
    const expert_part part = {t, t->parts.stacked, t->parts.part == NAME_GATE_UP};
    if (t->parts.part == NAME_GATE_UP || t->parts.part == NAME_GATE) l->parts[PART_GATE] = part;
    if (t->parts.part == NAME_GATE_UP || t->parts.part == NAME_UP) l->parts[PART_UP] = part;
    if (t->parts.part == NAME_DOWN) l->parts[PART_DOWN] = part;
    if (t->parts.expert >= l->experts) l->experts = t->parts.expert + 1;
}

static int64_t extent(const stored_tensor *t, int32_t dimension)
{
    return dimension < t->ndim ? t->shape[dimension] : 1;
}

/* The tensor with the example's name for another expert. */
static const stored_tensor *of_expert(const layer_experts *l, const expert_part *part, int64_t expert)
{
    char name[1024];
    const char *number = strstr(part->tensor->name, "experts.");
    if (part->stacked || l->shared || number == NULL) return part->tensor;
    number += strlen("experts.");
    const int size = snprintf(name, sizeof name, "%.*s%" PRId64 "%s", (int)(number - part->tensor->name),
                              part->tensor->name, expert, number + strspn(number, "0123456789"));
    return size > 0 && (size_t)size < sizeof name ? checkpoint_tensor(l->checkpoint, name) : NULL;
}

static quern_status does_not_fit(const stored_tensor *t)
{
    return error_set(QUERN_ERR_FORMAT,
                     "tensor '%s': its shape does not go with those of the layer's other experts",
                     TEXT_NAME(t->name));
}

/* Values of a row of codes: two a byte; F4's shape counts elements or pairs. */
static int64_t columns_of(const stored_tensor *t)
{
    if (t->bytes == 0 || t->ndim == 0) return 0; /* the extents of an empty tensor may be any */
    int64_t columns = extent(t, t->ndim - 1), elements = 1;
    switch (t->format) {
    case QUERN_FORMAT_PLAIN:
    case QUERN_FORMAT_FP8_BLOCKS:
    case QUERN_FORMAT_FP8_ROWS:
    case QUERN_FORMAT_FP8_TENSOR:
    case QUERN_FORMAT_NVFP4_GGUF:
    case QUERN_FORMAT_MXFP4_GGUF: return columns;
    case QUERN_FORMAT_MXFP4_BLOCKS: return t->ndim == 4 ? 32 * extent(t, 2) : -1;
    default:
        for (int32_t i = 0; i < t->ndim; i++) elements *= t->shape[i];
        if (has_dtype(t, "F4") && elements > 0) columns = columns * (int64_t)t->bytes / elements;
        return 2 * columns;
    }
}

/* Extents of stacks: of matrices [rows, columns], or of plain ones turned. */
static quern_status measure_stacks(layer_experts *l)
{
    const stored_tensor *up = l->parts[PART_UP].tensor, *down = l->parts[PART_DOWN].tensor;
    const int64_t parts = l->parts[PART_UP].merged ? 2 : 1;
    if (up->ndim < 3 || up->bytes == 0) return does_not_fit(up);
    if (down->ndim < 3 || down->bytes == 0) return does_not_fit(down);
    l->experts = extent(up, 0);
    l->hidden = columns_of(up);
    l->intermediate = columns_of(down);
    const bool straight = extent(up, 1) == parts * l->intermediate && extent(down, 1) == l->hidden;
    l->turned = !straight && experts_are_plain(l);
    if (l->turned) {
        l->hidden = extent(up, 1);
        l->intermediate = extent(down, 1);
    }
    const bool fits =
        !l->turned || (extent(up, 2) == parts * l->intermediate && extent(down, 2) == l->hidden);
    if ((!straight && !l->turned) || !fits || extent(down, 0) != l->experts) return does_not_fit(down);
    return QUERN_OK;
}

/* One format for FP8, however its scales stand: parts of one model may differ in that. */
static quern_format format_of(const stored_tensor *t)
{
    const bool fp8 = t->format >= QUERN_FORMAT_FP8_BLOCKS && t->format <= QUERN_FORMAT_FP8_TENSOR;
    return fp8 ? QUERN_FORMAT_FP8_BLOCKS : t->format;
}

static quern_status check_format(layer_experts *l)
{
    l->format = format_of(l->parts[PART_GATE].tensor);
    for (int part = 0; part < PARTS; part++) {
        const stored_tensor *t = l->parts[part].tensor;
        if (format_of(t) != l->format || t->parts.stacked != l->parts[PART_GATE].stacked)
            return error_set(QUERN_ERR_UNSUPPORTED,
                             "tensor '%s' is %s, '%s' %s: experts of one format are accepted",
                             TEXT_NAME(t->name), quern_format_name(t->format),
                             TEXT_NAME(l->parts[PART_GATE].tensor->name), quern_format_name(l->format));
        const bool floats = t->element == QUERN_F32 || t->element == QUERN_F16 || t->element == QUERN_BF16;
        const bool known =
            (l->format >= QUERN_FORMAT_NVFP4_MODELOPT && l->format <= QUERN_FORMAT_MXFP4_GGUF) ||
            (l->format == QUERN_FORMAT_PLAIN && floats) ||
            (l->format == QUERN_FORMAT_FP8_BLOCKS && !l->parts[part].stacked && !l->parts[part].merged);
        if (!known || t->element != l->parts[PART_GATE].tensor->element)
            return error_set(
                QUERN_ERR_UNSUPPORTED,
                "tensor '%s' is %s of dtype %s: experts in NVFP4, MXFP4, FP8, f32, f16 or bf16 are accepted",
                TEXT_NAME(t->name), quern_format_name(t->format), t->dtype);
    }
    l->dtype = experts_are_plain(l) ? (quern_dtype)l->parts[PART_GATE].tensor->element : QUERN_BF16;
    return QUERN_OK;
}

/* The tensor of a bias beside the stack: its name with "_bias", or the module's ".bias". */
static const stored_tensor *bias_of(const layer_experts *l, const stored_tensor *t)
{
    char name[1024];
    const int size = snprintf(name, sizeof name, "%.*s_bias", (int)t->parts.module, t->name);
    const stored_tensor *found =
        size > 0 && (size_t)size < sizeof name ? checkpoint_tensor(l->checkpoint, name) : NULL;
    return found != NULL ? found : checkpoint_beside(l->checkpoint, t, NAME_BIAS);
}

/* What is laid out, padding included, has fewer bytes than 64 bits count; no expert is without a tensor. */
static quern_status check_memory(const layer_experts *l)
{
    int64_t bytes = 64;
    const bool fits = !__builtin_mul_overflow(bytes, l->experts, &bytes) &&
                      !__builtin_mul_overflow(bytes, l->hidden, &bytes) &&
                      !__builtin_mul_overflow(bytes, l->intermediate, &bytes);
    if (fits && (l->parts[PART_GATE].stacked || l->experts <= (int64_t)l->checkpoint->count)) return QUERN_OK;
    return error_set(QUERN_ERR_FORMAT,
                     "layer %" PRId64 ": expert %" PRId64 " of widths %" PRId64 " and %" PRId64
                     ": as many experts as there are tensors, and fewer than 2^57 weights, are accepted",
                     l->layer, l->experts - 1, l->hidden, l->intermediate);
}

/* Notes the experts' weights; how many of the three projections there are. */
static int find_parts(layer_experts *l)
{
    int found = 0;
    for (size_t i = 0; i < l->checkpoint->count; i++) {
        const stored_tensor *t = &l->checkpoint->tensors[i];
        const bool ours = l->shared ? t->parts.shared : t->parts.in_experts && !t->parts.shared;
        if (ours && t->parts.layer == l->layer && !t->parts.mtp && is_weight(t)) note(l, t);
    }
    for (int part = 0; part < PARTS; part++) found += l->parts[part].tensor != NULL;
    return found;
}

static quern_status no_projection(const layer_experts *l)
{
    int part = 0;
    while (l->parts[part].tensor != NULL) part++;
    return error_set(l->shared ? QUERN_ERR_FORMAT : QUERN_ERR_INVALID_ARGUMENT,
                     "layer %" PRId64 ": the checkpoint has no %s projection of %s there", l->layer,
                     words[part], l->shared ? "the shared expert" : "routed experts");
}

/* Format and extents of experts whose tensors are found. */
static quern_status measure(layer_experts *l)
{
    quern_status status = check_format(l);
    if (status != QUERN_OK) return status;
    const stored_tensor *gate = l->parts[PART_GATE].tensor, *down = l->parts[PART_DOWN].tensor;
    l->paired =
        l->parts[PART_GATE].merged && (l->format == QUERN_FORMAT_MXFP4_BLOCKS || bias_of(l, gate) != NULL);
    if (l->parts[PART_GATE].stacked) {
        status = measure_stacks(l);
    } else {
        l->hidden = columns_of(gate);
        l->intermediate = columns_of(down);
        for (int part = 0; part < PARTS; part++) {
            const stored_tensor *t = l->parts[part].tensor;
            const int64_t rows = part == PART_DOWN ? l->hidden : l->intermediate;
            if (t->ndim != 2 || extent(t, 0) != (l->parts[part].merged ? 2 : 1) * rows)
                return does_not_fit(t);
        }
    }
    if (status != QUERN_OK) return status;
    const int64_t block = l->format <= QUERN_FORMAT_NVFP4_GGUF ? 16 : 32;
    if (l->experts < 1 || l->hidden < 1 || l->intermediate < 1 ||
        (!experts_are_values(l) && (l->hidden % block != 0 || l->intermediate % block != 0)))
        return error_set(QUERN_ERR_UNSUPPORTED,
                         "layer %" PRId64 ": %" PRId64 " experts of widths %" PRId64 " and %" PRId64
                         ": at least one, and multiples of %" PRId64 " for codes, are accepted",
                         l->layer, l->experts, l->hidden, l->intermediate, block);
    return check_memory(l);
}

quern_status experts_find(const quern_checkpoint *c, int64_t layer, layer_experts *l)
{
    *l = (layer_experts){.checkpoint = c, .layer = layer};
    return find_parts(l) == PARTS ? measure(l) : no_projection(l);
}

/* Whether the shared expert's output is scaled by a gate of its own, or a projection has a bias. */
static bool has_gate_or_bias(const layer_experts *l)
{
    for (size_t i = 0; i < l->checkpoint->count; i++) {
        const stored_tensor *t = &l->checkpoint->tensors[i];
        const bool gate =
            strstr(t->name, "shared_expert_gate.") != NULL || strstr(t->name, "gate_inp_shexp.") != NULL;
        if (t->parts.layer == l->layer && !t->parts.mtp && gate) return true;
    }
    for (int part = 0; part < PARTS; part++)
        if (bias_of(l, l->parts[part].tensor) != NULL) return true;
    return false;
}

quern_status experts_find_shared(const layer_experts *routed, layer_experts *l)
{
    *l = (layer_experts){.checkpoint = routed->checkpoint, .layer = routed->layer, .shared = true};
    const int found = find_parts(l);
    if (found == 0) return QUERN_OK;
    if (found < PARTS) return no_projection(l);
    if (has_gate_or_bias(l)) return QUERN_OK;
    l->experts = 1;
    const quern_status status = measure(l);
    if (status == QUERN_OK && l->hidden != routed->hidden) return does_not_fit(l->parts[PART_DOWN].tensor);
    return status;
}

static quern_status missing(const stored_tensor *t, name_role role)
{
    return error_set(QUERN_ERR_FORMAT, "tensor '%.*s%s' is missing beside '%s'", (int)t->parts.module,
                     t->name, checkpoint_name_suffix(role), TEXT_NAME(t->name));
}

/* A number of an f32 tensor, as G; `reciprocal`: the file has 1 / G. */
static quern_status read_global(const stored_tensor *t, int64_t index, bool reciprocal, float *global)
{
    float value;
    if (!has_dtype(t, "F32") || (size_t)(index + 1) * sizeof value > t->bytes)
        return error_set(QUERN_ERR_FORMAT,
                         "tensor '%s' is %s of %zu bytes: F32 with a number for each is accepted",
                         TEXT_NAME(t->name), t->dtype, t->bytes);
    memcpy(&value, t->data + (size_t)index * sizeof value, sizeof value);
    if (reciprocal) value = 1.0f / value;
    if (!isfinite(value) || value <= 0)
        return error_set(QUERN_ERR_FORMAT, "tensor '%s': a global of %g: a finite one above 0 is accepted",
                         TEXT_NAME(t->name), (double)value);
    *global = value;
    return QUERN_OK;
}

/* Scales that stand apart: the tensor, and that its bytes are one for each block. */
static quern_status find_scales(const layer_experts *l, const stored_tensor *t, name_role role, int64_t rows,
                                int64_t blocks, expert_matrix *m)
{
    const stored_tensor *scales = checkpoint_beside(l->checkpoint, t, role);
    if (scales == NULL) return missing(t, role);
    const bool bytes =
        has_dtype(scales, "U8") || has_dtype(scales, role == NAME_WEIGHT_SCALE ? "F8_E4M3" : "F8_E8M0");
    if (!bytes || (int64_t)scales->bytes != rows * blocks)
        return error_set(QUERN_ERR_FORMAT, "tensor '%s' is %s of %zu bytes: %" PRId64 " scales are needed",
                         TEXT_NAME(scales->name), scales->dtype, scales->bytes, rows * blocks);
    m->scales = scales->data;
    m->scales_row_bytes = blocks;
    return QUERN_OK;
}

/* Scales and globals of the tensor that holds `rows` rows of codes, of which the matrix is a part. */
static quern_status read_scales(const layer_experts *l, const stored_tensor *t, int64_t expert, int64_t rows,
                                expert_matrix *m)
{
    const stored_tensor *global = NULL;
    quern_status status = QUERN_OK;
    m->global = 1.0f;
    switch (t->format) {
    case QUERN_FORMAT_NVFP4_MODELOPT:
    case QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS: {
        const bool reciprocal = t->format == QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS;
        const name_role role = reciprocal ? NAME_WEIGHT_GLOBAL_SCALE : NAME_WEIGHT_SCALE_2;
        status = find_scales(l, t, NAME_WEIGHT_SCALE, rows, m->columns / 16, m);
        global = checkpoint_beside(l->checkpoint, t, role);
        if (status == QUERN_OK && global == NULL) return missing(t, role);
        return status == QUERN_OK ? read_global(global, 0, reciprocal, &m->global) : status;
    }
    case QUERN_FORMAT_NVFP4_GGUF:
        global = checkpoint_beside(l->checkpoint, t, NAME_SCALE);
        if (global == NULL) return QUERN_OK;
        return read_global(global, global->bytes > sizeof(float) && l->parts[PART_UP].stacked ? expert : 0,
                           false, &m->global);
    case QUERN_FORMAT_MXFP4: return find_scales(l, t, NAME_SCALE, rows, m->columns / 32, m);
    case QUERN_FORMAT_MXFP4_BLOCKS: return find_scales(l, t, NAME_SCALES, rows, m->columns / 32, m);
    case QUERN_FORMAT_FP8_BLOCKS:
    case QUERN_FORMAT_FP8_ROWS:
    case QUERN_FORMAT_FP8_TENSOR: return experts_fp8_scales(l, t, m);
    default: return QUERN_OK;
    }
}

/* Bytes of `values` values in a row. */
static int64_t row_bytes(const layer_experts *l, int64_t values)
{
    switch (l->format) {
    case QUERN_FORMAT_PLAIN: return values * (int64_t)quern_dtype_size(l->dtype);
    case QUERN_FORMAT_FP8_BLOCKS: return values;
    case QUERN_FORMAT_NVFP4_GGUF: return values / 64 * 36;
    case QUERN_FORMAT_MXFP4_GGUF: return values / 32 * 17;
    default: return values / 2;
    }
}

/* Picks gate or up out of a merged matrix. */
static void pick(const layer_experts *l, int part, expert_matrix *m)
{
    const int64_t first = part == PART_UP ? (l->paired ? 1 : m->rows / 2) : 0, step = l->paired ? 2 : 1;
    m->data += first * m->row_bytes;
    m->row_bytes *= step;
    if (m->scales != NULL) m->scales += first * m->scales_row_bytes;
    m->scales_row_bytes *= step;
    m->rows /= 2;
}

quern_status experts_matrix(const layer_experts *l, int part, int64_t expert, expert_matrix *m)
{
    const expert_part *p = &l->parts[part];
    const stored_tensor *t = of_expert(l, p, expert);
    const int64_t rows = part == PART_DOWN ? l->hidden : l->intermediate * (p->merged ? 2 : 1);
    if (t == NULL)
        return error_set(QUERN_ERR_FORMAT,
                         "layer %" PRId64 ": the %s projection of expert %" PRId64
                         " is missing: there are %" PRId64 " experts",
                         l->layer, words[part], expert, l->experts);
    *m = (expert_matrix){.rows = rows, .columns = part == PART_DOWN ? l->intermediate : l->hidden};
    m->row_bytes = row_bytes(l, m->columns);
    m->column_bytes = experts_are_plain(l) ? (int64_t)quern_dtype_size(l->dtype) : 0;
    const int64_t stack = p->stacked ? l->experts : 1, matrix_bytes = rows * m->row_bytes;
    if (format_of(t) != l->format || (!p->stacked && (t->ndim != 2 || extent(t, 0) != rows)) ||
        columns_of(t) != (l->turned ? rows : m->columns) || (int64_t)t->bytes != stack * matrix_bytes)
        return does_not_fit(t);
    m->data = t->data + (p->stacked ? expert : 0) * matrix_bytes;
    const quern_status status = read_scales(l, t, expert, stack * rows, m);
    if (status != QUERN_OK) return status;
    if (m->scales != NULL && p->stacked) m->scales += expert * rows * m->scales_row_bytes;
    if (l->turned) {
        m->row_bytes = m->column_bytes;
        m->column_bytes = rows * m->row_bytes;
    }
    if (p->merged) pick(l, part, m);
    return QUERN_OK;
}

quern_status experts_input_global(const layer_experts *l, int part, int64_t expert, bool *there,
                                  float *global)
{
    const stored_tensor *t = of_expert(l, &l->parts[part], expert);
    const bool reciprocal = l->format == QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS;
    const stored_tensor *scale =
        t != NULL
            ? checkpoint_beside(l->checkpoint, t, reciprocal ? NAME_INPUT_GLOBAL_SCALE : NAME_INPUT_SCALE)
            : NULL;
    *there = scale != NULL;
    if (scale == NULL) return QUERN_OK;
    return read_global(scale, l->parts[part].stacked && scale->bytes > sizeof(float) ? expert : 0, reciprocal,
                       global);
}

const stored_tensor *experts_bias(const layer_experts *l, int part, int64_t expert, const uint8_t **data,
                                  int64_t *stride)
{
    const expert_part *p = &l->parts[part];
    const stored_tensor *t = of_expert(l, p, expert), *bias = t != NULL ? bias_of(l, t) : NULL;
    if (bias == NULL) return NULL;
    const bool floats =
        bias->element == QUERN_F32 || bias->element == QUERN_F16 || bias->element == QUERN_BF16;
    const int64_t rows = part == PART_DOWN ? l->hidden : l->intermediate * (p->merged ? 2 : 1);
    const int64_t size = floats ? (int64_t)quern_dtype_size((quern_dtype)bias->element) : 1;
    if (!floats || (int64_t)bias->bytes != (p->stacked ? l->experts : 1) * rows * size) return NULL;
    *data = bias->data + (p->stacked ? expert * rows * size : 0);
    *stride = p->merged && l->paired ? 2 : 1;
    if (p->merged && part == PART_UP) *data += (l->paired ? 1 : rows / 2) * size;
    return bias;
}

/* Whether the tensor is of the layer, of this many dimensions, and aligned to its element. */
static bool is_of_layer(const layer_experts *l, const stored_tensor *t, int32_t ndim)
{
    return t->parts.layer == l->layer && !t->parts.mtp && t->ndim == ndim && t->element >= 0 &&
           (uintptr_t)t->data % quern_dtype_size((quern_dtype)t->element) == 0;
}

static bool ends_with(const char *name, const char *end)
{
    const size_t length = strlen(name), n = strlen(end);
    return length >= n && strcmp(name + length - n, end) == 0;
}

const stored_tensor *experts_router(const layer_experts *l)
{
    const quern_checkpoint *c = l->checkpoint;
    for (size_t i = 0; i < c->count; i++) {
        const stored_tensor *t = &c->tensors[i];
        const bool floats = t->element == QUERN_F32 || t->element == QUERN_F16 || t->element == QUERN_BF16;
        if (is_of_layer(l, t, 2) && floats && t->shape[0] == l->experts && t->shape[1] == l->hidden &&
            t->parts.role == NAME_WEIGHT && checkpoint_name_is_router(t->name))
            return t;
    }
    return NULL;
}

/* DeepSeek's names, and GGUF's. A bias of the router's linear, which moves the scores too, is another
 * thing. */
const stored_tensor *experts_correction(const layer_experts *l)
{
    const quern_checkpoint *c = l->checkpoint;
    for (size_t i = 0; i < c->count; i++) {
        const stored_tensor *t = &c->tensors[i];
        if (is_of_layer(l, t, 1) && t->element == QUERN_F32 && t->shape[0] == l->experts &&
            (ends_with(t->name, ".e_score_correction_bias") || ends_with(t->name, "ffn.gate.bias") ||
             ends_with(t->name, "exp_probs_b.bias")))
            return t;
    }
    return NULL;
}

const stored_tensor *experts_table(const layer_experts *l)
{
    const quern_checkpoint *c = l->checkpoint;
    for (size_t i = 0; i < c->count; i++) {
        const stored_tensor *t = &c->tensors[i];
        if (is_of_layer(l, t, 2) && (t->element == QUERN_I64 || t->element == QUERN_I32) &&
            ends_with(t->name, ".tid2eid"))
            return t;
    }
    return NULL;
}
