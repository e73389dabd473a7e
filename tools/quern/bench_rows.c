/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_rows.c - random inputs of a subject, by its rows. */
#include "bench.h"

#include "command.h"
#include "values.h"

#include <quern/cuda.h>
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

bool bench_expert_weight(int64_t depth, int64_t width, uint8_t **codes, uint8_t **scales)
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

/* The extents of a weight "K:N" in a shape; false where the word is none. */
static bool weight_of(const char *word, const formula_symbols *symbols, int64_t *depth, int64_t *width)
{
    char copy[32];
    const char *colon = strchr(word, ':');
    if (colon == NULL) return false;
    snprintf(copy, sizeof copy, "%.*s", (int)(colon - word), word);
    *depth = (int64_t)formula_value(copy, symbols);
    *width = (int64_t)formula_value(colon + 1, symbols);
    return true;
}

/* Each expert gets a copy of the same weight, in memory of its own. */
static quern_status fill_repacked(const quern_tensor *t, const char *shape, const formula_symbols *symbols,
                                  quern_context *ctx)
{
    int64_t depth = 0, width = 0;
    const char *last = strrchr(shape, ' ');
    (void)weight_of(last != NULL ? last + 1 : shape, symbols, &depth, &width);
    const int64_t codes_shape[] = {1, depth / 2, width}, scales_shape[] = {1, depth / 16, width},
                  bytes = t->shape[t->ndim - 1], one_shape[] = {1, bytes};
    uint8_t *codes, *scales;
    quern_moe_prepack_params p = QUERN_MOE_PREPACK_PARAMS_INIT;
    quern_moe_prepack_tensors all = QUERN_MOE_PREPACK_TENSORS_INIT;
    if (!bench_expert_weight(depth, width, &codes, &scales)) return QUERN_ERR_OUT_OF_MEMORY;
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

/* Entries of each query, one of each k-th of those that it sees. */
static void fill_chosen(const quern_tensor *idx, const formula_symbols *symbols)
{
    const int64_t start = (int64_t)formula_value("start", symbols), k = idx->shape[2],
                  ratio = (int64_t)formula_value("r", symbols);
    int32_t *out = idx->data;
    uint64_t state = 1;
    for (int64_t row = 0; row < idx->shape[0] * idx->shape[1]; row++) {
        const int64_t seen = (start + row % idx->shape[1] + 1) / ratio;
        for (int64_t i = 0; i < k; i++) {
            const int64_t low = i * seen / k, end = (i + 1) * seen / k;
            state = state * 6364136223846793005u + 1442695040888963407u;
            out[row * k + i] = seen <= k ? (int32_t)(i < seen ? i : -1)
                                         : (int32_t)(low + (int64_t)(state >> 33) % (end - low));
        }
    }
}

static quern_status fill_input(const quern_tensor *t, const input_row *row, const formula_symbols *symbols,
                               uint32_t seed, quern_context *ctx)
{
    const int64_t count = value_count(t);
    uint8_t *bytes = t->data;
    switch (row->kind) {
    case NORMAL:
    case NORMAL_F32: fill_normal(t, seed); break;
    case CODES: fill_bytes(bytes, count, 0, 256, seed); break;
    case CODES_FP8:
        fill_bytes(bytes, count, 0, 256, seed);
        for (int64_t i = 0; i < count; i++) bytes[i] &= 0xcf;
        break;
    case SCALES: fill_bytes(bytes, count, 0x08, 16, seed); break;
    case POWERS: fill_bytes(bytes, count, 120, 14, seed); break;
    case SMALL: *(float *)t->data = 0.01f; break;
    case CHOSEN: fill_chosen(t, symbols); break;
    case PREPARED: break;
    case ENDS:
        for (int64_t e = 0; e < count; e++)
            ((int32_t *)t->data)[e] = (int32_t)((double)(e + 1) * formula_value("n", symbols));
        break;
    case REPACKED: return fill_repacked(t, row->shape, symbols, ctx);
    }
    return QUERN_OK;
}

/* The bytes of a repacked weight; -1 where the device has no layout for it. */
static double repacked_bytes(const job *j, quern_context *ctx, int64_t n, int64_t k)
{
    int64_t bytes = -1;
    const quern_device device = (quern_device)j->device;
    return quern_nvfp4_repacked_bytes(ctx, device, 0, n, k, &bytes) == QUERN_OK ? (double)bytes : -1;
}

/* False where an extent is no whole number from 0 on. */
static bool shape_of(const job *j, quern_context *ctx, const input_row *row, const formula_symbols *symbols,
                     int64_t shape[QUERN_MAX_DIMS], int32_t *ndim)
{
    const char *at = row->shape;
    for (*ndim = 0; *at != '\0' && *ndim < QUERN_MAX_DIMS; (*ndim)++) {
        char word[32];
        int64_t depth, width;
        const size_t length = strcspn(at, " ");
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        const double extent = weight_of(word, symbols, &depth, &width) ? repacked_bytes(j, ctx, width, depth)
                                                                       : formula_value(word, symbols);
        if (!(extent >= 0 && extent < 0x1p53) || extent != floor(extent)) return false;
        shape[*ndim] = (int64_t)extent;
        at += length + (at[length] == ' ');
    }
    return true;
}

static quern_dtype dtype_of(const input_row *row, const bench_case *c, const quern_op_tensor *t)
{
    if (strcmp(t->dtype, "f32") == 0) return QUERN_F32;
    switch (row->kind) {
    case NORMAL: return c->dtype == QUERN_U8 ? QUERN_BF16 : (quern_dtype)c->dtype;
    case ENDS:
    case PREPARED:
    case CHOSEN: return QUERN_I32;
    case NORMAL_F32:
    case SMALL: return QUERN_F32;
    default: return QUERN_U8;
    }
}

static int make_input(job *j, const bench_case *c, const input_row *row, int tensor,
                      const formula_symbols *symbols, quern_context *ctx)
{
    const quern_dtype dtype = dtype_of(row, c, &j->op->tensors[tensor]);
    const bool gpu = j->device == QUERN_CUDA;
    int64_t shape[QUERN_MAX_DIMS] = {0};
    int32_t ndim;
    size_t bytes;
    if (!shape_of(j, ctx, row, symbols, shape, &ndim) || !job_bytes(dtype, ndim, shape, &bytes))
        return fail(EXIT_INPUT, "%s [%s]: whole extents that make less than 2^63 bytes are accepted",
                    row->tensor, row->shape);
    void *data = job_allocate(j, tensor, bytes + 1), *host = gpu && data != NULL ? malloc(bytes + 1) : data;
    if (host == NULL) return fail(EXIT_MACHINE, "no memory for %s of %zu bytes", row->tensor, bytes);
    quern_tensor t = quern_tensor_contiguous(host, dtype, ndim, shape);
    quern_status status = fill_input(&t, row, symbols, (uint32_t)tensor + 1, ctx);
    if (gpu) {
        if (status == QUERN_OK) status = quern_cuda_copy(0, data, host, bytes, NULL);
        if (status == QUERN_OK) status = quern_cuda_synchronize(0, NULL);
        free(host);
    }
    if (status != QUERN_OK) return fail_status(status);
    t.data = data;
    t.device = (quern_device)j->device;
    job_bind(j, tensor, &t);
    return EXIT_DONE;
}

int bench_row_inputs(job *j, const bench_case *c, const formula_symbols *symbols, quern_context *ctx)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    for (int pass = 0; pass < 2; pass++) { /* those that others make needed come last */
        if (pass == 1 &&
            quern_op_roles(j->op->op, QUERN_OP_FORWARD, &j->params, &j->tensors, roles) != QUERN_OK)
            return fail(EXIT_INPUT, "%s", quern_last_error(NULL));
        for (const input_row *row = c->subject->inputs; row->tensor != NULL; row++) {
            const int tensor = tensor_named(j->op, row->tensor);
            const bool late = row->when != NULL && strcmp(row->when, "needed") == 0;
            if (tensor < 0 || late != (pass == 1)) continue;
            if (late ? roles[tensor] != QUERN_OP_NEEDED
                     : row->when != NULL && !(formula_value(row->when, symbols) > 0))
                continue;
            const int code = make_input(j, c, row, tensor, symbols, ctx);
            if (code != EXIT_DONE) return code;
        }
    }
    return EXIT_DONE;
}
