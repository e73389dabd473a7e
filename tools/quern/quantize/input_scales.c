/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * input_scales.c - the activations' scales: one number for all, or a JSON file {module: number}, or what an
 * NVFP4 source has. DeepSeek-V4's experts need one each; one that the file lacks takes the largest of its
 * projection in its layer, else in the file, and gate and up of an expert take the larger of theirs.
 */
#include "quantize/conversion.h"

#include "command.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool is_scale(double value)
{
    return value > 0 && isfinite((float)value) && (float)value > 0.0f;
}

static float first_float(const model_tensor *t)
{
    float value = 0;
    if (t != NULL && strcmp(t->dtype, "F32") == 0 && t->bytes >= 4) memcpy(&value, t->data, sizeof value);
    return value;
}

/* What an NVFP4 source says. */
static void take_own(conversion *c)
{
    for (size_t i = 0; i < c->list.count; i++) {
        module *m = &c->list.modules[i];
        const stored_weight *s = &c->list.stored[m->stored];
        if (s->first.encoding != ENCODING_NVFP4) continue;
        const float own = first_float(s->of[NAME_INPUT_SCALE]),
                    inverse = first_float(s->of[NAME_INPUT_GLOBAL_SCALE]);
        const float scale = own > 0.0f ? own : inverse > 0.0f ? 1.0f / inverse : 0.0f;
        if (is_scale(scale)) m->input_scale = scale;
    }
}

/* The largest scale of the file's modules that are the same projection, in the layer or (-1) in any. */
static float largest_like(const json_t *file, const module *m, int64_t layer)
{
    float largest = 0;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)file, key, value)
    {
        const checkpoint_name n = checkpoint_name_read(key);
        if (!n.in_experts || n.part != m->parsed.part || n.mtp != m->parsed.mtp ||
            (layer >= 0 && n.layer != layer))
            continue;
        if ((float)json_number_value(value) > largest) largest = (float)json_number_value(value);
    }
    return largest;
}

/* Largest scales by layer and projection, found once for each. */
static float largest_of_layer(const json_t *file, const module *m)
{
    const float in_layer = largest_like(file, m, m->parsed.layer);
    return in_layer > 0.0f ? in_layer : largest_like(file, m, -1);
}

static int check_file(const char *path, json_t *file)
{
    const char *key;
    json_t *value;
    if (!json_is_object(file))
        return fail(EXIT_INPUT, "--input-scales '%s': {module: number} is accepted", TEXT_NAME(path));
    json_object_foreach(file, key, value)
    {
        if (!json_is_number(value) || !is_scale(json_number_value(value)))
            return fail(EXIT_INPUT, "--input-scales '%s': '%s' is no number above 0", TEXT_NAME(path),
                        TEXT_NAME(key));
    }
    return EXIT_DONE;
}

static int take_file(conversion *c, const json_t *file)
{
    float kept = 0; /* of the last module that the file lacked */
    const module *like = NULL;
    for (size_t i = 0; i < c->list.count; i++) {
        module *m = &c->list.modules[i];
        const json_t *value = json_object_get(file, m->name);
        if (value != NULL) {
            m->input_scale = (float)json_number_value(value);
        } else if (c->v4) {
            if (like == NULL || like->parsed.part != m->parsed.part ||
                like->parsed.layer != m->parsed.layer || like->parsed.mtp != m->parsed.mtp)
                kept = largest_of_layer(file, m);
            like = m;
            m->input_scale = kept;
            if (kept == 0.0f)
                return fail(EXIT_INPUT,
                            "--input-scales: neither '%s' nor another expert's module like it is in the file",
                            TEXT_NAME(m->name));
        }
    }
    return EXIT_DONE;
}

/* Modules of a group take the largest of their scales. */
static void share_in_groups(conversion *c)
{
    for (size_t g = 0; g < c->list.group_count; g++) {
        const module_group *group = &c->list.groups[g];
        float largest = 0;
        for (size_t i = 0; i < group->count; i++) {
            const float one = c->list.modules[c->list.members[group->first + i]].input_scale;
            largest = one > largest ? one : largest;
        }
        for (size_t i = 0; i < group->count; i++)
            c->list.modules[c->list.members[group->first + i]].input_scale = largest;
    }
}

int read_input_scales(conversion *c)
{
    const char *text = c->options->input_scales;
    char *end = NULL;
    take_own(c);
    if (c->format == FORMAT_BF16) return EXIT_DONE;
    if (text == NULL) {
        for (size_t i = 0; i < c->list.count && c->v4; i++)
            if (c->list.modules[i].input_scale == 0.0f)
                return fail(EXIT_INPUT,
                            "--input-scales is needed: experts of a deepseek_v4 model have an input_scale");
        return EXIT_DONE;
    }
    const double number = strtod(text, &end);
    if (end != text && *end == '\0') {
        if (!is_scale(number))
            return fail(EXIT_USAGE, "--input-scales %s: a file or a number above 0 is accepted", text);
        for (size_t i = 0; i < c->list.count; i++) c->list.modules[i].input_scale = (float)number;
        return EXIT_DONE;
    }
    json_error_t error;
    json_t *file = json_load_file(text, JSON_REJECT_DUPLICATES, &error);
    if (file == NULL) return fail(EXIT_INPUT, "--input-scales '%s': %s", TEXT_NAME(text), error.text);
    int code = check_file(text, file);
    if (code == EXIT_DONE) code = take_file(c, file);
    if (code == EXIT_DONE && c->v4) share_in_groups(c);
    json_decref(file);
    return code;
}
