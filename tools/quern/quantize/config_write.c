/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/config_write.h"

#include "command.h"
#include "output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The lists are of NULL pointers where memory lacks: jansson's functions pass them on, and the end
 * reports it. */
static void append(json_t *list, const char *format, size_t size, const char *name)
{
    char *text = NULL;
    if (asprintf(&text, format, (int)size, name) < 0) return;
    json_array_append_new(list, json_string(text));
    free(text);
}

/* Modules that are not quantised: lm_head, routers, and every linear module left alone. */
static json_t *left_alone(const conversion *c)
{
    json_t *list = json_array();
    json_array_append_new(list, json_string("lm_head"));
    for (size_t i = 0; i < c->list.stored_count; i++) {
        const stored_weight *s = &c->list.stored[i];
        const char *name = s->tensor->name;
        const size_t size = s->stack && s->name.parent > 0 ? s->name.parent - 1 : s->name.module;
        if (s->chosen || checkpoint_name_is_embedding(name) || checkpoint_name_is_norm(name)) continue;
        if (size == strlen("lm_head") && strncmp(name, "lm_head", size) == 0) continue;
        append(list, "%.*s", size, name);
    }
    return list;
}

static bool all_have_input_scales(const conversion *c)
{
    for (size_t i = 0; i < c->list.count; i++)
        if (!(c->list.modules[i].input_scale > 0.0f)) return false;
    return c->list.count > 0;
}

static json_t *producer(void)
{
    return json_pack("{s:s, s:s}", "name", "modelopt", "version", quern_version());
}

/* ---- ModelOpt ---- */

static json_t *modelopt_values(void)
{
    return json_pack("{s:b, s:i, s:s, s:i}", "dynamic", 0, "num_bits", 4, "type", "float", "group_size", 16);
}

static json_t *modelopt_groups(bool activations)
{
    json_t *group = json_pack("{s:[s], s:o}", "targets", "Linear", "weights", modelopt_values());
    if (activations) json_object_set_new(group, "input_activations", modelopt_values());
    return json_pack("{s:o}", "group_0", group);
}

static json_t *modelopt_config(const conversion *c, const char *algo)
{
    return json_pack("{s:s, s:s, s:o, s:o, s:o}", "quant_method", "modelopt", "quant_algo", algo, "ignore",
                     left_alone(c), "config_groups", modelopt_groups(strcmp(algo, "NVFP4") == 0), "producer",
                     producer());
}

static json_t *modelopt_file(const conversion *c, const char *algo)
{
    return json_pack("{s:o, s:{s:s, s:n, s:i, s:o}}", "producer", producer(), "quantization", "quant_algo",
                     algo, "kv_cache_quant_algo", "group_size", 16, "exclude_modules", left_alone(c));
}

/* ---- DeepSeek-V4 ---- */

static json_t *v4_ignore(const conversion *c)
{
    json_t *list = json_pack("[s, s, s]", "*.attn.*", "*.ffn.shared_experts.*", "head");
    if (!c->options->include_mtp) json_array_append_new(list, json_string("mtp.*"));
    return list;
}

/* The experts' modules by layer, in the layers' order. */
static json_t *v4_layers(const conversion *c)
{
    json_t *layers = json_object();
    for (size_t i = 0; i < c->list.count; i++) {
        const module *m = &c->list.modules[i];
        char name[64];
        snprintf(name, sizeof name, "%s.%lld.ffn.experts", m->parsed.mtp ? "mtp" : "layers",
                 (long long)m->parsed.layer);
        if (json_object_get(layers, name) == NULL)
            json_object_set_new(layers, name,
                                json_pack("{s:s, s:i}", "quant_algo", "NVFP4", "group_size", 16));
    }
    return layers;
}

static json_t *v4_config(const conversion *c)
{
    static const char *const kept[] = {"quant_method", "fmt", "scale_fmt", "activation_scheme",
                                       "weight_block_size"};
    const json_t *old = json_object_get(c->config, "quantization_config");
    json_t *q = json_object();
    json_object_set_new(q, "quant_method", json_string("fp8"));
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (json_object_get(old, kept[i]) != NULL) json_object_set(q, kept[i], json_object_get(old, kept[i]));
    json_object_set_new(q, "moe_quant_algo", json_string("NVFP4"));
    json_object_set_new(q, "quant_algo", json_string("MIXED_PRECISION"));
    json_object_set_new(q, "kv_cache_quant_algo", json_null());
    json_object_set_new(q, "group_size", json_integer(16));
    json_object_set_new(q, "producer", producer());
    json_object_set_new(q, "config_groups", modelopt_groups(true));
    json_object_set_new(q, "quantized_layers", v4_layers(c));
    json_object_set_new(q, "ignore", v4_ignore(c));
    return q;
}

static json_t *v4_file(const conversion *c)
{
    return json_pack("{s:o, s:{s:s, s:n, s:i, s:o, s:o}}", "producer", producer(), "quantization",
                     "quant_algo", "MIXED_PRECISION", "kv_cache_quant_algo", "group_size", 16,
                     "quantized_layers", v4_layers(c), "exclude_modules", v4_ignore(c));
}

/* ---- compressed-tensors ---- */

static json_t *compressed_values(void)
{
    return json_pack("{s:i, s:s, s:s, s:i, s:b, s:b, s:s}", "num_bits", 4, "type", "float", "strategy",
                     "tensor_group", "group_size", 16, "symmetric", 1, "dynamic", 0, "scale_dtype",
                     "torch.float8_e4m3fn");
}

static json_t *compressed_config(const conversion *c)
{
    json_t *activations = json_null();
    if (all_have_input_scales(c)) {
        activations = compressed_values();
        json_object_set_new(activations, "dynamic", json_string("local"));
    }
    return json_pack("{s:s, s:s, s:s, s:o, s:{s:{s:[s], s:o, s:o}}}", "quant_method", "compressed-tensors",
                     "format", "nvfp4-pack-quantized", "quantization_status", "compressed", "ignore",
                     left_alone(c), "config_groups", "group_0", "targets", "Linear", "weights",
                     compressed_values(), "input_activations", activations);
}

/* ---- files ---- */

static int write_json(const char *folder, const char *name, json_t *root)
{
    char *path = NULL;
    int code = EXIT_MACHINE;
    if (root == NULL || asprintf(&path, "%s/%s", folder, name) < 0) fail(code, "no memory for %s", name);
    else code = output_json(path, root, JSON_INDENT(2));
    json_decref(root);
    free(path);
    return code;
}

int configs_write(const conversion *c, const char *folder)
{
    const char *algo = all_have_input_scales(c) ? "NVFP4" : "W4A16_NVFP4";
    int code = EXIT_DONE;
    if (c->format == FORMAT_MODELOPT)
        code = write_json(folder, "hf_quant_config.json", c->v4 ? v4_file(c) : modelopt_file(c, algo));
    json_t *config = c->config != NULL ? json_copy(c->config) : json_object();
    json_object_del(config, "quantization_config");
    json_t *q = c->format == FORMAT_BF16                 ? NULL
                : c->format == FORMAT_COMPRESSED_TENSORS ? compressed_config(c)
                : c->v4                                  ? v4_config(c)
                                                         : modelopt_config(c, algo);
    if (q != NULL) json_object_set_new(config, "quantization_config", q);
    if (code != EXIT_DONE || (c->config == NULL && q == NULL)) {
        json_decref(config);
        return code;
    }
    return write_json(folder, "config.json", config);
}

int index_write(const conversion *c, const output_file *files, const char *folder)
{
    if (c->model->index == NULL) return EXIT_DONE;
    json_t *map = json_object();
    json_int_t total = 0;
    for (size_t i = 0; i < c->model->shard_count; i++)
        for (size_t k = 0; k < files[i].count; k++) {
            json_object_set_new(map, files[i].tensors[k].name, json_string(files[i].name));
            total += output_bytes(&files[i].tensors[k]);
        }
    return write_json(folder, c->model->index,
                      json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total, "weight_map", map));
}
