/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* print.c - an inspection as a table for people, and as JSON. */
#include "inspect/inspect.h"

#include "core/text.h"
#include "output.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NAME_ROOM = 512, FORMATS = QUERN_FORMAT_GGML + 1, LONGEST = 72 };

/* "1.50 MiB". */
static void bytes_text(double bytes, char *text, size_t room)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    for (; bytes >= 1024 && unit < 4; unit++) bytes /= 1024;
    snprintf(text, room, unit == 0 ? "%.0f %s" : "%.2f %s", bytes, units[unit]);
}

static void shape_text(const quern_checkpoint_tensor *t, char *text, size_t room)
{
    size_t used = (size_t)snprintf(text, room, "[");
    for (int32_t i = 0; i < t->ndim && used < room; i++)
        used += (size_t)snprintf(text + used, room - used, "%s%" PRId64, i > 0 ? ", " : "", t->shape[i]);
    if (used < room) snprintf(text + used, room - used, "]");
}

/* Characters that a name takes on the terminal, as it is printed. */
static size_t width_of(const char *escaped)
{
    size_t n = 0;
    for (; *escaped != '\0'; escaped++) n += ((unsigned char)*escaped & 0xc0) != 0x80;
    return n;
}

static double greatest_of(const statistics *s)
{
    return fmax(fabs(s->least), fabs(s->greatest));
}

static int64_t finite_of(const statistics *s)
{
    return s->elements - s->not_finite;
}

static double rms_of(const statistics *s)
{
    return sqrt(s->squares / (double)finite_of(s));
}

static void print_tensor(const inspected *t, size_t width)
{
    char name[NAME_ROOM], shape[160], bytes[32];
    const statistics *s = &t->values;
    text_escape(t->info.name, name, sizeof name);
    shape_text(&t->info, shape, sizeof shape);
    bytes_text((double)t->info.bytes, bytes, sizeof bytes);
    const size_t taken = width_of(name);
    printf("%s%*s  %-11s %-18s %-24s %11s", name, taken < width ? (int)(width - taken) : 0, "", t->info.dtype,
           shape, quern_format_name(t->info.format), bytes);
    if (s->known && finite_of(s) > 0)
        printf(" %10.4g %10.4g %6.2f%%", greatest_of(s), rms_of(s),
               100.0 * (double)s->zeros / (double)s->elements);
    if (s->known && s->blocks > 0 && is_nvfp4(t))
        printf(" %6.2f%%", 100.0 * (double)s->saturated / (double)s->blocks);
    putchar('\n');
}

static void print_tensors(const inspection *in)
{
    char name[NAME_ROOM];
    size_t width = strlen("tensor");
    bool measured = false;
    for (size_t i = 0; i < in->count; i++) {
        text_escape(in->tensors[i].info.name, name, sizeof name);
        const size_t taken = width_of(name);
        if (taken > width && taken <= LONGEST) width = taken;
        measured = measured || in->tensors[i].values.known;
    }
    printf("\n%-*s  %-11s %-18s %-24s %11s", (int)width, "tensor", "dtype", "shape", "format", "size");
    printf("%s\n", measured ? "      |max|        rms   zeros  at top" : "");
    for (size_t i = 0; i < in->count; i++) print_tensor(&in->tensors[i], width);
}

static void print_formats(const inspection *in)
{
    size_t tensors[FORMATS] = {0};
    double bytes[FORMATS] = {0};
    char text[32];
    for (size_t i = 0; i < in->count; i++) {
        tensors[in->tensors[i].info.format]++;
        bytes[in->tensors[i].info.format] += (double)in->tensors[i].info.bytes;
    }
    printf("\n%-26s %9s %11s\n", "format", "tensors", "size");
    for (int f = 0; f < FORMATS; f++) {
        if (tensors[f] == 0) continue;
        bytes_text(bytes[f], text, sizeof text);
        printf("%-26s %9zu %11s\n", quern_format_name((quern_format)f), tensors[f], text);
    }
}

/* Shards follow one another in the list of tensors. */
static size_t count_shards(const inspection *in)
{
    size_t shards = 0;
    for (size_t i = 0; i < in->count; i++)
        shards += i == 0 || strcmp(in->tensors[i].info.shard, in->tensors[i - 1].info.shard) != 0;
    return shards;
}

static void print_metadata(const inspection *in)
{
    const size_t pairs = quern_checkpoint_metadata_count(in->checkpoint);
    for (size_t i = 0; i < pairs; i++) {
        char value[100], key[NAME_ROOM], escaped[400];
        text_escape(quern_checkpoint_metadata_key(in->checkpoint, i), key, sizeof key);
        const size_t size = quern_checkpoint_metadata_text(in->checkpoint, i, value, sizeof value);
        text_escape(value, escaped, sizeof escaped);
        printf("%s%s: %s%s\n", i == 0 ? "\n" : "", key, escaped, size + 1 == sizeof value ? " ..." : "");
    }
}

void print_table(const inspection *in, bool summary)
{
    char path[NAME_ROOM], text[32];
    double bytes = 0;
    text_escape(in->path, path, sizeof path);
    if (in->checkpoint == NULL) {
        printf("%s\n", path);
    } else {
        for (size_t i = 0; i < in->count; i++) bytes += (double)in->tensors[i].info.bytes;
        bytes_text(bytes, text, sizeof text);
        const size_t shards = count_shards(in);
        printf("%s: %zu tensor%s in %zu file%s, %s\n", path, in->count, in->count == 1 ? "" : "s", shards,
               shards == 1 ? "" : "s", text);
        print_metadata(in);
        if (!summary && in->count > 0) print_tensors(in);
        print_formats(in);
    }
    printf("\n%zu problem%s\n", in->problem_count, in->problem_count == 1 ? "" : "s");
    for (size_t i = 0; i < in->problem_count; i++) {
        char sentence[2048];
        text_escape(in->problems[i].sentence, sentence, sizeof sentence);
        printf("  %s\n", sentence);
    }
}

/* ---- JSON ---- */

/* A string, or where it is no UTF-8 its escaped form. */
static json_t *string_of(const char *text)
{
    json_t *string = output_text(text);
    if (string != NULL) return string;
    char escaped[4096];
    text_escape(text, escaped, sizeof escaped);
    return json_string(escaped);
}

static json_t *statistics_json(const inspected *t)
{
    const statistics *s = &t->values;
    if (!s->known) return json_null();
    const bool any = finite_of(s) > 0;
    json_t *o = json_pack("{s:I, s:I, s:I}", "elements", (json_int_t)s->elements, "zeros",
                          (json_int_t)s->zeros, "not_finite", (json_int_t)s->not_finite);
    json_object_set_new(o, "min", any ? json_real(s->least) : json_null());
    json_object_set_new(o, "max", any ? json_real(s->greatest) : json_null());
    json_object_set_new(o, "mean", any ? output_number(s->sum / (double)finite_of(s)) : json_null());
    json_object_set_new(o, "rms", any ? output_number(rms_of(s)) : json_null());
    if (s->blocks == 0) return o;
    json_object_set_new(o, "blocks", json_integer(s->blocks));
    json_object_set_new(o, "bad_scales", json_integer(s->bad_scales));
    if (is_nvfp4(t)) json_object_set_new(o, "saturated_blocks", json_integer(s->saturated));
    return o;
}

static json_t *tensor_json(const inspected *t)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < t->info.ndim; i++) json_array_append_new(shape, json_integer(t->info.shape[i]));
    return json_pack("{s:o, s:s, s:o, s:s, s:I, s:o, s:o}", "name", string_of(t->info.name), "dtype",
                     t->info.dtype, "shape", shape, "format", quern_format_name(t->info.format), "bytes",
                     (json_int_t)t->info.bytes, "shard", string_of(t->info.shard), "statistics",
                     statistics_json(t));
}

static json_t *metadata_json(const inspection *in)
{
    json_t *o = json_object();
    const size_t pairs = in->checkpoint != NULL ? quern_checkpoint_metadata_count(in->checkpoint) : 0;
    for (size_t i = 0; i < pairs; i++) {
        char value[4096], key[NAME_ROOM];
        text_escape(quern_checkpoint_metadata_key(in->checkpoint, i), key, sizeof key);
        quern_checkpoint_metadata_text(in->checkpoint, i, value, sizeof value);
        json_object_set_new(o, key, string_of(value));
    }
    return o;
}

json_t *inspection_json(const inspection *in)
{
    json_t *tensors = json_array(), *problems = json_array();
    bool whole = true;
    for (size_t i = 0; i < in->count && whole; i++)
        whole = json_array_append_new(tensors, tensor_json(&in->tensors[i])) == 0;
    for (size_t i = 0; i < in->problem_count && whole; i++)
        whole =
            json_array_append_new(problems, json_pack("{s:s, s:o}", "kind", in->problems[i].kind, "sentence",
                                                      string_of(in->problems[i].sentence))) == 0;
    json_t *result = json_pack("{s:o, s:o, s:o, s:o}", "path", string_of(in->path), "metadata",
                               metadata_json(in), "tensors", tensors, "problems", problems);
    if (whole) return result;
    json_decref(result);
    return NULL;
}
