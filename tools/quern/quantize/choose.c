/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * choose.c - which weights are converted: NVFP4 always, others by globs over their names. A glob stands for
 * the whole name of a tensor or of its module; "*" also matches dots.
 */
#include "quantize/conversion.h"

#include "command.h"

#include <fnmatch.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LEAST_SIDE = 64, NAME_ROOM = 1024 };

/* Names by which globs find a stored weight: the tensor's, the module's, and of a stack the first
 * expert's. */
typedef struct weight_names {
    char text[4][NAME_ROOM];
    int count;
} weight_names;

static void __attribute__((format(printf, 2, 3))) add_name(weight_names *names, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(names->text[names->count++], NAME_ROOM, format, args);
    va_end(args);
}

static void names_of(const stored_weight *s, weight_names *names)
{
    const char *name = s->tensor->name;
    names->count = 0;
    add_name(names, "%s", name);
    add_name(names, "%.*s", (int)s->name.module, name);
    add_name(names, "%.*s.weight", (int)s->name.module, name);
    if (s->stack)
        add_name(names, "%.*s0.%s.weight", (int)s->name.parent, name,
                 s->name.part == NAME_DOWN ? "down_proj" : "gate_proj");
}

static bool matches(const option_list *globs, const weight_names *names)
{
    for (int g = 0; g < globs->count; g++)
        for (int n = 0; n < names->count; n++)
            if (fnmatch(globs->text[g], names->text[n], 0) == 0) return true;
    return false;
}

/* Why a weight stays as it is unless it is asked for; NULL: it does not. */
static const char *left_by_default(const conversion *c, const stored_weight *s)
{
    if (c->v4 && s->name.mtp && !c->options->include_mtp) return "of mtp, without --include-mtp";
    if (c->v4 && !s->name.in_experts) return "no expert of a deepseek_v4 model";
    if (s->first.rows > 0 && (s->first.rows < LEAST_SIDE || s->first.columns < LEAST_SIDE)) /* 0: unknown */
        return "a side is below 64";
    return NULL;
}

static const char *left_always(const stored_weight *s)
{
    const char *name = s->tensor->name;
    if (checkpoint_name_is_embedding(name)) return "an embedding";
    if (checkpoint_name_is_norm(name)) return "a norm";
    if (checkpoint_name_is_router(name)) return "a router";
    if (checkpoint_name_is_head(name)) return "the output head";
    return NULL;
}

static const char *left_by_format(const conversion *c, const stored_weight *s)
{
    if (s->first.columns % 16 != 0) return "its rows are no multiple of 16";
    if (c->format == FORMAT_GGUF && s->first.columns % 64 != 0)
        return "its rows are no multiple of 64, as GGUF needs";
    if (c->format != FORMAT_GGUF && s->stack && s->name.role == NAME_WEIGHT)
        return "a stack under a name of GGUF";
    return NULL;
}

/* Why the weight is left; NULL: it is converted. *asked: it could be, and is an error where it is
 * unreadable. */
static const char *reason_to_leave(const conversion *c, const stored_weight *s, bool *asked)
{
    const quantize_options *o = c->options;
    weight_names names;
    *asked = true;
    if (c->format == FORMAT_BF16) {
        *asked = s->first.encoding != ENCODING_FLOATS;
        return s->first.encoding == ENCODING_FLOATS ? "in floats already" : NULL;
    }
    if (s->first.encoding == ENCODING_NVFP4) return left_by_format(c, s);
    names_of(s, &names);
    const char *why = left_always(s);
    if (why == NULL && matches(&o->exclude, &names)) why = "excluded";
    if (why == NULL && o->include.count > 0 && !matches(&o->include, &names)) why = "not included";
    if (why == NULL && o->include.count == 0) why = left_by_default(c, s);
    if (why == NULL && c->v4 && s->name.mtp && !o->include_mtp) why = "of mtp, without --include-mtp";
    *asked = why == NULL;
    return why != NULL ? why : left_by_format(c, s);
}

static int choose_one(const conversion *c, stored_weight *s)
{
    bool asked;
    s->left = reason_to_leave(c, s, &asked);
    if (s->unreadable != NULL && asked)
        return fail(EXIT_INPUT, "tensor '%s' of dtype %s: %s", TEXT_NAME(s->tensor->name), s->tensor->dtype,
                    s->unreadable);
    /* GGUF has no type for other encodings */
    s->as_values = s->left != NULL && c->format == FORMAT_GGUF && s->first.encoding != ENCODING_FLOATS &&
                   s->unreadable == NULL;
    s->chosen = s->left == NULL || s->as_values;
    return EXIT_DONE;
}

int choose_modules(conversion *c)
{
    module_list *list = &c->list;
    if (!modules_find(c->model, c->gpt_oss, list))
        return fail(EXIT_MACHINE, "no memory for the list of weights");
    int code = config_check(c);
    for (size_t i = 0; i < list->stored_count && code == EXIT_DONE; i++)
        code = choose_one(c, &list->stored[i]);
    if (code != EXIT_DONE) return code;
    const bool keep = c->format == FORMAT_BF16 || (c->format == FORMAT_GGUF && c->options->name_map == NULL);
    if (!modules_expand(list, keep) || !modules_group(list))
        return fail(EXIT_MACHINE, "no memory for the list of modules");
    return EXIT_DONE;
}
