/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* inspection.c - the list of tensors, and what the checks share. Nothing here belongs to the command
 * alone. */
#include "inspect/inspect.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_name(const void *a, const void *b, void *arg)
{
    const inspection *in = arg;
    return strcmp(in->tensors[*(const size_t *)a].info.name, in->tensors[*(const size_t *)b].info.name);
}

bool inspection_list(inspection *in)
{
    in->count = quern_checkpoint_count(in->checkpoint);
    in->tensors = calloc(in->count + 1, sizeof *in->tensors);
    in->by_name = calloc(in->count + 1, sizeof *in->by_name);
    if (in->tensors == NULL || in->by_name == NULL) return false;
    for (size_t i = 0; i < in->count; i++) {
        in->tensors[i].info = (quern_checkpoint_tensor)QUERN_CHECKPOINT_TENSOR_INIT;
        (void)quern_checkpoint_info(in->checkpoint, i,
                                    &in->tensors[i].info); /* the number is within the list */
        in->tensors[i].parts = checkpoint_name_read(in->tensors[i].info.name);
        in->by_name[i] = i;
    }
    qsort_r(in->by_name, in->count, sizeof *in->by_name, by_name, in);
    return true;
}

void check_all(inspection *in)
{
    check_scales(in);
    check_globals(in);
    check_values(in);
    check_layers(in);
    check_config(in);
}

void inspection_close(inspection *in)
{
    for (size_t i = 0; i < in->problem_count; i++) free(in->problems[i].sentence);
    free(in->problems);
    free(in->tensors);
    free(in->by_name);
    json_decref(in->config);
    quern_checkpoint_close(in->checkpoint);
}

void report(inspection *in, const char *kind, const char *format, ...)
{
    char *sentence = NULL;
    va_list args;
    va_start(args, format);
    const int size = vasprintf(&sentence, format, args);
    va_end(args);
    problem *grown = size >= 0 ? realloc(in->problems, (in->problem_count + 1) * sizeof *grown) : NULL;
    if (grown == NULL) {
        if (size >= 0) free(sentence);
        in->no_memory = true;
        return;
    }
    in->problems = grown;
    in->problems[in->problem_count++] = (problem){kind, sentence};
}

const inspected *named(const inspection *in, const char *name)
{
    const int64_t number = quern_checkpoint_find(in->checkpoint, name);
    return number >= 0 ? &in->tensors[number] : NULL;
}

const inspected *beside(const inspection *in, const inspected *t, name_role role)
{
    char name[1024];
    const int size = snprintf(name, sizeof name, "%.*s%s", (int)t->parts.module, t->info.name,
                              checkpoint_name_suffix(role));
    return size >= 0 && (size_t)size < sizeof name ? named(in, name) : NULL;
}

bool has_dtype(const inspected *t, const char *dtype)
{
    return strcmp(t->info.dtype, dtype) == 0;
}

bool is_nvfp4(const inspected *t)
{
    return t->info.format == QUERN_FORMAT_NVFP4_MODELOPT ||
           t->info.format == QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS ||
           t->info.format == QUERN_FORMAT_NVFP4_GGUF;
}

int64_t elements_of(const inspected *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->info.ndim; i++) n *= t->info.shape[i];
    return n;
}

float number_of(const inspected *t, int64_t index)
{
    float value;
    if (!has_dtype(t, "F32") || (size_t)(index + 1) * sizeof value > t->info.bytes) return NAN;
    memcpy(&value, (const char *)t->info.data + (size_t)index * sizeof value, sizeof value);
    return value;
}

statistics_source source_of(const inspection *in, inspected *t)
{
    static const struct {
        quern_format format;
        name_role scales[3], global;
    } all[] = {
        {QUERN_FORMAT_NVFP4_MODELOPT, {NAME_WEIGHT_SCALE}, NAME_WEIGHT_SCALE_2},
        {QUERN_FORMAT_NVFP4_COMPRESSED_TENSORS, {NAME_WEIGHT_SCALE}, NAME_WEIGHT_GLOBAL_SCALE},
        {QUERN_FORMAT_NVFP4_GGUF, {NAME_OTHER}, NAME_SCALE},
        {QUERN_FORMAT_MXFP4, {NAME_SCALE}, NAME_OTHER},
        {QUERN_FORMAT_MXFP4_BLOCKS, {NAME_SCALES}, NAME_OTHER},
        {QUERN_FORMAT_FP8_BLOCKS, {NAME_SCALE, NAME_WEIGHT_SCALE_INV, NAME_WEIGHT_SCALE}, NAME_OTHER},
        {QUERN_FORMAT_FP8_ROWS, {NAME_SCALE, NAME_WEIGHT_SCALE_INV, NAME_WEIGHT_SCALE}, NAME_OTHER},
        {QUERN_FORMAT_FP8_TENSOR, {NAME_SCALE, NAME_WEIGHT_SCALE_INV, NAME_WEIGHT_SCALE}, NAME_OTHER},
    };
    statistics_source source = {.tensor = &t->info, .out = &t->values};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (all[i].format != t->info.format) continue;
        for (size_t j = 0; j < 3 && source.scales == NULL; j++) {
            const inspected *scales = all[i].scales[j] != NAME_OTHER ? beside(in, t, all[i].scales[j]) : NULL;
            source.scales = scales != NULL ? &scales->info : NULL;
        }
        const inspected *global = all[i].global != NAME_OTHER ? beside(in, t, all[i].global) : NULL;
        source.global = global != NULL && has_dtype(global, "F32") ? &global->info : NULL;
    }
    return source;
}
