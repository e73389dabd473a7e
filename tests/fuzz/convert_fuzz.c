/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * convert_fuzz.c - feeds any text to what `quern quantize` reads beside the tensors: as the config.json of
 * small models, as --input-scales, and as --name-map. What is accepted is a plan of every module; what is not
 * has a sentence.
 */
#include "fuzz.h"
#include "json_grammar.h"
#include "made_model.h"

#include "command.h"
#include "quantize/conversion.h"
#include "quantize/name_map.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Linears and experts, gpt-oss' stacks, DeepSeek-V4; and two whose configs are not the text. */
enum { LINEARS, STACKS, V4, PLAIN_LINEARS, FIXED_V4, MODELS };
static const char *const models[MODELS] = {"linears", "stacks", "v4", "plain", "fixed"};
static const char fixed_config[] = "{\"model_type\":\"deepseek_v4\"}";
static const char *const files[] = {"0.safetensors", "config.json"};

static char folder[] = "convert_fuzz.XXXXXX";
static model_files *opened[MODELS];
static int sentences; /* of this input */

/* The command's, which prints. */
int fail(int code, const char *format, ...)
{
    char sentence[4096];
    va_list args;
    va_start(args, format);
    const int size = vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    if (size <= 0 || code == EXIT_DONE || code == EXIT_DEFECT) abort();
    sentences++;
    return code;
}

static const char *file_of(const char *model, const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s/%s", folder, model, name);
    return path;
}

static void remove_folder(void)
{
    for (int i = 0; i < MODELS; i++) {
        model_files_close(opened[i]);
        for (int k = 0; k < 2; k++) unlink(file_of(models[i], files[k]));
        rmdir(file_of(models[i], ""));
    }
    unlink(file_of("", "text"));
    rmdir(folder);
}

static void add_linears(made_model *m, const char *const *names, int count)
{
    for (int i = 0; i < count; i++) made_add(m, QUERN_BF16, names[i], 2, (const int64_t[]){64, 64});
}

static void make_model(made_model *m, int which)
{
    static const char *const linears[] = {"model.embed_tokens.weight",
                                          "lm_head.weight",
                                          "model.layers.0.self_attn.q_proj.weight",
                                          "model.layers.0.self_attn.k_proj.weight",
                                          "model.layers.0.mlp.gate.weight",
                                          "model.layers.0.mlp.experts.0.gate_proj.weight",
                                          "model.layers.0.mlp.experts.0.up_proj.weight",
                                          "model.layers.0.mlp.experts.0.down_proj.weight",
                                          "model.layers.1.mlp.experts.0.up_proj.weight"};
    if (which == LINEARS || which == PLAIN_LINEARS) {
        add_linears(m, linears, 9);
        made_modelopt(m, "model.layers.1.mlp.up_proj", 64, 64, 1e-3f);
    } else if (which == STACKS) {
        made_add(m, QUERN_BF16, "model.layers.0.mlp.experts.gate_up_proj", 3, (const int64_t[]){2, 64, 128});
        made_add(m, QUERN_BF16, "model.layers.0.mlp.experts.gate_up_proj_bias", 2, (const int64_t[]){2, 128});
        made_add(m, QUERN_BF16, "model.layers.0.mlp.experts.down_proj", 3, (const int64_t[]){2, 64, 64});
    } else {
        made_mxfp4(m, "layers.0.ffn.experts.0.w1", 64, 64);
        made_mxfp4(m, "layers.0.ffn.experts.0.w2", 64, 64);
        made_mxfp4(m, "layers.0.ffn.experts.0.w3", 64, 64);
        made_mxfp4(m, "mtp.0.ffn.experts.0.w1", 64, 64);
        made_fp8(m, "layers.0.attn.wkv", 64, 64, 32);
    }
}

/* The text, the fixed one, or none. */
static bool make_config(int which)
{
    const char *path = file_of(models[which], files[1]);
    if (which == PLAIN_LINEARS) return true;
    if (which != FIXED_V4) return symlink("../text", path) == 0;
    FILE *f = fopen(path, "w");
    return f != NULL && fputs(fixed_config, f) >= 0 && fclose(f) == 0;
}

static void make_folder(void)
{
    char why[MODEL_SENTENCE];
    if (mkdtemp(folder) == NULL) abort();
    atexit(remove_folder);
    for (int i = 0; i < MODELS; i++) {
        static made_model m;
        make_model(&m, i);
        if (mkdir(file_of(models[i], ""), 0700) != 0) abort();
        made_write(&m, file_of(models[i], files[0]), 0, m.count);
        made_free(&m);
        if (!make_config(i)) abort();
        if (model_files_open(file_of(models[i], ""), &opened[i], why) != QUERN_OK) abort();
    }
}

/* Every module is in one group, and has a matrix. */
static void check_plan(const conversion *c)
{
    size_t members = 0;
    for (size_t i = 0; i < c->list.group_count; i++) members += c->list.groups[i].count;
    if (members != c->list.count) abort();
    for (size_t i = 0; i < c->list.count; i++) {
        const module *m = &c->list.modules[i];
        if (m->group >= c->list.group_count || m->weight.rows < 1 || m->weight.columns < 1) abort();
        if (!(m->input_scale >= 0.0f) || m->input_scale > 3.402823466e38f) abort();
    }
}

static void plan(int which, target_format format, const char *input_scales, bool include_mtp)
{
    const quantize_options options = {
        .format = format, .input_scales = input_scales, .include_mtp = include_mtp};
    conversion c = {.options = &options, .format = format, .model = opened[which], .threads = 1};
    sentences = 0;
    int code = config_open(&c);
    if (code == EXIT_DONE) code = choose_modules(&c);
    if (code == EXIT_DONE) code = read_input_scales(&c);
    if ((code == EXIT_DONE) != (sentences == 0) || sentences > 1) abort();
    if (code == EXIT_DONE) check_plan(&c);
    modules_free(&c.list);
    json_decref(c.config);
}

static void rename_all(const char *path)
{
    name_map map;
    sentences = 0;
    const int code = name_map_read(path, &map);
    if ((code == EXIT_DONE) != (sentences == 0)) abort();
    for (size_t i = 0; i < opened[0]->count && code == EXIT_DONE; i++) {
        int64_t expert;
        char *name = name_map_apply(&map, opened[0]->tensors[i].name, &expert);
        if (name == NULL || expert < -1) abort();
        free(name);
    }
    name_map_free(&map);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char text[256];
    if (opened[0] == NULL) make_folder();
    snprintf(text, sizeof text, "%s", file_of("", "text"));
    unlink(text); /* a new file: what replaces another's bytes may go to the disk at once */
    FILE *f = fopen(text, "wb");
    if (f == NULL || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
    for (target_format format = FORMAT_MODELOPT; format <= FORMAT_BF16; format++)
        plan(LINEARS, format, NULL, false);
    plan(STACKS, FORMAT_COMPRESSED_TENSORS, "0.5", false);
    plan(V4, FORMAT_MODELOPT, "0.5", true);
    plan(PLAIN_LINEARS, FORMAT_MODELOPT, text, false);
    plan(FIXED_V4, FORMAT_MODELOPT, text, true);
    rename_all(text);
    return 0;
}

size_t fuzz_mutate(uint8_t *file, size_t size, size_t room)
{
    return json_mutate_text(file, size, room);
}

size_t fuzz_seed(size_t index, uint8_t *file)
{
    return json_seed(QUERN_FUZZ_CORPUS "/convert/*", index, file);
}
