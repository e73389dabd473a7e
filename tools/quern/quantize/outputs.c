/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* outputs.c - what each source tensor becomes in a format. */
#include "quantize/outputs.h"

#include "command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int64_t *output_shape(const output_tensor *t)
{
    return t->source_shape != NULL ? t->source_shape : t->shape;
}

int64_t output_bytes(const output_tensor *t)
{
    return t->bytes * (int64_t)t->part_count;
}

output_tensor *output_add(output_file *f, char *name, size_t parts)
{
    if (name != NULL && f->count == f->room) {
        const size_t room = 2 * f->room + 64;
        output_tensor *grown = realloc(f->tensors, room * sizeof *grown);
        if (grown != NULL) {
            f->tensors = grown;
            f->room = room;
        }
    }
    while (name != NULL && f->part_count + parts > f->part_room) {
        const size_t room = 2 * f->part_room + 64;
        output_part *grown = realloc(f->parts, room * sizeof *grown);
        if (grown == NULL) break;
        f->parts = grown;
        f->part_room = room;
    }
    if (name == NULL || f->count == f->room || f->part_count + parts > f->part_room) {
        free(name);
        return NULL;
    }
    output_tensor *t = &f->tensors[f->count++];
    *t = (output_tensor){.name = name, .first_part = f->part_count, .part_count = parts, .offset = -1};
    for (size_t i = 0; i < parts; i++) f->parts[f->part_count++] = (output_part){.module = SIZE_MAX};
    return t;
}

static bool copy_whole(output_file *f, const model_tensor *t)
{
    output_tensor *out = output_add(f, strdup(t->name), 1);
    if (out == NULL) return false;
    out->dtype = t->dtype;
    out->ndim = t->ndim;
    out->source_shape = t->shape; /* NULL without dimensions */
    out->bytes = t->bytes;
    f->parts[out->first_part] = (output_part){SIZE_MAX, t->data, t->bytes, 1, 1};
    return true;
}

/* A tensor of the module: name, dtype, shape [a], [a, b] or []. */
static output_tensor *add_part(output_file *f, const module *m, size_t index, const char *suffix,
                               output_kind kind)
{
    char *name = NULL;
    if (asprintf(&name, "%s%s", m->name, suffix) < 0) return NULL;
    output_tensor *t = output_add(f, name, 1);
    if (t == NULL) return NULL;
    t->kind = kind;
    f->parts[t->first_part].module = index;
    return t;
}

static bool add_matrix(output_file *f, const module *m, size_t index, const char *suffix, output_kind kind)
{
    output_tensor *t = add_part(f, m, index, suffix, kind);
    if (t == NULL) return false;
    const int64_t columns = m->weight.columns;
    t->dtype = kind == OUTPUT_CODES ? "U8" : kind == OUTPUT_SCALES ? "F8_E4M3" : "BF16";
    t->ndim = 2;
    t->shape[0] = m->weight.rows;
    t->shape[1] = kind == OUTPUT_CODES ? columns / 2 : kind == OUTPUT_SCALES ? columns / 16 : columns;
    t->bytes = t->shape[0] * t->shape[1] * (kind == OUTPUT_VALUES ? 2 : 1);
    return true;
}

/* One number, [] or [1]. */
static bool add_number(output_file *f, const module *m, size_t index, const char *suffix, output_kind kind,
                       int32_t ndim)
{
    output_tensor *t = add_part(f, m, index, suffix, kind);
    if (t == NULL) return false;
    t->dtype = "F32";
    t->ndim = ndim;
    t->shape[0] = 1;
    t->bytes = 4;
    return true;
}

static bool add_nvfp4(const conversion *c, output_file *f, const module *m, size_t index)
{
    const bool modelopt = c->format == FORMAT_MODELOPT;
    bool good = add_matrix(f, m, index, modelopt ? ".weight" : ".weight_packed", OUTPUT_CODES) &&
                add_matrix(f, m, index, ".weight_scale", OUTPUT_SCALES) &&
                add_number(f, m, index, modelopt ? ".weight_scale_2" : ".weight_global_scale", OUTPUT_GLOBAL,
                           modelopt ? 0 : 1);
    if (good && m->input_scale > 0.0f)
        good = add_number(f, m, index, modelopt ? ".input_scale" : ".input_global_scale", OUTPUT_INPUT_SCALE,
                          modelopt ? 0 : 1);
    return good;
}

/* A name for the stack's values as floats: without _blocks; *.weight stays. */
static char *values_name(const stored_weight *s)
{
    char *name = NULL;
    const bool stacked = s->stack && s->name.role != NAME_WEIGHT;
    return asprintf(&name, "%.*s%s", (int)s->name.module, s->tensor->name, stacked ? "" : ".weight") < 0
               ? NULL
               : name;
}

/* GGUF's: the whole stored weight where a stack is kept, else a module of it; one number for each matrix
 * beside it. */
static bool add_blocks(const conversion *c, output_file *f, char *name, size_t first, size_t count)
{
    static const output_kind kinds[] = {OUTPUT_BLOCKS, OUTPUT_GLOBAL, OUTPUT_INPUT_SCALE};
    const module *m = &c->list.modules[first];
    const bool stack = c->options->name_map == NULL && c->list.stored[m->stored].stack;
    for (int k = 0; k < (m->input_scale > 0.0f ? 3 : 2); k++) {
        output_tensor *t =
            output_add(f, k == 0 ? name : strdup(""), count); /* scales are named after their weight */
        if (t == NULL) return false;
        t->kind = kinds[k];
        t->dtype = k == 0 ? "U8" : "F32";
        for (size_t i = 0; i < count; i++) f->parts[t->first_part + i].module = first + i;
        t->ndim = k > 0 ? 1 : stack ? 3 : 2;
        t->shape[0] = (int64_t)count;
        if (k == 0) {
            t->shape[t->ndim - 2] = m->weight.rows;
            t->shape[t->ndim - 1] = m->weight.columns;
        }
        t->bytes = k == 0 ? m->weight.rows * m->weight.columns / 64 * 36 : 4;
    }
    return true;
}

static bool add_all_blocks(const conversion *c, output_file *f, const stored_weight *s)
{
    if (c->options->name_map == NULL)
        return add_blocks(c, f, values_name(s), s->first_module, s->module_count);
    for (size_t i = 0; i < s->module_count; i++) {
        const size_t index = s->first_module + i;
        char *name = NULL;
        if (s->as_values && !add_matrix(f, &c->list.modules[index], index, ".weight", OUTPUT_VALUES))
            return false;
        if (s->as_values) continue;
        if (asprintf(&name, "%s.weight", c->list.modules[index].name) < 0) return false;
        if (!add_blocks(c, f, name, index, 1)) return false;
    }
    return true;
}

/* The whole stored weight in bf16, a stack as one tensor. */
static bool add_values(const conversion *c, output_file *f, const stored_weight *s)
{
    const matrix *m = &c->list.modules[s->first_module].weight;
    const bool turned = s->stack && s->name.role == NAME_BLOCKS;
    output_tensor *t = output_add(f, values_name(s), s->module_count);
    if (t == NULL) return false;
    t->dtype = "BF16";
    t->kind = turned ? OUTPUT_VALUES_TURNED : OUTPUT_VALUES;
    t->ndim = s->stack ? 3 : 2;
    int64_t *shape = t->shape;
    if (s->stack) *shape++ = (int64_t)s->module_count;
    shape[0] = turned ? m->columns : m->rows;
    shape[1] = turned ? m->rows : m->columns;
    t->bytes = m->rows * m->columns * 2;
    for (size_t i = 0; i < s->module_count; i++) f->parts[t->first_part + i].module = s->first_module + i;
    return true;
}

/* A stack's biases [E, N], a tensor for each module. */
static bool split_bias(const conversion *c, output_file *f, const stored_weight *s, const model_tensor *bias)
{
    const int64_t all = bias->bytes / s->experts, element = bias->bytes / (s->experts * s->first.rows);
    const bool both = s->split != SPLIT_NONE;
    for (size_t i = 0; i < s->module_count; i++) {
        const module *m = &c->list.modules[s->first_module + i];
        const int64_t expert = (int64_t)i / (both ? 2 : 1);
        const bool up = both && i % 2 == 1;
        const int64_t skip = !up ? 0 : s->split == SPLIT_HALVES ? m->weight.rows : 1;
        output_tensor *t = add_part(f, m, SIZE_MAX, ".bias", OUTPUT_COPY);
        if (t == NULL) return false;
        t->dtype = bias->dtype;
        t->ndim = 1;
        t->shape[0] = m->weight.rows;
        t->bytes = m->weight.rows * element;
        f->parts[t->first_part] =
            (output_part){SIZE_MAX, bias->data + expert * all + skip * element, m->weight.rows,
                          s->split == SPLIT_EVEN_ODD ? 2 * element : element, element};
    }
    return true;
}

bool output_add_source(const conversion *c, output_file *f, const model_tensor *t)
{
    const module_list *list = &c->list;
    const size_t index = list->stored_of[t - c->model->tensors];
    const stored_weight *s = index != SIZE_MAX ? &list->stored[index] : NULL;
    if (s == NULL || !s->chosen) return copy_whole(f, t);
    if (t == s->of[NAME_BIAS]) {
        const bool whole = !s->stack || c->format == FORMAT_BF16 ||
                           (c->format == FORMAT_GGUF && c->options->name_map == NULL);
        return whole ? copy_whole(f, t) : split_bias(c, f, s, t);
    }
    if (t != s->tensor) {
        const bool parallel = t == s->of[NAME_OTHER]; /* a tensor under the module's own name */
        return parallel ? copy_whole(f, t) : true;
    }
    if (c->format == FORMAT_BF16 || (s->as_values && c->options->name_map == NULL))
        return add_values(c, f, s);
    if (c->format == FORMAT_GGUF) return add_all_blocks(c, f, s);
    bool good = true;
    for (size_t i = 0; i < s->module_count && good; i++)
        good = add_nvfp4(c, f, &list->modules[s->first_module + i], s->first_module + i);
    return good;
}

int outputs_plan(const conversion *c, output_file *files)
{
    bool good = true;
    for (size_t i = 0; i < c->model->shard_count; i++)
        files[i] = (output_file){.name = c->model->shards[i].name};
    for (size_t i = 0; i < c->model->count && good; i++)
        good = output_add_source(c, &files[c->model->tensors[i].shard], &c->model->tensors[i]);
    return good ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the list of tensors to write");
}

void output_free(output_file *f)
{
    for (size_t i = 0; i < f->count; i++) free(f->tensors[i].name);
    free(f->tensors);
    free(f->parts);
}
