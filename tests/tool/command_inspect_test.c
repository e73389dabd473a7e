/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_inspect_test.c - `quern inspect` recognises every format, measures it, and finds each thing that a
 * loader would trip over: one made checkpoint for each, the sentence and exit code 1. */
#include "command.h"
#include "gguf_bytes.h"
#include "made_model.h"

#include "io/gguf.h"

#include <math.h>

static made_model m;

#define EXPERT "model.layers.0.mlp.experts."

/* A small model in one of the formats, with nothing wrong about it. */
static void make_good(void (*linear)(made_model *, const char *, int64_t, int64_t, float))
{
    made_free(&m);
    made_add(&m, QUERN_BF16, "model.embed_tokens.weight", 2, (const int64_t[]){100, 64});
    made_add(&m, QUERN_BF16, "lm_head.weight", 2, (const int64_t[]){100, 64});
    made_add(&m, QUERN_BF16, "model.layers.0.mlp.gate.weight", 2, (const int64_t[]){2, 64});
    for (int e = 0; e < 2; e++) {
        char name[80];
        for (int part = 0; part < 3; part++) {
            static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
            snprintf(name, sizeof name, EXPERT "%d.%s", e, parts[part]);
            linear(&m, name, 64, 64, part < 2 ? 1e-3f : 2e-3f);
        }
    }
    for (int part = 0; part < 3; part++) {
        static const char *const parts[] = {"q_proj", "k_proj", "v_proj"};
        char name[80];
        snprintf(name, sizeof name, "model.layers.0.self_attn.%s", parts[part]);
        linear(&m, name, 64, 64, 5e-4f);
    }
}

static void write_file(void)
{
    made_write(&m, path_of("model.safetensors"), 0, m.count);
}

/* The file has this one problem. */
static void expect_problem(const char *sentence)
{
    write_file();
    expect(1, "inspect $DIR/model.safetensors", sentence);
    if (strstr(output, "\n1 problem\n") == NULL) fail_msg("not one problem: %s", output);
    expect(1, "inspect $DIR/model.safetensors --json --headers", "\"problems\": [\n    {\n      \"kind\":");
}

/* The tensor's JSON, on one line, has this part. */
static void expect_tensor(const char *file, const char *name, const char *part)
{
    char arguments[128], line[1 << 12], start[160];
    size_t n = 0;
    snprintf(arguments, sizeof arguments, "inspect $DIR/%s --json", file);
    snprintf(start, sizeof start, "\"name\": \"%s\"", name);
    expect(0, arguments, start);
    for (const char *at = strstr(output, start); *at != '\0' && n + 1 < sizeof line; at++) {
        const bool space = *at == '\n' || *at == ' ';
        const bool inside = n > 0 && strchr("[{ ", line[n - 1]) != NULL; /* no space there */
        if (!space) line[n++] = *at;
        else if (!inside && at[strspn(at, " \n")] != ']' && at[strspn(at, " \n")] != '}') line[n++] = ' ';
    }
    line[n] = '\0';
    char *next = strstr(line + 1, "\"name\""); /* of the next tensor */
    if (next != NULL) *next = '\0';
    if (strstr(line, part) == NULL) fail_msg("no %s in %s", part, line);
}

static void good_checkpoints_have_no_problem(void **state)
{
    (void)state;
    make_good(made_modelopt);
    write_file();
    expect(0, "inspect $DIR/model.safetensors", "0 problems");
    assert_non_null(strstr(output, "nvfp4 modelopt"));
    assert_non_null(strstr(output, "30 tensors in 1 file"));
    expect(0, "inspect $DIR/model.safetensors --summary", "nvfp4 modelopt                     9");
    assert_null(strstr(output, "gate_proj"));
    make_good(made_compressed_tensors);
    write_file();
    expect(0, "inspect $DIR/model.safetensors", "nvfp4 compressed-tensors");
    assert_int_equal(mkdir(path_of("sharded"), 0777), 0);
    made_write_shards(&m, path_of("sharded"), 3);
    expect(0, "inspect $DIR/sharded", "30 tensors in 3 files");
    expect(0, "inspect $DIR/sharded --json --threads 1", "\"shard\": \"model-00003-of-00003.safetensors\"");
}

/* One tensor of each other format. */
static void every_format_is_recognised(void **state)
{
    (void)state;
    made_free(&m);
    made_mxfp4(&m, "layers.0.ffn.experts.0.w1", 64, 64);
    made_fp8(&m, "layers.0.attn.wkv", 200, 130, 128);
    made_fp8(&m, "layers.0.attn.wq_a", 40, 64, 32);
    made_fp8(&m, "layers.0.attn.wo_b", 256, 128, 128); /* its scales are a column */
    made_add(&m, QUERN_E4M3, "a.weight", 2, (const int64_t[]){8, 8});
    made_number(&m, "a.weight_scale", 0, 0.5f);
    made_add(&m, QUERN_E4M3, "b.weight", 2, (const int64_t[]){8, 8});
    float *rows = made_add(&m, QUERN_F32, "b.weight_scale", 2, (const int64_t[]){8, 1});
    for (int i = 0; i < 8; i++) rows[i] = 1;
    memset(made_data(&m, "a.weight"), 0x38, 64);
    memset(made_data(&m, "b.weight"), 0x38, 64);
    made_add(&m, QUERN_U8, "l.experts.gate_up_proj_blocks", 4, (const int64_t[]){2, 32, 2, 16});
    memset(made_add(&m, QUERN_U8, "l.experts.gate_up_proj_scales", 3, (const int64_t[]){2, 32, 2}), 120, 128);
    memset(made_add(&m, QUERN_E2M1X2, "t.weight", 2, (const int64_t[]){2, 32}), 0x11, 64);
    memset(made_add(&m, QUERN_E4M3, "t.weight_scale", 2, (const int64_t[]){2, 4}), 0x40, 8);
    made_number(&m, "t.weight_scale_2", 0, 0.25f);
    write_file();
    static const char *const formats[] = {"mxfp4 ",   "fp8 blocks",   "fp8 tensor",
                                          "fp8 rows", "mxfp4 blocks", "nvfp4 modelopt"};
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        expect(0, "inspect $DIR/model.safetensors", formats[i]);
    expect(0, "inspect $DIR/model.safetensors --headers", "0 problems");
    expect_tensor("model.safetensors", "layers.0.attn.wo_b.weight", "\"format\": \"fp8 blocks\"");
    /* 128 codes of 0.5 under 2 * 0.25; 64 values 1, halved */
    expect_tensor(
        "model.safetensors", "t.weight",
        "\"elements\": 128, \"zeros\": 0, \"not_finite\": 0, \"min\": 0.25, \"max\": 0.25, "
        "\"mean\": 0.25, \"rms\": 0.25, \"blocks\": 8, \"bad_scales\": 0, \"saturated_blocks\": 0}");
    expect_tensor(
        "model.safetensors", "a.weight",
        "\"shape\": [8, 8], \"format\": \"fp8 tensor\", \"bytes\": 64, \"shard\": "
        "\"model.safetensors\", \"statistics\": {\"elements\": 64, \"zeros\": 0, \"not_finite\": 0, "
        "\"min\": 0.5, \"max\": 0.5,");
}

static gguf_bytes g;

static void write_gguf(void)
{
    write_text("model.gguf", (const char *)g.bytes, g.size);
}

static void put_float(float value)
{
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    gguf_put(&g, word, 4);
}

/* gate and up of two experts in type 40, and a block of another type. */
static void make_gguf(float gate, float up)
{
    gguf_begin(&g, 3, 5, 2);
    gguf_put_text(&g, "general.architecture", "llama");
    gguf_put_string(&g, "tokenizer.ggml.scores");
    gguf_put(&g, GGUF_ARRAY, 4);
    gguf_put(&g, GGUF_F32, 4);
    gguf_put(&g, 2, 8);
    put_float(0.5f);
    put_float(-1.0f);
    gguf_put_tensor(&g, "blk.0.ffn_gate_exps.weight", GGML_NVFP4, 3, (const int64_t[]){2, 1, 64}, 0);
    gguf_put_tensor(&g, "blk.0.ffn_gate_exps.scale", 0, 1, (const int64_t[]){2}, 96);
    gguf_put_tensor(&g, "blk.0.ffn_up_exps.weight", GGML_NVFP4, 3, (const int64_t[]){2, 1, 64}, 128);
    gguf_put_tensor(&g, "blk.0.ffn_up_exps.scale", 0, 1, (const int64_t[]){2}, 224);
    gguf_put_tensor(&g, "output.weight", 8, 2, (const int64_t[]){1, 32}, 256);
    gguf_align(&g, 32);
    for (int part = 0; part < 2; part++) {
        for (int i = 0; i < 72; i++) gguf_put(&g, i % 36 < 4 ? 0x40 : 0x22, 1);
        gguf_align(&g, 32);
        put_float(0.25f);
        put_float(part == 0 ? gate : up);
        gguf_align(&g, 32);
    }
    for (int i = 0; i < 34; i++) gguf_put(&g, 0, 1);
    write_gguf();
}

static void gguf_is_described(void **state)
{
    (void)state;
    make_gguf(0.5f, 0.5f);
    expect(0, "inspect $DIR/model.gguf", "0 problems");
    assert_non_null(strstr(output, "general.architecture: llama\n"));
    assert_non_null(strstr(output, "tokenizer.ggml.scores: [2 f32: 0.5, -1]\n"));
    assert_non_null(strstr(output, "nvfp4 gguf"));
    assert_non_null(strstr(output, "Q8_0"));
    /* 64 values of 1 * 2 * 0.25, as many of 1 * 2 * 0.5 */
    expect_tensor("model.gguf", "blk.0.ffn_gate_exps.weight", "\"shape\": [2, 1, 64]");
    expect_tensor("model.gguf", "blk.0.ffn_gate_exps.weight", "\"min\": 0.5, \"max\": 1.0");
    make_gguf(0.5f, 0.75f);
    expect(1, "inspect $DIR/model.gguf",
           "'blk.0.ffn_gate_exps.scale' is 0.5 and 'blk.0.ffn_up_exps.scale' 0.75 of expert 1: loaders that "
           "fuse");
    make_gguf(4000.0f, 4000.0f);
    expect(1, "inspect $DIR/model.gguf",
           "'blk.0.ffn_up_exps.scale' is 4000, under a name that means the global itself");
    g.size -= 8;
    write_gguf();
    expect(3, "inspect $DIR/model.gguf", "tensor 'output.weight'");
}

/* A stack whose name is its module's, without ".weight". */
static void the_scale_of_a_stack_is_its_global(void **state)
{
    (void)state;
    gguf_begin(&g, 3, 2, 0);
    gguf_put_tensor(&g, "model.layers.0.mlp.experts.down_proj", GGML_NVFP4, 3, (const int64_t[]){1, 1, 64},
                    0);
    gguf_put_tensor(&g, "model.layers.0.mlp.experts.down_proj.scale", 0, 1, (const int64_t[]){1}, 64);
    gguf_align(&g, 32);
    for (int i = 0; i < 64; i++) gguf_put(&g, i < 36 ? 0x22 : 0, 1);
    put_float(4000);
    write_gguf();
    expect(1, "inspect $DIR/model.gguf", "scales                             1");
    assert_non_null(strstr(output, "down_proj.scale' is 4000, under a name that means the global itself"));
}

static void unequal_globals_are_found(void **state)
{
    (void)state;
    make_good(made_modelopt);
    *(float *)made_data(&m, EXPERT "1.up_proj.weight_scale_2") = 2e-3f;
    expect_problem("'" EXPERT "1.gate_proj.weight_scale_2' is 0.00100000005 and '" EXPERT
                   "1.up_proj.weight_scale_2' 0.00200000009: loaders that fuse them take one for both");
    make_good(made_compressed_tensors);
    *(float *)made_data(&m, EXPERT "0.gate_proj.weight_global_scale") = 500;
    expect_problem("'" EXPERT "0.gate_proj.weight_global_scale' is 500");
    make_good(made_modelopt);
    *(float *)made_data(&m, "model.layers.0.self_attn.v_proj.weight_scale_2") = 1e-3f;
    write_file();
    expect(1, "inspect $DIR/model.safetensors", "self_attn.k_proj.weight_scale_2' is 0.000500000024");
    assert_non_null(strstr(output, "self_attn.q_proj.weight_scale_2' is 0.000500000024"));
    assert_non_null(strstr(output, "\n2 problems\n"));
}

static void missing_scales_are_found(void **state)
{
    (void)state;
    make_good(made_modelopt);
    made_remove(&m, EXPERT "1.up_proj.weight_scale");
    expect_problem("'" EXPERT "1.up_proj.weight_scale' is missing beside '" EXPERT "1.up_proj.weight'");
    make_good(made_modelopt);
    made_remove(&m, EXPERT "1.down_proj.weight_scale_2");
    expect_problem("'" EXPERT "1.down_proj.weight_scale_2' is missing");
    make_good(made_compressed_tensors);
    made_remove(&m, EXPERT "1.down_proj.weight_global_scale");
    expect_problem("'" EXPERT "1.down_proj.weight_global_scale' is missing");
    make_good(made_modelopt);
    made_remove(&m, EXPERT "0.down_proj.weight");
    write_file();
    expect(1, "inspect $DIR/model.safetensors",
           "'" EXPERT "0.down_proj.weight_scale' scales nothing: '" EXPERT "0.down_proj.weight' is missing");
    made_free(&m);
    made_mxfp4(&m, "layers.0.ffn.experts.0.w1", 64, 64);
    made_remove(&m, "layers.0.ffn.experts.0.w1.scale");
    expect_problem("'layers.0.ffn.experts.0.w1.weight_scale' or '.scale' is missing");
    made_free(&m);
    made_add(&m, QUERN_U8, "l.experts.down_proj_blocks", 4, (const int64_t[]){2, 32, 2, 16});
    expect_problem("'l.experts.down_proj_scales' is missing");
    made_free(&m);
    made_fp8(&m, "layers.0.attn.wkv", 128, 128, 128);
    made_remove(&m, "layers.0.attn.wkv.scale");
    write_file();
    expect(1, "inspect $DIR/model.safetensors", "'layers.0.attn.wkv.scale' or '.weight_scale' is missing");
}

static void scales_that_do_not_fit_are_found(void **state)
{
    (void)state;
    make_good(made_modelopt);
    made_remove(&m, EXPERT "1.up_proj.weight_scale");
    made_add(&m, QUERN_E4M3, EXPERT "1.up_proj.weight_scale", 2, (const int64_t[]){64, 2});
    expect_problem("'" EXPERT
                   "1.up_proj.weight_scale' has 128 scales: 64 rows of 64 codes with one for each 16 need "
                   "256");
    make_good(made_modelopt);
    made_retype(&m, EXPERT "1.up_proj.weight_scale", QUERN_E5M2);
    expect_problem("is F8_E5M2: F8_E4M3 is accepted");
    made_free(&m);
    made_fp8(&m, "layers.0.attn.wkv", 200, 130, 128);
    made_remove(&m, "layers.0.attn.wkv.scale");
    made_add(&m, QUERN_E8M0, "layers.0.attn.wkv.scale", 2, (const int64_t[]){2, 3});
    memset(made_data(&m, "layers.0.attn.wkv.scale"), 120, 6);
    write_file();
    expect(1, "inspect $DIR/model.safetensors",
           "'layers.0.attn.wkv.scale' does not fit 'layers.0.attn.wkv.weight' [200, 130]");
}

static void reciprocals_are_found(void **state)
{
    (void)state;
    make_good(made_modelopt);
    *(float *)made_data(&m, EXPERT "1.down_proj.weight_scale_2") = 5376;
    expect_problem("'" EXPERT
                   "1.down_proj.weight_scale_2' is 5376, under a name that means the global itself: weights "
                   "would be up to 1.45e+07, by its reciprocal 0.5");
    make_good(made_compressed_tensors);
    *(float *)made_data(&m, EXPERT "1.down_proj.weight_global_scale") = 1e-4f;
    expect_problem("under a name that means the reciprocal of the global");
}

static void bad_numbers_are_found(void **state)
{
    (void)state;
    make_good(made_modelopt);
    *(float *)made_data(&m, EXPERT "1.down_proj.weight_scale_2") = 0;
    write_file();
    expect(1, "inspect $DIR/model.safetensors --headers",
           "'" EXPERT "1.down_proj.weight_scale_2' is 0: a finite global above 0 is accepted");
    make_good(made_modelopt);
    ((uint8_t *)made_data(&m, EXPERT "1.down_proj.weight_scale"))[7] = 0x80;
    write_file();
    expect(1, "inspect $DIR/model.safetensors",
           "'" EXPERT "1.down_proj.weight': 1 of 256 blocks have a scale that is no number");
    make_good(made_modelopt);
    ((uint16_t *)made_data(&m, "lm_head.weight"))[5] = 0x7f80;
    ((uint16_t *)made_data(&m, "lm_head.weight"))[6] = 0x7fc0;
    write_file();
    expect(1, "inspect $DIR/model.safetensors", "'lm_head.weight': 2 of 6400 values are infinite or NaN");
    expect(0, "inspect $DIR/model.safetensors --headers", "0 problems");
}

static void holes_are_found(void **state)
{
    (void)state;
    make_good(made_modelopt);
    static const char *const suffixes[] = {".weight", ".weight_scale", ".weight_scale_2"};
    for (int i = 0; i < 3; i++) {
        char name[100];
        snprintf(name, sizeof name, EXPERT "0.up_proj%s", suffixes[i]);
        made_remove(&m, name);
    }
    expect_problem("'" EXPERT "0' has no up projection: experts 0 to 1 of this layer have one");
    make_good(made_modelopt);
    made_add(&m, QUERN_F32, EXPERT "99999999.up_proj.bias", 1, (const int64_t[]){64});
    expect_problem("'" EXPERT "' counts experts to 99999999, and has 19 tensors");
    make_good(made_modelopt);
    made_add(&m, QUERN_F32, "model.layers.3.input_layernorm.weight", 1, (const int64_t[]){64});
    expect_problem("layer 1 is missing: the last one is 3");
}

static void make_folder(const char *name, const char *config)
{
    char path[100];
    mkdir(path_of(name), 0777);
    snprintf(path, sizeof path, "%s/model.safetensors", name);
    made_write(&m, path_of(path), 0, m.count);
    snprintf(path, sizeof path, "%s/config.json", name);
    write_text(path, config, strlen(config));
}

static void configs_that_lie_are_found(void **state)
{
    (void)state;
    static const struct {
        const char *config, *sentence;
    } all[] = {
        {"{\"vocab_size\": 101}",
         "config.json says vocab_size 101, extent 0 of 'model.embed_tokens.weight' is 100"},
        {"{\"hidden_size\": 128}", "config.json says hidden_size 128"},
        {"{\"num_hidden_layers\": 2}", "config.json says num_hidden_layers 2, the tensors are of 1"},
        {"{\"text_config\": {\"num_experts\": 4}}", "config.json says num_experts 4, the tensors are of 2"},
        {"{\"tie_word_embeddings\": true}", "config.json says that the head is tied to "
                                            "'model.embed_tokens.weight', and 'lm_head.weight' is here too, "
                                            "with other bytes"},
        {"{\"quantization_config\": {\"quant_method\": \"modelopt\", \"quant_algo\": \"NVFP4\"}}",
         "config.json says quant_algo NVFP4, and '" EXPERT "0.gate_proj.input_scale' is missing"},
        {"{\"quantization_config\": {\"quant_method\": \"modelopt\", \"ignore\": [\"*.self_attn*\"]}}",
         "config.json's ignore has \"*.self_attn*\", and 'model.layers.0.self_attn."},
        {"{\"quantization_config\": 7", "config.json is no JSON"},
        {"[]", "config.json is no JSON object"},
    };
    make_good(made_modelopt);
    make_folder("good",
                "{\"vocab_size\": 100, \"hidden_size\": 64, \"num_hidden_layers\": 1, \"num_experts\": 2, "
                "\"tie_word_embeddings\": false, \"quantization_config\": {\"quant_method\": \"modelopt\", "
                "\"quant_algo\": \"W4A16_NVFP4\", \"ignore\": [\"lm_head\", \"*.mlp.gate\"]}}");
    expect(0, "inspect $DIR/good", "0 problems");
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        make_folder("lies", all[i].config);
        expect(1, "inspect $DIR/lies", all[i].sentence);
    }
    make_folder("lies", "{}");
    expect(1, "inspect $DIR/lies", "is nvfp4 modelopt, and config.json has no quantization_config");
    made_remove(&m, "lm_head.weight");
    make_folder("lies", "{\"tie_word_embeddings\": false, \"quantization_config\": {}}");
    expect(1, "inspect $DIR/lies", "the head is not tied to 'model.embed_tokens.weight', and there is none");
    made_free(&m);
    made_add(&m, QUERN_BF16, "model.layers.0.mlp.up_proj.weight", 2, (const int64_t[]){64, 64});
    make_folder("lies", "{\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": "
                        "\"nvfp4-pack-quantized\"}}");
    expect(1, "inspect $DIR/lies",
           "config.json says that weights are NVFP4 (compressed-tensors), and no tensor is");
}

static void an_index_that_lies_is_found(void **state)
{
    (void)state;
    static const struct {
        const char *index, *sentence;
    } all[] = {
        {"{\"weight_map\": {\"a\": \"two.safetensors\", \"b\": \"two.safetensors\"}}",
         "tensor 'a' is not in shard 'two.safetensors', where it says so"},
        {"{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"two.safetensors\", \"c\": "
         "\"two.safetensors\"}}",
         "tensor 'c' is not in shard 'two.safetensors'"},
        {"{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"three.safetensors\"}}", "three.safetensors"},
        {"{\"weight_map\": {\"a\": \"one.safetensors\"", "no valid JSON"},
    };
    made_free(&m);
    made_add(&m, QUERN_F32, "a", 1, (const int64_t[]){4});
    made_add(&m, QUERN_F32, "b", 1, (const int64_t[]){4});
    assert_int_equal(mkdir(path_of("index"), 0777), 0);
    made_write(&m, path_of("index/one.safetensors"), 0, 1);
    made_write(&m, path_of("index/two.safetensors"), 1, 2);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        write_text("index/model.safetensors.index.json", all[i].index, strlen(all[i].index));
        expect(1, "inspect $DIR/index", all[i].sentence);
        expect(1, "inspect $DIR/index --json", "\"kind\": \"index\"");
    }
}

static void what_is_no_checkpoint_is_refused(void **state)
{
    (void)state;
    expect(3, "inspect $DIR/none", "none");
    write_text("text", "no checkpoint", 13);
    expect(3, "inspect $DIR/text", "text");
    assert_int_equal(mkdir(path_of("empty"), 0777), 0);
    expect(3, "inspect $DIR/empty", "an index, or one file, is needed");
    expect(2, "inspect", "one file or folder is accepted");
    expect(2, "inspect a b", "2 paths are given");
    expect(2, "inspect --threads -1 $DIR/text", "--threads -1");
    expect(0, "inspect --help", "examples:");
    expect(0, "--help", "  inspect");
}

/* A name may hold anything; the terminal gets no control character. */
static void strange_names_are_escaped(void **state)
{
    (void)state;
    made_free(&m);
    made_add(&m, QUERN_F32, "a\x1b[31m\nb", 1, (const int64_t[]){4});
    made_add(&m, QUERN_F32, "z\xc0\x80", 1, (const int64_t[]){0});
    write_file();
    expect(0, "inspect $DIR/model.safetensors", "a\\x1b[31m\\x0ab");
    expect(0, "inspect $DIR/model.safetensors --json", "\"a\\u001B[31m\\nb\"");
    assert_non_null(strstr(output, "\"z\\u0000\""));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_checkpoints_have_no_problem),
        cmocka_unit_test(every_format_is_recognised),
        cmocka_unit_test(gguf_is_described),
        cmocka_unit_test(the_scale_of_a_stack_is_its_global),
        cmocka_unit_test(unequal_globals_are_found),
        cmocka_unit_test(missing_scales_are_found),
        cmocka_unit_test(scales_that_do_not_fit_are_found),
        cmocka_unit_test(reciprocals_are_found),
        cmocka_unit_test(bad_numbers_are_found),
        cmocka_unit_test(holes_are_found),
        cmocka_unit_test(configs_that_lie_are_found),
        cmocka_unit_test(an_index_that_lies_is_found),
        cmocka_unit_test(what_is_no_checkpoint_is_refused),
        cmocka_unit_test(strange_names_are_escaped),
    };
    const int failed = cmocka_run_group_tests(tests, make_directory, remove_directory);
    made_free(&m);
    return failed;
}
