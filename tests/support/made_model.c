/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "made_model.h"

#include "cmocka_c11.h"

#include <quern/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Values in -1 ... 1, or bytes. */
static void fill(made_tensor *t, int64_t bytes)
{
    uint32_t state = 1;
    uint8_t *data = t->tensor.data;
    for (const char *at = t->name; *at != '\0'; at++) state = state * 31 + (uint8_t)*at;
    for (int64_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (uint8_t)(state >> 24);
    }
    for (int64_t i = 0; t->tensor.dtype == QUERN_F32 && i < bytes / 4; i++)
        ((float *)t->tensor.data)[i] = (float)((int)data[4 * i] - 128) / 128.0f;
    for (int64_t i = 0; t->tensor.dtype == QUERN_BF16 && i < bytes / 2; i++) /* exponents of 2^-15 ... 1 */
        ((uint16_t *)t->tensor.data)[i] = (uint16_t)(0x3800 | (data[2 * i] << 8 & 0x8700) | data[2 * i + 1]);
}

void *made_add(made_model *m, quern_dtype dtype, const char *name, int ndim, const int64_t *shape)
{
    assert_true(m->count < MADE_TENSORS && strlen(name) < sizeof m->tensors[0].name);
    made_tensor *t = &m->tensors[m->count++];
    strcpy(t->name, name);
    int64_t bytes = (int64_t)quern_dtype_size(dtype);
    for (int i = 0; i < ndim; i++) bytes *= shape[i];
    t->tensor = quern_tensor_contiguous(malloc((size_t)bytes + 1), dtype, ndim, shape);
    assert_non_null(t->tensor.data);
    fill(t, bytes);
    return t->tensor.data;
}

void made_number(made_model *m, const char *name, int ndim, float value)
{
    *(float *)made_add(m, QUERN_F32, name, ndim, (const int64_t[]){1}) = value;
}

static int find(const made_model *m, const char *name)
{
    for (int i = 0; i < m->count; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return i;
    fail_msg("the made model has no '%s'", name);
    return -1;
}

void *made_data(const made_model *m, const char *name)
{
    return m->tensors[find(m, name)].tensor.data;
}

void made_retype(made_model *m, const char *name, quern_dtype dtype)
{
    m->tensors[find(m, name)].tensor.dtype = dtype;
}

void made_remove(made_model *m, const char *name)
{
    const int i = find(m, name);
    free(m->tensors[i].tensor.data);
    m->tensors[i] = m->tensors[--m->count];
}

static const char *joined(const char *module, const char *suffix)
{
    static char name[2][160];
    static int next;
    next = 1 - next;
    snprintf(name[next], sizeof name[next], "%s%s", module, suffix);
    return name[next];
}

/* Codes, and scales of NVFP4 blocks: bytes that are numbers above 0. */
static void codes_and_scales(made_model *m, const char *codes, const char *module, int64_t rows,
                             int64_t columns)
{
    made_add(m, QUERN_U8, joined(module, codes), 2, (const int64_t[]){rows, columns / 2});
    uint8_t *scales =
        made_add(m, QUERN_E4M3, joined(module, ".weight_scale"), 2, (const int64_t[]){rows, columns / 16});
    for (int64_t i = 0; i < rows * columns / 16; i++) scales[i] = (uint8_t)(0x60 + scales[i] % 0x1f);
}

void made_modelopt(made_model *m, const char *module, int64_t rows, int64_t columns, float global)
{
    codes_and_scales(m, ".weight", module, rows, columns);
    made_number(m, joined(module, ".weight_scale_2"), 0, global);
}

void made_compressed_tensors(made_model *m, const char *module, int64_t rows, int64_t columns, float global)
{
    codes_and_scales(m, ".weight_packed", module, rows, columns);
    made_number(m, joined(module, ".weight_global_scale"), 1, 1.0f / global);
}

void made_mxfp4(made_model *m, const char *module, int64_t rows, int64_t columns)
{
    made_add(m, QUERN_I8, joined(module, ".weight"), 2, (const int64_t[]){rows, columns / 2});
    uint8_t *scales =
        made_add(m, QUERN_E8M0, joined(module, ".scale"), 2, (const int64_t[]){rows, columns / 32});
    for (int64_t i = 0; i < rows * columns / 32; i++) scales[i] = (uint8_t)(118 + scales[i] % 8);
}

void made_fp8(made_model *m, const char *module, int64_t rows, int64_t columns, int64_t block)
{
    uint8_t *weight = made_add(m, QUERN_E4M3, joined(module, ".weight"), 2, (const int64_t[]){rows, columns});
    for (int64_t i = 0; i < rows * columns; i++) weight[i] = (uint8_t)(weight[i] & 0xf7); /* no NaN */
    const int64_t shape[] = {(rows + block - 1) / block, (columns + block - 1) / block};
    uint8_t *scales = made_add(m, QUERN_E8M0, joined(module, ".scale"), 2, shape);
    for (int64_t i = 0; i < shape[0] * shape[1]; i++) scales[i] = (uint8_t)(118 + scales[i] % 8);
}

void made_write(const made_model *m, const char *path, int first, int end)
{
    quern_safetensors_item items[MADE_TENSORS];
    for (int i = first; i < end; i++)
        items[i - first] = (quern_safetensors_item){m->tensors[i].name, &m->tensors[i].tensor};
    if (quern_safetensors_save(path, items, (size_t)(end - first), NULL, 0) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
}

void made_write_shards(const made_model *m, const char *folder, int shards)
{
    char path[512];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "{\"metadata\": {\"total_size\": 0}, \"weight_map\": {");
    for (int s = 0; s < shards; s++) {
        const int first = m->count * s / shards, end = m->count * (s + 1) / shards;
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", s + 1, shards);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        made_write(m, path, first, end);
        for (int i = first; i < end; i++)
            fprintf(f, "%s\n\"%s\": \"%s\"", i > 0 ? "," : "", m->tensors[i].name, name);
    }
    fprintf(f, "}}\n");
    assert_int_equal(fclose(f), 0);
}

void made_free(made_model *m)
{
    for (int i = 0; i < m->count; i++) free(m->tensors[i].tensor.data);
    m->count = 0;
}
