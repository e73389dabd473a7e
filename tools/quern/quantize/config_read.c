/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* config_read.c - config.json, compared with the tensors' shapes before anything is written. */
#include "quantize/conversion.h"

#include "command.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A number of config.json; -1: it is not there. */
static int64_t number(const conversion *c, const char *key)
{
    const json_t *value = json_object_get(c->config, key);
    return json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
}

static int lies(const char *key, int64_t says, const model_tensor *t)
{
    char shape[128] = "";
    size_t used = 0;
    for (int32_t i = 0; i < t->ndim && used < sizeof shape; i++)
        used += (size_t)snprintf(shape + used, sizeof shape - used, "%s%lld", i > 0 ? ", " : "",
                                 (long long)t->shape[i]);
    return fail(EXIT_INPUT, "config.json: %s is %lld, tensor '%s' has the shape [%s]", key, (long long)says,
                TEXT_NAME(t->name), shape);
}

/* Whether the tensor is of a layer of the language model, whose sizes config.json has at its top. */
static bool of_a_layer(const char *name)
{
    return strncmp(name, "model.layers.", 13) == 0 || strncmp(name, "layers.", 7) == 0 ||
           strncmp(name, "encoder.layer.", 14) == 0;
}

static int check_weight(const conversion *c, const stored_weight *s)
{
    const name_part part = s->name.part;
    const bool reads_hidden = part == NAME_GATE || part == NAME_UP || part == NAME_GATE_UP;
    const int64_t hidden = number(c, "hidden_size"), own = number(c, "moe_intermediate_size");
    const bool moe = s->name.in_experts;
    const int64_t inner = own >= 0 ? own : c->gpt_oss ? number(c, "intermediate_size") : -1;
    if (s->unreadable != NULL || !of_a_layer(s->tensor->name)) return EXIT_DONE;
    if (reads_hidden && hidden >= 0 && s->first.columns != hidden)
        return lies("hidden_size", hidden, s->tensor);
    if (!moe || inner < 0) return EXIT_DONE;
    const int64_t rows = part == NAME_GATE_UP ? s->first.rows / 2 : s->first.rows;
    const int64_t found = part == NAME_DOWN ? s->first.columns : rows;
    return found == inner ? EXIT_DONE
                          : lies(own >= 0 ? "moe_intermediate_size" : "intermediate_size", inner, s->tensor);
}

static int check_embedding(const conversion *c)
{
    static const char *const names[] = {"model.embed_tokens.weight", "embed.weight"};
    const int64_t hidden = number(c, "hidden_size"), vocab = number(c, "vocab_size");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const model_tensor *t = model_files_find(c->model, names[i]);
        if (t == NULL || t->ndim != 2) continue;
        if (hidden >= 0 && t->shape[1] != hidden) return lies("hidden_size", hidden, t);
        if (vocab >= 0 && t->shape[0] != vocab) return lies("vocab_size", vocab, t);
    }
    return EXIT_DONE;
}

/* Layers and experts by number: config.json counts what is there. */
static int check_counts(const conversion *c)
{
    static const char *const experts_keys[] = {"n_routed_experts", "num_local_experts", "num_experts"};
    int64_t layers = -1, experts = -1;
    for (size_t i = 0; i < c->list.stored_count; i++) {
        const stored_weight *s = &c->list.stored[i];
        if (!of_a_layer(s->tensor->name)) continue;
        const int64_t last = s->stack ? s->experts - 1 : s->name.expert;
        if (s->name.layer > layers) layers = s->name.layer;
        if (last > experts) experts = last;
    }
    const int64_t said = number(c, "num_hidden_layers"), more = number(c, "num_nextn_predict_layers");
    if (layers >= 0 && said >= 0 && (layers + 1 < said || layers + 1 > said + (more > 0 ? more : 0)))
        return fail(EXIT_INPUT, "config.json: num_hidden_layers is %lld, the tensors have %lld layers",
                    (long long)said, (long long)layers + 1);
    for (size_t i = 0; i < sizeof experts_keys / sizeof *experts_keys && experts >= 0; i++) {
        const int64_t n = number(c, experts_keys[i]);
        if (n < 0) continue;
        if (n != experts + 1)
            return fail(EXIT_INPUT, "config.json: %s is %lld, the tensors have %lld experts", experts_keys[i],
                        (long long)n, (long long)experts + 1);
        break;
    }
    return EXIT_DONE;
}

/* DeepSeek-V4's names under another model_type, and the reverse. */
static int check_model_type(const conversion *c)
{
    const json_t *dtype = json_object_get(c->config, "expert_dtype");
    const char *wanted = json_is_string(dtype) ? json_string_value(dtype) : "fp4";
    bool experts = false;
    for (size_t i = 0; i < c->list.stored_count; i++) {
        const stored_weight *s = &c->list.stored[i];
        const char *name = s->tensor->name;
        if (!s->name.in_experts || s->stack ||
            (strncmp(name, "layers.", 7) != 0 && strncmp(name, "mtp.", 4) != 0))
            continue;
        experts = true;
        if (!c->v4)
            return fail(EXIT_INPUT,
                        "model_type '%s': tensor '%s' is of the layout that deepseek_v4 alone is read with",
                        c->model_type, TEXT_NAME(name));
        if (s->first.encoding != (strcmp(wanted, "fp8") == 0 ? ENCODING_FP8 : ENCODING_MXFP4) &&
            s->first.encoding != ENCODING_NVFP4)
            return fail(EXIT_INPUT, "config.json: expert_dtype is %s, tensor '%s' is of dtype %s", wanted,
                        TEXT_NAME(name), s->tensor->dtype);
    }
    if (c->v4 && !experts)
        return fail(EXIT_INPUT,
                    "model_type 'deepseek_v4': tensors layers.N.ffn.experts.E.w1 are needed, there are none");
    return EXIT_DONE;
}

int config_check(const conversion *c)
{
    if (c->config == NULL) return EXIT_DONE;
    int code = check_model_type(c);
    for (size_t i = 0; i < c->list.stored_count && code == EXIT_DONE; i++)
        code = check_weight(c, &c->list.stored[i]);
    if (code == EXIT_DONE) code = check_embedding(c);
    return code == EXIT_DONE ? check_counts(c) : code;
}

/* Biases of a stack of experts, which gpt-oss alone has. */
static bool has_stack_bias(const conversion *c)
{
    for (size_t i = 0; i < c->model->count; i++) {
        const checkpoint_name n = checkpoint_name_read(c->model->tensors[i].name);
        if (n.role == NAME_BIAS && n.part == NAME_GATE_UP && n.stacked) return true;
    }
    return false;
}

int config_open(conversion *c)
{
    json_error_t error;
    char *path = NULL;
    c->model_type = "";
    if (c->model->folder != NULL && asprintf(&path, "%s/config.json", c->model->folder) < 0)
        return fail(EXIT_MACHINE, "no memory for a path");
    if (path != NULL && access(path, F_OK) == 0) {
        c->config = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
        if (!json_is_object(c->config)) {
            const int code = fail(EXIT_INPUT, "'%s': %s", TEXT_NAME(path),
                                  c->config != NULL ? "a JSON object is needed" : error.text);
            free(path);
            return code;
        }
        const json_t *type = json_object_get(c->config, "model_type");
        if (json_is_string(type)) c->model_type = json_string_value(type);
    }
    free(path);
    c->v4 = strcmp(c->model_type, "deepseek_v4") == 0;
    c->gpt_oss = strcmp(c->model_type, "gpt_oss") == 0 || (c->config == NULL && has_stack_bias(c));
    if (c->v4 && c->format != FORMAT_MODELOPT && c->format != FORMAT_BF16)
        return fail(EXIT_INPUT, "--format %s: of a model of model_type deepseek_v4 modelopt is accepted",
                    c->format == FORMAT_GGUF ? "gguf" : "compressed-tensors");
    return EXIT_DONE;
}
