/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checks.c - scales that are missing or do not fit, globals that differ or are upside down, bad values. */
#include "inspect/decode.h"
#include "inspect/inspect.h"

#include "core/text.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static int64_t extent(const inspected *t, int32_t from_end)
{
    return t->info.ndim > from_end ? t->info.shape[t->info.ndim - 1 - from_end] : 1;
}

static void missing(inspection *in, const inspected *t, const char *suffix)
{
    report(in, "missing-scale", "'%.*s%s' is missing beside '%s': without it the codes have no values",
           (int)t->parts.module, t->info.name, suffix, TEXT_NAME(t->info.name));
}

/* The scale is there, of one of two dtypes, and has as many elements as blocks of `block` need. */
static void check_blocks(inspection *in, const inspected *t, name_role role, int64_t codes_per_row,
                         int64_t block, const char *dtype, const char *other)
{
    const inspected *scales = beside(in, t, role);
    if (scales == NULL) {
        missing(in, t, checkpoint_name_suffix(role));
        return;
    }
    if (!has_dtype(scales, dtype) && !has_dtype(scales, other)) {
        report(in, "scale-dtype", "'%s' is %s: %s is accepted beside '%s'", TEXT_NAME(scales->info.name),
               scales->info.dtype, dtype, TEXT_NAME(t->info.name));
        return;
    }
    const int64_t rows = codes_per_row > 0 ? 2 * (int64_t)t->info.bytes / codes_per_row : 0;
    if (codes_per_row % block != 0 || (int64_t)scales->info.bytes != rows * (codes_per_row / block))
        report(in, "scale-shape",
               "'%s' has %zu scales: %" PRId64 " rows of %" PRId64 " codes with one for each %" PRId64
               " need %" PRId64,
               TEXT_NAME(scales->info.name), scales->info.bytes, rows, codes_per_row, block,
               rows * ((codes_per_row + block - 1) / block));
}

/* The global is there, a number above 0. */
static void check_global(inspection *in, const inspected *t, name_role role)
{
    const inspected *global = beside(in, t, role);
    if (global == NULL) {
        missing(in, t, checkpoint_name_suffix(role));
        return;
    }
    if (!has_dtype(global, "F32") ||
        (t->info.format != QUERN_FORMAT_NVFP4_GGUF && elements_of(global) != 1)) {
        report(in, "scale-dtype", "'%s' is %s with %" PRId64 " elements: one F32 is accepted",
               TEXT_NAME(global->info.name), global->info.dtype, elements_of(global));
        return;
    }
    for (int64_t i = 0; i < elements_of(global); i++) {
        const float g = number_of(global, i);
        if (isfinite(g) && g > 0) continue;
        report(in, "bad-scale", "'%s' is %g: a finite global above 0 is accepted",
               TEXT_NAME(global->info.name), (double)g);
        return;
    }
}

/* Codes in a row: two a byte; F4's shape counts elements or pairs. */
static int64_t row_codes(const inspected *t)
{
    if (t->info.bytes == 0) return 0; /* its extents may be any */
    int64_t codes = 2 * extent(t, 0);
    if (t->info.format == QUERN_FORMAT_MXFP4_BLOCKS) codes *= extent(t, 1);
    if (has_dtype(t, "F4") && elements_of(t) > 0)
        codes = 2 * extent(t, 0) * (int64_t)t->info.bytes / elements_of(t);
    return codes;
}

static void check_fp8(inspection *in, inspected *t)
{
    static const name_role roles[] = {NAME_SCALE, NAME_WEIGHT_SCALE_INV, NAME_WEIGHT_SCALE};
    const inspected *scale = NULL;
    for (size_t i = 0; i < 3 && scale == NULL; i++) scale = beside(in, t, roles[i]);
    const statistics_source source = source_of(in, t);
    decoder d;
    if (scale == NULL || t->info.ndim != 2 || decoder_begin(&source, &d)) return;
    report(in, "scale-shape",
           "'%s' does not fit '%s' [%" PRId64 ", %" PRId64
           "]: one scale, one a row, or one for each block of 128 x 128 or 32 x 32 is accepted",
           TEXT_NAME(scale->info.name), TEXT_NAME(t->info.name), extent(t, 1), extent(t, 0));
}

/* Whether another NVFP4 tensor of the file has a scale beside it: then all need one. */
static bool gguf_has_scales(const inspection *in)
{
    for (size_t i = 0; i < in->count; i++)
        if (in->tensors[i].info.format == QUERN_FORMAT_NVFP4_GGUF &&
            beside(in, &in->tensors[i], NAME_SCALE) != NULL)
            return true;
    return false;
}

/* Codes or FP8 that nothing scales, and scales of nothing. */
static void check_plain(inspection *in, const inspected *t)
{
    const bool codes = has_dtype(t, "U8") || has_dtype(t, "I8") || has_dtype(t, "F4");
    const bool alone = beside(in, t, NAME_WEIGHT_SCALE) == NULL && beside(in, t, NAME_SCALE) == NULL &&
                       beside(in, t, NAME_WEIGHT_SCALE_INV) == NULL;
    if (t->parts.role == NAME_WEIGHT && t->info.ndim == 2 && extent(t, 0) > 1 && alone &&
        (codes || has_dtype(t, "F8_E4M3")))
        missing(in, t, codes ? ".weight_scale' or '.scale" : ".scale' or '.weight_scale");
    if (t->parts.role == NAME_WEIGHT_SCALE || t->parts.role == NAME_WEIGHT_SCALE_2 ||
        t->parts.role == NAME_WEIGHT_SCALE_INV)
        report(in, "missing-weight", "'%s' scales nothing: '%.*s.weight' is missing", TEXT_NAME(t->info.name),
               (int)t->parts.module, t->info.name);
}

void check_scales(inspection *in)
{
    const bool gguf_scales = gguf_has_scales(in);
    for (size_t i = 0; i < in->count; i++) {
        inspected *t = &in->tensors[i];
        switch (t->info.format) {
        case QUERN_FORMAT_NVFP4_MODELOPT:
            check_blocks(in, t, NAME_WEIGHT_SCALE, row_codes(t), 16, "F8_E4M3", "U8");
            check_global(in, t, NAME_WEIGHT_SCALE_2);
            break;
        case QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS:
            check_blocks(in, t, NAME_WEIGHT_SCALE, row_codes(t), 16, "F8_E4M3", "U8");
            check_global(in, t, NAME_WEIGHT_GLOBAL_SCALE);
            break;
        case QUERN_FORMAT_NVFP4_GGUF:
            if (gguf_scales) check_global(in, t, NAME_SCALE);
            break;
        case QUERN_FORMAT_MXFP4: check_blocks(in, t, NAME_SCALE, row_codes(t), 32, "F8_E8M0", "U8"); break;
        case QUERN_FORMAT_MXFP4_BLOCKS:
            check_blocks(in, t, NAME_SCALES, row_codes(t), 32, "U8", "F8_E8M0");
            break;
        case QUERN_FORMAT_FP8_BLOCKS:
        case QUERN_FORMAT_FP8_ROWS:
        case QUERN_FORMAT_FP8_TENSOR: check_fp8(in, t); break;
        case QUERN_FORMAT_PLAIN: check_plain(in, t); break;
        default: break;
        }
    }
}

/* The role of a global, of a weight or of activations, that a tensor has. */
static bool is_global(const inspection *in, const inspected *t)
{
    const inspected *weight = beside(in, t, NAME_WEIGHT);
    if (weight == NULL) weight = beside(in, t, NAME_OTHER); /* a stack, whose name ends in its module's */
    if (t->parts.role == NAME_SCALE) return weight != NULL && weight->info.format == QUERN_FORMAT_NVFP4_GGUF;
    return t->parts.role == NAME_WEIGHT_SCALE_2 || t->parts.role == NAME_WEIGHT_GLOBAL_SCALE;
}

/* Compares two globals that loaders take for one. */
static void compare_globals(inspection *in, const inspected *a, const inspected *b)
{
    const int64_t n = elements_of(a) < elements_of(b) ? elements_of(a) : elements_of(b);
    for (int64_t i = 0; i < n; i++) {
        const float x = number_of(a, i), y = number_of(b, i);
        if (x == y) continue;
        char expert[40] = "";
        if (n > 1) snprintf(expert, sizeof expert, " of expert %" PRId64, i);
        report(in, "unequal-globals",
               "'%s' is %.9g and '%s' %.9g%s: loaders that fuse them take one for both",
               TEXT_NAME(a->info.name), (double)x, TEXT_NAME(b->info.name), (double)y, expert);
        return;
    }
}

/* A reciprocal under the name of the number makes weights of millions, a number under that of the
 * reciprocal of millionths. A global is the weights' largest magnitude over 2688. */
static void check_sense(inspection *in, const inspected *t)
{
    const bool reciprocal = t->parts.role == NAME_WEIGHT_GLOBAL_SCALE;
    for (int64_t i = 0; i < elements_of(t); i++) {
        const float g = number_of(t, i);
        if (!isfinite(g) || g <= 0 || (reciprocal ? g >= 1 : g <= 1)) continue;
        const double meant = 2688.0 * (reciprocal ? 1.0 / (double)g : (double)g);
        report(in, "reciprocal",
               "'%s' is %.9g, under a name that means the %s: weights would be up to %.3g, by its reciprocal "
               "%.3g",
               TEXT_NAME(t->info.name), (double)g, reciprocal ? "reciprocal of the global" : "global itself",
               meant, 2688.0 * 2688.0 / meant);
        return;
    }
}

void check_globals(inspection *in)
{
    for (size_t i = 0; i < in->count; i++) {
        const inspected *a = &in->tensors[in->by_name[i]];
        if (!is_global(in, a)) continue;
        check_sense(in, a);
        if (a->parts.part == NAME_NO_PART) continue;
        for (size_t j = i + 1; j < in->count; j++) {
            const inspected *b = &in->tensors[in->by_name[j]];
            if (strncmp(a->info.name, b->info.name, a->parts.parent) != 0)
                break; /* the end of the parent's */
            if (b->parts.role == a->parts.role && is_global(in, b) &&
                checkpoint_names_fused(a->info.name, &a->parts, b->info.name, &b->parts))
                compare_globals(in, a, b);
        }
    }
}

void check_values(inspection *in)
{
    for (size_t i = 0; i < in->count; i++) {
        const inspected *t = &in->tensors[i];
        const statistics *s = &t->values;
        if (!s->known) continue;
        if (s->bad_scales > 0)
            report(in, "bad-scale", "'%s': %" PRId64 " of %" PRId64 " blocks have a scale that is no number",
                   TEXT_NAME(t->info.name), s->bad_scales, s->blocks);
        else if (s->not_finite > 0 && t->info.format != QUERN_FORMAT_SCALES)
            report(in, "not-finite", "'%s': %" PRId64 " of %" PRId64 " values are infinite or NaN",
                   TEXT_NAME(t->info.name), s->not_finite, s->elements);
    }
}
