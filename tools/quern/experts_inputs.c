/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "experts_inputs.h"

#include "command.h"
#include "values.h"

#include <quern/moe.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

/* Bytes from `least` to below `least` + `span`. */
static void fill_bytes(uint8_t *to, int64_t count, int least, int span, uint32_t seed)
{
    uint32_t state = 2 * seed + 1;
    for (int64_t i = 0; i < count; i++)
        to[i] = (uint8_t)(least + (int)((next_random(&state) >> 8) % (uint32_t)span));
}

bool experts_weight(int64_t depth, int64_t width, uint8_t **codes, uint8_t **scales)
{
    *codes = malloc((size_t)(depth / 2 * width) + 1);
    *scales = malloc((size_t)(depth / 16 * width) + 1);
    if (*codes == NULL || *scales == NULL) {
        free(*codes);
        free(*scales);
        return false;
    }
    fill_bytes(*codes, depth / 2 * width, 0, 256, 3);
    fill_bytes(*scales, depth / 16 * width, 0x08, 16, 4);
    return true;
}

/* Each expert gets a copy of the same weight, in memory of its own. */
static quern_status fill_repacked(const quern_tensor *t, int64_t depth, int64_t width, quern_context *ctx)
{
    const int64_t codes_shape[] = {1, depth / 2, width}, scales_shape[] = {1, depth / 16, width},
                  bytes = t->shape[t->ndim - 1], one_shape[] = {1, bytes};
    uint8_t *codes, *scales;
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors all = QUERN_MOE_PREPACK_TENSORS_INIT;
    if (!experts_weight(depth, width, &codes, &scales)) return QUERN_ERR_OUT_OF_MEMORY;
    const quern_tensor codes_view = quern_tensor_contiguous(codes, QUERN_U8, 3, codes_shape),
                       scales_view = quern_tensor_contiguous(scales, QUERN_U8, 3, scales_shape),
                       one = quern_tensor_contiguous(t->data, QUERN_U8, 2, one_shape);
    all.b_codes = &codes_view;
    all.b_scales = &scales_view;
    all.b_repacked = &one;
    const quern_status status =
        t->ndim > 1 && t->shape[0] == 0 ? QUERN_OK : quern_moe_prepack(ctx, NULL, &p, &all, NULL, 0);
    for (int64_t e = 1; t->ndim > 1 && status == QUERN_OK && e < t->shape[0]; e++)
        memcpy((char *)t->data + e * bytes, t->data, (size_t)bytes);
    free(codes);
    free(scales);
    return status;
}

static quern_status fill_input(const quern_tensor *t, const input_row *row, const formula_symbol *symbols,
                               uint32_t seed, quern_context *ctx)
{
    const int64_t count = value_count(t);
    switch (row->kind) {
    case NORMAL: fill_normal(t, seed); return QUERN_OK;
    case CODES: fill_bytes(t->data, count, 0, 256, seed); return QUERN_OK;
    case SCALES: fill_bytes(t->data, count, 0x08, 16, seed); return QUERN_OK;
    case POWERS: fill_bytes(t->data, count, 120, 14, seed); return QUERN_OK;
    case SMALL: *(float *)t->data = 0.01f; return QUERN_OK;
    case ENDS:
        for (int64_t e = 0; e < count; e++)
            ((int32_t *)t->data)[e] = (int32_t)((double)(e + 1) * formula_value("n", symbols));
        return QUERN_OK;
    case REPACKED:
        return fill_repacked(t, (int64_t)formula_value(row->depth, symbols),
                             (int64_t)formula_value(row->width, symbols), ctx);
    }
    return QUERN_OK;
}

/* False where an extent is no whole number from 0 on. */
static bool shape_of(const input_row *row, const formula_symbol *symbols, int64_t shape[QUERN_MAX_DIMS],
                     int32_t *ndim)
{
    const char *at = row->shape;
    for (*ndim = 0; *at != '\0' && *ndim < QUERN_MAX_DIMS; (*ndim)++) {
        char word[16];
        const size_t length = strcspn(at, " ");
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        const double extent =
            strcmp(word, "bytes") == 0
                ? (double)quern_moe_prepack_bytes((int64_t)formula_value(row->width, symbols),
                                                  (int64_t)formula_value(row->depth, symbols))
                : formula_value(word, symbols);
        if (!(extent >= 0 && extent < 0x1p53) || extent != floor(extent)) return false;
        shape[*ndim] = (int64_t)extent;
        at += length + (at[length] == ' ');
    }
    return true;
}

static quern_dtype dtype_of(const input_row *row, const experts_case *c)
{
    switch (row->kind) {
    case NORMAL: return c->dtype == QUERN_U8 ? QUERN_BF16 : (quern_dtype)c->dtype;
    case ENDS: return QUERN_I32;
    case SMALL: return QUERN_F32;
    default: return QUERN_U8;
    }
}

int experts_input(job *j, const experts_case *c, const input_row *row, const formula_symbol *symbols,
                  quern_context *ctx)
{
    const int tensor = tensor_named(j->op, row->tensor);
    const bool statistic = strcmp(j->op->tensors[tensor].dtype, "f32") == 0;
    const quern_dtype dtype = statistic ? QUERN_F32 : dtype_of(row, c);
    int64_t shape[QUERN_MAX_DIMS] = {0};
    int32_t ndim;
    size_t bytes;
    if (!shape_of(row, symbols, shape, &ndim) || !job_bytes(dtype, ndim, shape, &bytes))
        return fail(EXIT_INPUT, "%s [%s]: whole extents that make less than 2^63 bytes are accepted",
                    row->tensor, row->shape);
    void *data = job_allocate(j, tensor, bytes + 1);
    if (data == NULL) return fail(EXIT_MACHINE, "no memory for %s of %zu bytes", row->tensor, bytes);
    const quern_tensor t = quern_tensor_contiguous(data, dtype, ndim, shape);
    const quern_status status = fill_input(&t, row, symbols, (uint32_t)tensor + 1, ctx);
    if (status != QUERN_OK) return fail_status(status);
    job_bind(j, tensor, &t);
    return EXIT_DONE;
}
