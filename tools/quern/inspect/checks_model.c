/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* checks_model.c - what is missing among layers and experts, and what config.json says otherwise. */
#include "inspect/inspect.h"

#include "core/text.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- layers and experts ---- */

enum { PARTS = NAME_GATE_UP + 1 };

/* Experts of one place: the name up to and with "experts.". */
typedef struct place {
    const char *name;
    size_t size;
    int64_t most;    /* the highest expert */
    unsigned parts;  /* every part that one of them has, as bits */
    unsigned *found; /* of each expert, by number */
} place;

/* Bytes of the name up to the expert's number; 0: it is of no single expert. */
static size_t before_number(const inspected *t)
{
    const char *word = strstr(t->info.name, "experts.");
    return t->parts.expert >= 0 && word != NULL ? (size_t)(word - t->info.name) + strlen("experts.") : 0;
}

static bool is_weight(const inspected *t)
{
    return t->parts.role == NAME_WEIGHT || t->parts.role == NAME_WEIGHT_PACKED;
}

static void report_holes(inspection *in, const place *p)
{
    static const char *const words[PARTS] = {[NAME_GATE] = "gate", [NAME_UP] = "up", [NAME_DOWN] = "down"};
    for (int64_t e = 0; e <= p->most; e++) {
        const unsigned lacks = p->parts & ~p->found[e];
        for (int part = 0; part < PARTS && lacks != 0; part++) {
            if ((lacks >> part & 1) == 0) continue;
            report(in, "missing-tensor",
                   "'%.*s%" PRId64 "' has no %s projection: experts 0 to %" PRId64 " of this layer have one",
                   (int)p->size, p->name, e, words[part] != NULL ? words[part] : "further", p->most);
            return; /* one sentence a layer */
        }
    }
}

/* Looks at the tensors from number `i` of by_name on that are of one place; returns the number after them. */
static size_t check_place(inspection *in, size_t i)
{
    const inspected *first = &in->tensors[in->by_name[i]];
    place p = {.name = first->info.name, .size = before_number(first), .most = -1};
    if (p.size == 0) return i + 1;
    size_t end = i;
    for (; end < in->count; end++) {
        const inspected *t = &in->tensors[in->by_name[end]];
        if (before_number(t) != p.size || strncmp(t->info.name, p.name, p.size) != 0) break;
        if (t->parts.expert > p.most) p.most = t->parts.expert;
    }
    if (p.most < 0) return end;
    if (p.most >= (int64_t)(end - i)) { /* not even a tensor each */
        report(in, "missing-tensor", "'%.*s' counts experts to %" PRId64 ", and has %zu tensors", (int)p.size,
               p.name, p.most, end - i);
        return end;
    }
    p.found = calloc((size_t)p.most + 1, sizeof *p.found);
    if (p.found == NULL) {
        in->no_memory = true;
        return end;
    }
    for (size_t j = i; j < end; j++) {
        const inspected *t = &in->tensors[in->by_name[j]];
        if (is_weight(t)) p.found[t->parts.expert] |= 1u << t->parts.part;
    }
    for (int64_t e = 0; e <= p.most; e++) p.parts |= p.found[e];
    report_holes(in, &p);
    free(p.found);
    return end;
}

void check_layers(inspection *in)
{
    enum { MOST = 1 << 12 };
    static bool there[MOST];
    int64_t most = -1;
    memset(there, 0, sizeof there);
    for (size_t i = 0; i < in->count; i++) {
        const checkpoint_name *parts = &in->tensors[i].parts;
        if (parts->mtp || parts->layer < 0 || parts->layer >= MOST) continue;
        there[parts->layer] = true;
        if (parts->layer > most) most = parts->layer;
    }
    for (int64_t layer = 0; layer < most; layer++) {
        if (there[layer]) continue;
        report(in, "missing-tensor", "layer %" PRId64 " is missing: the last one is %" PRId64, layer, most);
        break;
    }
    for (size_t i = 0; i < in->count;) i = check_place(in, i);
}

/* ---- config.json ---- */

/* A setting, also under "text_config", where models of several kinds have it. */
static json_t *setting(const inspection *in, const char *key)
{
    json_t *value = json_object_get(in->config, key);
    return value != NULL ? value : json_object_get(json_object_get(in->config, "text_config"), key);
}

static const inspected *first_of(const inspection *in, const char *const *names)
{
    for (; *names != NULL; names++)
        if (named(in, *names) != NULL) return named(in, *names);
    return NULL;
}

static const char *const embeddings[] = {"model.embed_tokens.weight",
                                         "model.language_model.embed_tokens.weight",
                                         "language_model.model.embed_tokens.weight",
                                         "embed.weight",
                                         "transformer.wte.weight",
                                         NULL};
static const char *const heads[] = {"lm_head.weight", "language_model.lm_head.weight", "head.weight", NULL};

static void check_extent(inspection *in, const char *key, const inspected *t, int32_t dimension)
{
    const json_t *value = setting(in, key);
    if (!json_is_integer(value) || t == NULL || t->info.ndim <= dimension) return;
    if (json_integer_value(value) != t->info.shape[dimension])
        report(in, "config", "config.json says %s %" PRId64 ", extent %d of '%s' is %" PRId64, key,
               (int64_t)json_integer_value(value), (int)dimension, TEXT_NAME(t->info.name),
               t->info.shape[dimension]);
}

static void check_heads(inspection *in)
{
    const inspected *embedding = first_of(in, embeddings), *head = first_of(in, heads);
    const json_t *tie = setting(in, "tie_word_embeddings");
    if (embedding == NULL || !json_is_boolean(tie)) return;
    const bool tied = json_is_true(tie);
    if (!tied && head == NULL)
        report(in, "tied-head", "config.json says that the head is not tied to '%s', and there is none",
               TEXT_NAME(embedding->info.name));
    if (!tied || head == NULL) return;
    const bool equal = head->info.bytes == embedding->info.bytes &&
                       head->info.format == embedding->info.format &&
                       memcmp(head->info.data, embedding->info.data, head->info.bytes) == 0;
    report(in, "tied-head",
           "config.json says that the head is tied to '%s', and '%s' is here too, with %s bytes: loaders "
           "take one "
           "and drop the other",
           TEXT_NAME(embedding->info.name), TEXT_NAME(head->info.name), equal ? "the same" : "other");
}

static void check_counts(inspection *in)
{
    static const char *const keys[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    int64_t layers = 0, experts = 0;
    for (size_t i = 0; i < in->count; i++) {
        const inspected *t = &in->tensors[i];
        if (t->parts.mtp) continue;
        if (t->parts.layer >= layers) layers = t->parts.layer + 1;
        if (t->parts.expert >= experts) experts = t->parts.expert + 1;
    }
    const json_t *value = setting(in, "num_hidden_layers"), *next = setting(in, "num_nextn_predict_layers");
    /* some models number the layers that predict further tokens on */
    const int64_t more = json_is_integer(next) ? json_integer_value(next) : 0;
    if (json_is_integer(value) && layers > 0 && layers != json_integer_value(value) &&
        layers != json_integer_value(value) + more)
        report(in, "config", "config.json says num_hidden_layers %" PRId64 ", the tensors are of %" PRId64,
               (int64_t)json_integer_value(value), layers);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        value = setting(in, keys[i]);
        if (json_is_integer(value) && experts > 0 && experts != json_integer_value(value))
            report(in, "config", "config.json says %s %" PRId64 ", the tensors are of %" PRId64, keys[i],
                   (int64_t)json_integer_value(value), experts);
    }
}

/* Whether a module's name matches an entry of "ignore": a name, a glob, or "re:" with a pattern, which is
 * left to the loaders. */
static bool ignored(const json_t *list, const char *name, size_t size, const char **entry)
{
    char module[512];
    size_t i;
    json_t *value;
    if (size >= sizeof module) return false;
    memcpy(module, name, size);
    module[size] = '\0';
    json_array_foreach((json_t *)(uintptr_t)list, i, value)
    {
        *entry = json_string_value(value);
        if (*entry != NULL && fnmatch(*entry, module, 0) == 0) return true;
    }
    return false;
}

/* The quantisation that config.json tells of, against the tensors. */
static void check_quantisation(inspection *in)
{
    const json_t *quantisation = setting(in, "quantization_config");
    if (!json_is_object(quantisation)) return;
    const char *method = json_string_value(json_object_get(quantisation, "quant_method"));
    const char *algorithm = json_string_value(json_object_get(quantisation, "quant_algo"));
    const json_t *list = json_object_get(quantisation, "ignore");
    bool reported = false;
    size_t found = 0;
    for (size_t i = 0; i < in->count; i++) {
        const inspected *t = &in->tensors[i];
        const char *entry;
        if (!is_nvfp4(t)) continue;
        found++;
        if (!reported && ignored(list, t->info.name, t->parts.module, &entry)) {
            report(in, "config", "config.json's ignore has \"%s\", and '%s' is quantised", entry,
                   TEXT_NAME(t->info.name));
            reported = true;
        }
        if (algorithm != NULL && strcmp(algorithm, "NVFP4") == 0 && beside(in, t, NAME_INPUT_SCALE) == NULL) {
            report(in, "missing-scale",
                   "config.json says quant_algo NVFP4, and '%.*s.input_scale' is missing: W4A16_NVFP4 needs "
                   "none",
                   (int)t->parts.module, t->info.name);
            algorithm = NULL; /* once */
        }
    }
    const char *format = json_string_value(json_object_get(quantisation, "format"));
    const bool claims = (algorithm != NULL && strstr(algorithm, "NVFP4") != NULL) ||
                        (format != NULL && strstr(format, "nvfp4") != NULL);
    if (claims && found == 0)
        report(in, "config", "config.json says that weights are NVFP4 (%s), and no tensor is",
               method != NULL ? method : "no quant_method");
}

static void check_unannounced(inspection *in)
{
    if (setting(in, "quantization_config") != NULL) return;
    for (size_t i = 0; i < in->count; i++) {
        if (!is_nvfp4(&in->tensors[i])) continue;
        report(in, "config",
               "'%s' is %s, and config.json has no quantization_config: loaders take it for floats",
               TEXT_NAME(in->tensors[i].info.name), quern_format_name(in->tensors[i].info.format));
        return;
    }
}

void check_config(inspection *in)
{
    if (in->config == NULL) return;
    const inspected *embedding = first_of(in, embeddings);
    check_extent(in, "vocab_size", embedding, 0);
    check_extent(in, "hidden_size", embedding, 1);
    check_heads(in);
    check_counts(in);
    check_quantisation(in);
    check_unannounced(in);
}
