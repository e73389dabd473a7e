/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gguf_file.c - names, stacks and the header. A tensor's extents stand in the file with the fastest first;
 * data begins at multiples of 32.
 */
#include "quantize/gguf_file.h"

#include "quantize/convert.h"
#include "quantize/name_map.h"
#include "quantize/outputs.h"
#include "quantize/losses.h"
#include "quantize/target.h"

#include "command.h"
#include "io/gguf.h"
#include "io/header_text.h"
#include "io/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 32, FILE_TYPE = 39, QUANTIZATION_VERSION = 2 };

/* The tensors with their names in GGUF; experts to be stacked. */
typedef struct gguf_plan {
    conversion *c;
    name_map map;
    gguf_file *base;
    output_file file;
    int64_t *experts; /* of a tensor that is to be stacked, else -1 */
    size_t *order;    /* by name and expert */
} gguf_plan;

/* ---- names and stacks ---- */

/* The name of a scale: its weight's, with the other suffix. */
static char *scale_name(const char *weight, const char *suffix)
{
    const size_t n = strlen(weight), end = strlen(".weight");
    const bool has = n > end && strcmp(weight + n - end, ".weight") == 0;
    char *name = NULL;
    return asprintf(&name, "%.*s%s", (int)(has ? n - end : n), weight, suffix) < 0 ? NULL : name;
}

/* A scale stands after its weight and is named after it. */
static bool rename_all(gguf_plan *p)
{
    const char *weight = "";
    int64_t expert = -1;
    p->experts = malloc((p->file.count + 1) * sizeof *p->experts);
    p->order = malloc((p->file.count + 1) * sizeof *p->order);
    if (p->experts == NULL || p->order == NULL) return false;
    for (size_t i = 0; i < p->file.count; i++) {
        output_tensor *t = &p->file.tensors[i];
        const bool beside = t->kind == OUTPUT_GLOBAL || t->kind == OUTPUT_INPUT_SCALE;
        char *name = beside ? scale_name(weight, t->kind == OUTPUT_GLOBAL ? ".scale" : ".input_scale")
                            : name_map_apply(&p->map, t->name, &expert);
        if (name == NULL) return false;
        free(t->name);
        t->name = name;
        if (!beside) weight = name;
        p->experts[i] = expert;
        p->order[i] = i;
    }
    return true;
}

static int by_name(const void *a, const void *b, void *arg)
{
    const gguf_plan *p = arg;
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    const int order = strcmp(p->file.tensors[x].name, p->file.tensors[y].name);
    if (order != 0) return order;
    if (p->experts[x] != p->experts[y]) return p->experts[x] < p->experts[y] ? -1 : 1;
    return x < y ? -1 : 1;
}

static bool alike(const output_tensor *a, const output_tensor *b)
{
    return a->kind == b->kind && strcmp(a->dtype, b->dtype) == 0 && a->bytes == b->bytes &&
           a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(output_shape(a), output_shape(b), (size_t)a->ndim * sizeof(int64_t)) == 0);
}

/* Stacks `count` tensors of one name, the parts one after the other; the others are left without parts. */
static int stack(gguf_plan *p, const size_t *order, size_t count)
{
    output_file *f = &p->file;
    output_tensor *first = &f->tensors[order[0]];
    for (size_t i = 0; i < count; i++) {
        const output_tensor *t = &f->tensors[order[i]];
        if (p->experts[order[i]] != (int64_t)i || !alike(first, t) || t->part_count != 1 || t->ndim > 3)
            return fail(EXIT_INPUT,
                        "--name-map: '%s' needs its experts 0, 1, 2, ... once each, of one shape and format",
                        TEXT_NAME(t->name));
    }
    output_tensor *all = output_add(f, strdup(first->name), count);
    if (all == NULL) return fail(EXIT_MACHINE, "no memory for the list of tensors to write");
    first = &f->tensors[order[0]];
    const bool number = first->ndim == 1 && first->kind != OUTPUT_COPY;
    const size_t parts = all->first_part;
    char *name = all->name;
    *all = *first;
    all->name = name;
    all->first_part = parts;
    all->part_count = count;
    all->ndim = number ? 1 : first->ndim + 1;
    const int64_t *shape = output_shape(first);
    for (int32_t i = 0; i < first->ndim && !number; i++) all->shape[i + 1] = shape[i];
    all->shape[0] = (int64_t)count;
    all->source_shape = NULL;
    for (size_t i = 0; i < count; i++) {
        f->parts[parts + i] = f->parts[f->tensors[order[i]].first_part];
        f->tensors[order[i]].part_count = 0;
    }
    return EXIT_DONE;
}

static int stack_all(gguf_plan *p)
{
    const size_t count = p->file.count;
    qsort_r(p->order, count, sizeof *p->order, by_name, p);
    for (size_t i = 0, n = 0; i < count; i += n) {
        const char *name = p->file.tensors[p->order[i]].name;
        for (n = 1; i + n < count && strcmp(name, p->file.tensors[p->order[i + n]].name) == 0; n++) continue;
        if (n == 1 && p->experts[p->order[i]] < 0) continue;
        const int code = stack(p, &p->order[i], n);
        if (code != EXIT_DONE) return code;
    }
    size_t kept = 0;
    for (size_t i = 0; i < p->file.count; i++) {
        output_tensor *t = &p->file.tensors[i];
        if (t->part_count == 0) free(t->name);
        else p->file.tensors[kept++] = *t;
    }
    p->file.count = kept;
    return EXIT_DONE;
}

/* ---- the header ---- */

static int type_of(const output_tensor *t)
{
    if (t->kind == OUTPUT_BLOCKS) return GGML_NVFP4;
    for (size_t i = 0; i < safetensors_dtype_count; i++) {
        if (strcmp(safetensors_dtypes[i].name, t->dtype) != 0) continue;
        for (int type = 0; type < GGML_TYPES; type++)
            if (ggml_types[type].name != NULL && ggml_types[type].block == 1 &&
                ggml_types[type].dtype == safetensors_dtypes[i].ours && safetensors_dtypes[i].ours >= 0)
                return type;
    }
    return -1;
}

static int check_types(const gguf_plan *p)
{
    for (size_t i = 0; i < p->file.count; i++) {
        const output_tensor *t = &p->file.tensors[i];
        if (type_of(t) < 0)
            return fail(EXIT_INPUT, "format gguf: tensor '%s' of dtype %s: GGUF has no such type",
                        TEXT_NAME(t->name), t->dtype);
        if (t->ndim > GGUF_MAX_DIMS)
            return fail(EXIT_INPUT, "format gguf: tensor '%s' has %d dimensions: at most %d are accepted",
                        TEXT_NAME(t->name), t->ndim, GGUF_MAX_DIMS);
    }
    return EXIT_DONE;
}

static void add_u32(header_text *h, uint32_t value)
{
    unsigned char bytes[4];
    for (int i = 0; i < 4; i++) bytes[i] = (unsigned char)(value >> 8 * i);
    header_add_bytes(h, (const char *)bytes, sizeof bytes);
}

static void add_u64(header_text *h, uint64_t value)
{
    add_u32(h, (uint32_t)value);
    add_u32(h, (uint32_t)(value >> 32));
}

static void add_text(header_text *h, const char *text)
{
    add_u64(h, strlen(text));
    header_add_bytes(h, text, strlen(text));
}

static void add_number(header_text *h, const char *key, uint32_t value)
{
    add_text(h, key);
    add_u32(h, GGUF_U32);
    add_u32(h, value);
}

/* What this file says itself, whatever the base has. */
static bool is_own_key(const char *key)
{
    return strcmp(key, "general.file_type") == 0 || strcmp(key, "general.quantization_version") == 0 ||
           strcmp(key, "general.alignment") == 0;
}

static void add_pairs(const gguf_plan *p, header_text *h)
{
    bool architecture = false;
    uint64_t count = 2;
    for (size_t i = 0; p->base != NULL && i < p->base->pair_count; i++) {
        architecture = architecture || strcmp(p->base->pairs[i].key, "general.architecture") == 0;
        count += !is_own_key(p->base->pairs[i].key);
    }
    add_u64(h, count + !architecture);
    if (!architecture) {
        add_text(h, "general.architecture");
        add_u32(h, GGUF_STRING);
        add_text(h, *p->c->model_type != '\0' ? p->c->model_type : "unknown");
    }
    add_number(h, "general.file_type", FILE_TYPE);
    add_number(h, "general.quantization_version", QUANTIZATION_VERSION);
    for (size_t i = 0; p->base != NULL && i < p->base->pair_count; i++)
        if (!is_own_key(p->base->pairs[i].key))
            header_add_bytes(h, (const char *)p->base->pairs[i].raw, p->base->pairs[i].raw_bytes);
}

static void add_tensor(header_text *h, const output_tensor *t, int64_t offset)
{
    const int64_t *shape = output_shape(t);
    add_text(h, t->name);
    add_u32(h, t->ndim > 0 ? (uint32_t)t->ndim : 1);
    for (int32_t i = t->ndim - 1; i >= 0; i--) add_u64(h, (uint64_t)shape[i]);
    if (t->ndim == 0) add_u64(h, 1);
    add_u32(h, (uint32_t)type_of(t));
    add_u64(h, (uint64_t)offset);
}

/* The header, and the tensors' offsets in the file. Free its bytes. */
static header_text lay_out(gguf_plan *p)
{
    header_text h = {0};
    output_file *f = &p->file;
    int64_t at = 0;
    header_add_bytes(&h, "GGUF", 4);
    add_u32(&h, 3);
    add_u64(&h, f->count);
    add_pairs(p, &h);
    for (size_t i = 0; i < f->count; i++) {
        add_tensor(&h, &f->tensors[i], at);
        f->tensors[i].offset = at;
        at = (at + output_bytes(&f->tensors[i]) + ALIGN - 1) / ALIGN * ALIGN;
    }
    while (!h.failed && h.size % ALIGN != 0) header_add_bytes(&h, "", 1);
    f->header_bytes = (int64_t)h.size;
    f->bytes = f->header_bytes + at;
    for (size_t i = 0; i < f->count; i++) f->tensors[i].offset += f->header_bytes;
    return h;
}

/* ---- the file ---- */

static int write_file(gguf_plan *p, const header_text *h)
{
    conversion *c = p->c;
    quern_file *out = NULL;
    progress bar;
    int64_t bytes = 0;
    for (size_t i = 0; i < c->model->count; i++) bytes += c->model->tensors[i].bytes;
    quern_status status = quern_file_create(c->options->target, &out);
    if (status != QUERN_OK) return fail_status(status);
    progress_begin(&bar, bytes);
    int code = convert_files(c, &(open_output){&p->file, out}, 1, &bar);
    progress_end(&bar);
    if (code == EXIT_DONE && (status = quern_file_write_at(out, 0, h->bytes, h->size)) != QUERN_OK)
        code = fail_status(status);
    /* the last tensor's padding, of which the file's end may be */
    const char zero = 0;
    const output_tensor *last = p->file.count > 0 ? &p->file.tensors[p->file.count - 1] : NULL;
    if (code == EXIT_DONE && last != NULL && last->offset + output_bytes(last) < p->file.bytes &&
        (status = quern_file_write_at(out, p->file.bytes - 1, &zero, 1)) != QUERN_OK)
        code = fail_status(status);
    if (code != EXIT_DONE) {
        quern_file_discard(out);
        return code;
    }
    status = quern_file_commit(out);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

/* What a text engine would still need of the file. */
static void print_needs(const gguf_plan *p)
{
    if (p->base == NULL)
        printf("without --gguf-base the file has no tokenizer and no keys of its architecture\n");
    if (p->map.count == 0)
        printf("without --name-map the tensors have their source's names, which text engines do not know\n");
}

static int plan(gguf_plan *p)
{
    conversion *c = p->c;
    bool good = true;
    p->file.name = c->options->target;
    for (size_t i = 0; i < c->model->count && good; i++)
        good = output_add_source(c, &p->file, &c->model->tensors[i]);
    if (!good || !rename_all(p)) return fail(EXIT_MACHINE, "no memory for the list of tensors to write");
    const int code = stack_all(p);
    return code == EXIT_DONE ? check_types(p) : code;
}

static int open_base(gguf_plan *p)
{
    char why[GGUF_SENTENCE];
    const char *path = p->c->options->gguf_base;
    if (path == NULL) return EXIT_DONE;
    const quern_status status = gguf_open(path, &p->base, why);
    if (status == QUERN_OK) return EXIT_DONE;
    return fail(status == QUERN_ERR_OUT_OF_MEMORY ? EXIT_MACHINE : EXIT_INPUT, "--gguf-base '%s': %s",
                TEXT_NAME(path), why);
}

int gguf_file_write(conversion *c)
{
    gguf_plan p = {.c = c};
    header_text h = {0};
    int code = target_check_file(c->options->target);
    if (code == EXIT_DONE) code = open_base(&p);
    if (code == EXIT_DONE && c->options->name_map != NULL) code = name_map_read(c->options->name_map, &p.map);
    if (code == EXIT_DONE) code = plan(&p);
    if (code == EXIT_DONE) {
        h = lay_out(&p);
        if (h.failed)
            code = fail(EXIT_MACHINE, "no memory for the header of '%s'", TEXT_NAME(c->options->target));
    }
    if (code == EXIT_DONE && c->options->dry_run) losses_plan(c, &p.file, 1);
    else if (code == EXIT_DONE) code = write_file(&p, &h);
    if (code == EXIT_DONE) print_needs(&p);
    free(h.bytes);
    free(p.experts);
    free(p.order);
    gguf_close(p.base);
    name_map_free(&p.map);
    output_free(&p.file);
    return code;
}
