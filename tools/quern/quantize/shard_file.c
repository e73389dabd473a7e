/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/shard_file.h"

#include "command.h"
#include "core/half.h"
#include "io/header_text.h"
#include "io/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MADE_BY "quern.made_by"
#define ERRORS "quern.errors"
enum { DATA_ALIGN = 64, ERROR_ROOM = 128 /* of a module in the metadata: five numbers */ };

/* FNV-1a, of a number's bytes or a text's with its end. */
static uint64_t hash_number(uint64_t h, uint64_t number)
{
    for (int i = 0; i < 8; i++) h = (h ^ (number >> 8 * i & 0xff)) * 0x100000001b3u;
    return h;
}

static uint64_t hash_text(uint64_t h, const char *text)
{
    for (; *text != '\0'; text++) h = (h ^ (unsigned char)*text) * 0x100000001b3u;
    return h * 0x100000001b3u;
}

uint64_t shard_hash_inputs(const conversion *c)
{
    uint64_t h = hash_text(0xcbf29ce484222325u, quern_version());
    h = hash_number(hash_number(h, c->format), (uint64_t)c->options->scales);
    for (size_t i = 0; i < c->model->shard_count; i++) {
        const model_shard *s = &c->model->shards[i];
        h = hash_number(hash_number(hash_text(h, s->name), (uint64_t)s->bytes), (uint64_t)s->changed);
    }
    for (size_t i = 0; i < c->list.count; i++) { /* the members of groups, and their inputs' scales */
        const module *m = &c->list.modules[i];
        h = hash_number(hash_number(hash_text(h, m->name), bits_from_float(m->input_scale)), m->group);
    }
    return h;
}

/* Of what decides the shard's bytes. */
static void fingerprint(const conversion *c, size_t shard, const output_file *f, char text[24])
{
    uint64_t h = hash_number(c->inputs, shard);
    for (size_t i = 0; i < f->count; i++) {
        h = hash_text(hash_text(h, f->tensors[i].name), f->tensors[i].dtype);
        h = hash_number(h, (uint64_t)f->tensors[i].bytes);
    }
    snprintf(text, 24, "%016" PRIx64, h);
}

static int bits_of(const char *dtype)
{
    for (size_t i = 0; i < safetensors_dtype_count; i++)
        if (strcmp(safetensors_dtypes[i].name, dtype) == 0) return safetensors_dtypes[i].bits;
    return 8;
}

/* ---- the header ---- */

/* The modules whose codes the file holds, in its order. */
static const module *next_module(const conversion *c, const output_file *f, size_t *tensor, size_t *part)
{
    for (; *tensor < f->count; (*tensor)++, *part = 0) {
        const output_tensor *t = &f->tensors[*tensor];
        if (t->kind != OUTPUT_CODES || *part == t->part_count) continue;
        return &c->list.modules[f->parts[t->first_part + (*part)++].module];
    }
    return NULL;
}

static void add_errors_text(const conversion *c, const output_file *f, header_text *h)
{
    size_t tensor = 0, part = 0;
    header_add(h, "\"" ERRORS "\":\"");
    for (const module *m; (m = next_module(c, f, &tensor, &part)) != NULL;)
        header_add(h, "%.17g %.17g %.17g %" PRId64 " %" PRId64 ";", m->error.error, m->error.square,
                   m->error.worst, m->error.saturated, m->error.rounded);
    header_add(h, "\"");
}

static void add_metadata(const conversion *c, size_t shard, const output_file *f, header_text *h)
{
    const quern_safetensors *file = c->model->shards[shard].file;
    char made_by[24];
    bool format = false;
    fingerprint(c, shard, f, made_by);
    header_add(h, "{\"" SAFETENSORS_METADATA "\":{");
    for (size_t i = 0; i < quern_safetensors_metadata_count(file); i++) {
        const char *key = quern_safetensors_metadata_key(file, i);
        if (strcmp(key, MADE_BY) == 0 || strcmp(key, ERRORS) == 0) continue;
        format = format || strcmp(key, "format") == 0;
        header_add_string(h, key);
        header_add(h, ":");
        header_add_string(h, quern_safetensors_metadata(file, key));
        header_add(h, ",");
    }
    if (!format) header_add(h, "\"format\":\"pt\","); /* transformers asks for it */
    header_add(h, "\"" MADE_BY "\":\"%s\",", made_by);
    add_errors_text(c, f, h);
    header_add(h, "}");
}

static void add_tensor(const output_file *f, const output_tensor *t, header_text *h)
{
    const int64_t at = t->offset - f->header_bytes, *shape = output_shape(t);
    header_add(h, ",");
    header_add_string(h, t->name);
    header_add(h, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) header_add(h, "%s%" PRId64, i > 0 ? "," : "", shape[i]);
    header_add(h, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", at, at + output_bytes(t));
}

/* With its length in front, padded to header_bytes where these are known, else to DATA_ALIGN with room
 * for the errors to come. Free its bytes. */
static header_text header_of(const conversion *c, size_t shard, const output_file *f)
{
    header_text h = {0};
    size_t tensor = 0, part = 0, room = 0;
    header_add_bytes(&h, "\0\0\0\0\0\0\0", 8);
    add_metadata(c, shard, f, &h);
    for (size_t i = 0; i < f->count; i++) add_tensor(f, &f->tensors[i], &h);
    header_add(&h, "}");
    while (f->header_bytes == 0 && next_module(c, f, &tensor, &part) != NULL) room += ERROR_ROOM;
    while (!h.failed && (room > 0 || h.size < (size_t)f->header_bytes || h.size % DATA_ALIGN != 0)) {
        header_add(&h, " ");
        room -= room > 0;
    }
    for (int i = 0; i < 8 && !h.failed; i++) h.bytes[i] = (char)((uint64_t)(h.size - 8) >> 8 * i);
    return h;
}

static int no_header(const output_file *f, const header_text *h)
{
    if (h->size > SAFETENSORS_MAX_HEADER)
        return fail(EXIT_INPUT,
                    "shard '%s': its header would be longer than the %d bytes that safetensors accepts",
                    TEXT_NAME(f->name), SAFETENSORS_MAX_HEADER);
    return fail(EXIT_MACHINE, "no memory for the header of shard '%s'", TEXT_NAME(f->name));
}

static int by_width(const void *a, const void *b)
{
    const output_tensor *x = a, *y = b;
    const int order = bits_of(y->dtype) - bits_of(x->dtype);
    return order != 0 ? order : (x->first_part > y->first_part) - (x->first_part < y->first_part);
}

int shard_lay_out(const conversion *c, size_t shard, output_file *f)
{
    int64_t at = 0;
    if (f->count > 0) qsort(f->tensors, f->count, sizeof *f->tensors, by_width);
    for (size_t i = 0; i < f->count; at += output_bytes(&f->tensors[i++])) f->tensors[i].offset = at;
    header_text h = header_of(c, shard, f);
    if (!h.failed) {
        /* offsets in the header count from the data: the same digits wherever it begins */
        f->header_bytes = (int64_t)h.size;
        f->bytes = f->header_bytes + at;
        for (size_t i = 0; i < f->count; i++) f->tensors[i].offset += f->header_bytes;
    }
    const int code = h.failed ? no_header(f, &h) : EXIT_DONE;
    free(h.bytes);
    return code;
}

/* ---- the file ---- */

bool shard_is_done(conversion *c, size_t shard, const output_file *f, const char *path)
{
    quern_safetensors *file = NULL;
    char made_by[24];
    if (quern_safetensors_open(path, &file) != QUERN_OK) return false;
    fingerprint(c, shard, f, made_by);
    const char *theirs = quern_safetensors_metadata(file, MADE_BY),
               *errors = quern_safetensors_metadata(file, ERRORS);
    bool done = theirs != NULL && errors != NULL && strcmp(theirs, made_by) == 0;
    size_t tensor = 0, part = 0;
    for (const module *m; done && (m = next_module(c, f, &tensor, &part)) != NULL;) {
        module_error *e = &c->list.modules[m - c->list.modules].error;
        int used = 0;
        done = sscanf(errors, "%lf %lf %lf %" SCNd64 " %" SCNd64 ";%n", &e->error, &e->square, &e->worst,
                      &e->saturated, &e->rounded, &used) == 5 &&
               used > 0;
        errors += used;
    }
    quern_safetensors_close(file);
    return done;
}

/* The header comes last: it holds the errors. Takes *out. */
static int finish(const conversion *c, const shard_job *job, quern_file **out)
{
    header_text h = header_of(c, job->shard, job->file);
    quern_status status = QUERN_OK;
    int code = EXIT_DONE;
    if (h.failed || h.size != (size_t)job->file->header_bytes) code = no_header(job->file, &h);
    else status = quern_file_write_at(*out, 0, h.bytes, h.size);
    free(h.bytes);
    if (code == EXIT_DONE && status == QUERN_OK) {
        status = quern_file_commit(*out);
        *out = NULL;
    }
    return status == QUERN_OK ? code : fail_status(status);
}

int shards_write(conversion *c, const shard_job *jobs, size_t count, progress *p)
{
    open_output outputs[FILES_AT_ONCE] = {{NULL, NULL}};
    int code = EXIT_DONE;
    for (size_t i = 0; i < count && code == EXIT_DONE; i++) {
        outputs[i].file = jobs[i].file;
        const quern_status status = quern_file_create(jobs[i].path, &outputs[i].out);
        if (status != QUERN_OK) code = fail_status(status);
    }
    if (code == EXIT_DONE) code = convert_files(c, outputs, count, p);
    for (size_t i = 0; i < count && code == EXIT_DONE; i++) code = finish(c, &jobs[i], &outputs[i].out);
    for (size_t i = 0; i < count; i++) quern_file_discard(outputs[i].out);
    return code;
}
