/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * command_quantize_test.c - `quern quantize` on a small made model: its bytes are the library's own, what
 * stays is copied, a run that was interrupted goes on, and bad input is one sentence that leaves nothing
 * behind.
 */
#include "command.h"

#include <quern/nvfp4.h>
#include <quern/safetensors.h>

#include <signal.h>
#include <unistd.h>

enum { HIDDEN = 128, INNER = 192, VOCAB = 80 };
#define CONFIG                                                                                               \
    "{\"model_type\":\"llama\",\"hidden_size\":128,\"intermediate_size\":192,\"num_hidden_layers\":2,"       \
    "\"vocab_size\":80}"

/* ---- a made model ---- */

static uint16_t next_weight(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (uint16_t)((*state >> 16 & 0x807f) | (120 + (*state >> 8) % 6) << 7);
}

typedef struct made {
    char names[16][64];
    quern_tensor views[16];
    size_t count;
} made;

static void add(made *m, const char *name, int64_t rows, int64_t columns, uint32_t *state)
{
    const int64_t shape[] = {rows, columns};
    uint16_t *data = malloc((size_t)(rows * columns) * sizeof *data);
    assert_non_null(data);
    for (int64_t i = 0; i < rows * columns; i++) data[i] = next_weight(state);
    snprintf(m->names[m->count], sizeof m->names[0], "%s", name);
    m->views[m->count++] = quern_tensor_contiguous(data, QUERN_BF16, columns > 1 ? 2 : 1, shape);
}

static void save(made *m, const char *path)
{
    quern_safetensors_item items[16];
    const quern_safetensors_pair pair = {"format", "pt"};
    for (size_t i = 0; i < m->count; i++) items[i] = (quern_safetensors_item){m->names[i], &m->views[i]};
    assert_int_equal(quern_safetensors_save(path_of(path), items, m->count, &pair, 1), QUERN_OK);
    for (size_t i = 0; i < m->count; i++) free(m->views[i].data);
    m->count = 0;
}

/* A model of two layers, a shard each. */
static void make_model(void)
{
    static const char *const parts[] = {"self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj",
                                        "mlp.up_proj", "mlp.down_proj"};
    static const int64_t shapes[][2] = {
        {HIDDEN, HIDDEN}, {64, HIDDEN}, {INNER, HIDDEN}, {INNER, HIDDEN}, {HIDDEN, INNER}};
    uint32_t state = 7;
    made m = {0};
    char index[4096] = "{\"metadata\":{},\"weight_map\":{", shard[32];
    mkdir(path_of("model"), 0777);
    for (int layer = 0; layer < 2; layer++) {
        snprintf(shard, sizeof shard, "%d.safetensors", layer);
        char name[64];
        for (size_t i = 0; i < 5; i++) {
            snprintf(name, sizeof name, "model.layers.%d.%s.weight", layer, parts[i]);
            add(&m, name, shapes[i][0], shapes[i][1], &state);
        }
        snprintf(name, sizeof name, "model.layers.%d.input_layernorm.weight", layer);
        add(&m, name, HIDDEN, 1, &state);
        add(&m, layer == 0 ? "model.embed_tokens.weight" : "lm_head.weight", VOCAB, HIDDEN, &state);
        for (size_t i = 0; i < m.count; i++)
            snprintf(index + strlen(index), sizeof index - strlen(index), "%s\"%s\":\"%s\"",
                     layer + (int)i > 0 ? "," : "", m.names[i], shard);
        char path[64];
        snprintf(path, sizeof path, "model/%s", shard);
        save(&m, path);
    }
    strcat(index, "}}");
    write_text("model/model.safetensors.index.json", index, strlen(index));
    write_text("model/config.json", CONFIG, strlen(CONFIG));
    write_text("model/tokenizer.json", "{\"a\":1}", 7);
}

static int setup(void **state)
{
    if (make_directory(state) != 0) return -1;
    make_model();
    return 0;
}

static void shell(const char *format, ...)
{
    char text[512], command[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    snprintf(command, sizeof command, "cd '%s' && %s", directory, text);
    assert_int_equal(system(command), 0);
}

static quern_safetensors *open_shard(const char *name)
{
    quern_safetensors *file = NULL;
    if (quern_safetensors_open(path_of(name), &file) != QUERN_OK)
        fail_msg("%s: %s", name, quern_last_error(NULL));
    return file;
}

static quern_tensor get(const quern_safetensors *file, const char *name)
{
    quern_tensor t;
    if (quern_safetensors_get(file, name, &t) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return t;
}

static size_t bytes_of(const quern_tensor *t)
{
    size_t n = quern_dtype_size(t->dtype);
    for (int32_t i = 0; i < t->ndim; i++) n *= (size_t)t->shape[i];
    return n;
}

static void expect_equal(const quern_tensor *a, const quern_tensor *b)
{
    assert_int_equal(bytes_of(a), bytes_of(b));
    assert_memory_equal(a->data, b->data, bytes_of(a));
}

/* ---- what is written ---- */

/* Codes and scales of the library for the module, with the global that the file has. */
static void expect_library_bytes(const quern_safetensors *in, const quern_safetensors *out,
                                 const char *module, quern_nvfp4_profile profile, quern_nvfp4_scales scales)
{
    char name[4][128];
    const bool modelopt = profile == QUERN_NVFP4_PROFILE_MODELOPT;
    static const char *const suffixes[2][3] = {{".weight_packed", ".weight_scale", ".weight_global_scale"},
                                               {".weight", ".weight_scale", ".weight_scale_2"}};
    for (int i = 0; i < 3; i++) snprintf(name[i], sizeof name[i], "%s%s", module, suffixes[modelopt][i]);
    snprintf(name[3], sizeof name[3], "%s.weight", module);
    const quern_tensor x = get(in, name[3]), codes = get(out, name[0]), block_scales = get(out, name[1]);
    quern_tensor global = get(out, name[2]), own_codes = codes, own_scales = block_scales;
    assert_int_equal(codes.dtype, QUERN_U8);
    assert_int_equal(block_scales.dtype, QUERN_E4M3);
    assert_int_equal(global.ndim, modelopt ? 0 : 1);
    global.ndim = 0;
    own_codes.data = malloc(bytes_of(&codes));
    own_scales.data = malloc(bytes_of(&block_scales));
    quern_nvfp4_quantize_params params = QUERN_NVFP4_QUANTIZE_PARAMS_INIT;
    quern_nvfp4_quantize_tensors tensors = QUERN_NVFP4_QUANTIZE_TENSORS_INIT;
    params.profile = profile;
    params.scales = scales;
    tensors.x = &x;
    tensors.given_global = &global;
    tensors.codes = &own_codes;
    tensors.scales = &own_scales;
    quern_context *ctx = NULL;
    size_t bytes = 0;
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    assert_int_equal(quern_nvfp4_quantize_workspace(ctx, &params, &tensors, &bytes), QUERN_OK);
    void *workspace = aligned_alloc(64, bytes + 64 - bytes % 64);
    assert_int_equal(quern_nvfp4_quantize(ctx, NULL, &params, &tensors, workspace, bytes), QUERN_OK);
    expect_equal(&codes, &own_codes);
    expect_equal(&block_scales, &own_scales);
    quern_context_destroy(ctx);
    free(workspace);
    free(own_codes.data);
    free(own_scales.data);
}

static float number(const quern_safetensors *file, const char *name)
{
    const quern_tensor t = get(file, name);
    return *(const float *)t.data;
}

static void formats_have_the_library_s_bytes(void **state)
{
    (void)state;
    static const char *const choices[] = {"rne", "four-over-six", "search"};
    for (int scales = 0; scales < 3; scales++) {
        char command[256];
        shell("rm -rf out ct");
        snprintf(command, sizeof command, "quantize $DIR/model $DIR/out --format modelopt --scales %s",
                 choices[scales]);
        expect(0, command, "q_proj.weight");
        snprintf(command, sizeof command,
                 "quantize $DIR/model $DIR/ct --format compressed-tensors --scales %s", choices[scales]);
        expect(0, command, "q_proj.weight");
        quern_safetensors *in = open_shard("model/0.safetensors"), *out = open_shard("out/0.safetensors"),
                          *ct = open_shard("ct/0.safetensors");
        expect_library_bytes(in, out, "model.layers.0.self_attn.q_proj", QUERN_NVFP4_PROFILE_MODELOPT,
                             (quern_nvfp4_scales)scales);
        expect_library_bytes(in, out, "model.layers.0.mlp.down_proj", QUERN_NVFP4_PROFILE_MODELOPT,
                             (quern_nvfp4_scales)scales);
        expect_library_bytes(in, ct, "model.layers.0.mlp.up_proj", QUERN_NVFP4_PROFILE_COMPRESSED_TENSORS,
                             (quern_nvfp4_scales)scales);
        assert_true(number(out, "model.layers.0.self_attn.q_proj.weight_scale_2") ==
                    number(out, "model.layers.0.self_attn.k_proj.weight_scale_2"));
        assert_true(number(ct, "model.layers.0.mlp.gate_proj.weight_global_scale") ==
                    number(ct, "model.layers.0.mlp.up_proj.weight_global_scale"));
        const quern_tensor before = get(in, "model.embed_tokens.weight"),
                           after = get(out, "model.embed_tokens.weight");
        expect_equal(&before, &after);
        quern_safetensors_close(in);
        quern_safetensors_close(out);
        quern_safetensors_close(ct);
    }
    shell("cmp model/tokenizer.json out/tokenizer.json");
    shell("grep -q '\"quant_algo\": \"W4A16_NVFP4\"' out/config.json out/hf_quant_config.json");
    shell("grep -q 'nvfp4-pack-quantized' ct/config.json && test ! -e ct/hf_quant_config.json");
    shell("grep -q 'down_proj.weight_scale_2\": \"1.safetensors' out/model.safetensors.index.json");
}

static void numbers_do_not_depend_on_threads(void **state)
{
    (void)state;
    expect(0, "quantize $DIR/model $DIR/t1 --format modelopt --threads 1 --json $DIR/t1.json", "");
    expect(0, "quantize $DIR/model $DIR/t3 --format modelopt --threads 3 --json $DIR/t3.json", "");
    shell("diff -r t1 t3 && cmp t1.json t3.json && grep -q rounded_blocks t1.json && rm -rf t1 t3");
}

static void globs_choose(void **state)
{
    (void)state;
    expect(
        0,
        "quantize $DIR/model $DIR/glob --format modelopt --include '*.mlp.*' --exclude '*up_proj*' --exclude "
        "'model.layers.1.*'",
        "excluded");
    quern_safetensors *out = open_shard("glob/0.safetensors");
    assert_int_equal(get(out, "model.layers.0.mlp.gate_proj.weight").dtype, QUERN_U8);
    assert_int_equal(get(out, "model.layers.0.mlp.up_proj.weight").dtype, QUERN_BF16);
    assert_int_equal(get(out, "model.layers.0.self_attn.q_proj.weight").dtype, QUERN_BF16);
    quern_safetensors_close(out);
    shell("grep -q '\"model.layers.1.mlp.gate_proj\"' glob/hf_quant_config.json && rm -rf glob");
}

static void a_dry_run_writes_nothing(void **state)
{
    (void)state;
    expect(0, "quantize $DIR/model $DIR/dry --format modelopt --dry-run", "bytes would be written");
    assert_false(exists("dry"));
}

/* ---- runs that end early ---- */

static long inode(const char *name)
{
    struct stat st;
    assert_int_equal(stat(path_of(name), &st), 0);
    return (long)st.st_ino;
}

static void finished_shards_are_kept(void **state)
{
    (void)state;
    shell("rm -rf out whole && mkdir whole");
    expect(0, "quantize $DIR/model $DIR/out --format modelopt --json $DIR/a.json", "");
    shell("cp -r out/. whole/ && rm out/1.safetensors out/model.safetensors.index.json out/config.json");
    write_text("out/.quern-0123456789abcdef.tmp", "left", 4);
    const long first = inode("out/0.safetensors");
    expect(0, "quantize $DIR/model $DIR/out --format modelopt --json $DIR/b.json", "");
    assert_true(inode("out/0.safetensors") == first);
    shell("diff -r out whole && cmp a.json b.json");
    expect(0, "quantize $DIR/model $DIR/out --format modelopt --scales search", "");
    assert_false(inode("out/0.safetensors") == first);
    shell("rm -rf whole");
}

/* However early it is killed, a file under its name is whole, and the next run ends as one alone does. */
static void a_killed_run_goes_on(void **state)
{
    (void)state;
    shell("rm -rf out killed");
    expect(0, "quantize $DIR/model $DIR/out --format modelopt", "");
    for (int i = 0; i < 12; i++) {
        char command[1024];
        snprintf(command, sizeof command,
                 "cd '%s'; rm -rf killed; '%s' quantize model killed --format modelopt >/dev/null 2>&1 & "
                 "pid=$!; sleep 0.%03d; kill -9 $pid 2>/dev/null; wait $pid 2>/dev/null; true",
                 directory, QUERN_COMMAND, 2 * i);
        assert_int_equal(system(command), 0);
        for (int s = 0; s < 2; s++) {
            const char *name = s == 0 ? "killed/0.safetensors" : "killed/1.safetensors";
            if (exists(name)) quern_safetensors_close(open_shard(name));
        }
        expect(0, "quantize $DIR/model $DIR/killed --format modelopt", "");
        shell("diff -r out killed");
    }
}

/* A .gguf file is one shard: its conversion begins anew; the old file stays until the new one is whole. */
static void a_killed_run_leaves_the_old_gguf_file(void **state)
{
    (void)state;
    shell("rm -rf killed && mkdir killed");
    expect(0, "quantize $DIR/model $DIR/whole.gguf --format gguf", "");
    for (int i = 0; i < 6; i++) {
        char command[1024];
        snprintf(command, sizeof command,
                 "cd '%s'; '%s' quantize model killed/m.gguf --format gguf >/dev/null 2>&1 & "
                 "pid=$!; sleep 0.%03d; kill -9 $pid 2>/dev/null; wait $pid 2>/dev/null; true",
                 directory, QUERN_COMMAND, 4 * i);
        if (i % 2 == 1) shell("printf old > killed/m.gguf");
        assert_int_equal(system(command), 0);
        shell("test ! -e killed/m.gguf || cmp -s killed/m.gguf whole.gguf || test \"$(cat killed/m.gguf)\" = "
              "old");
        expect(0, "quantize $DIR/model $DIR/killed/m.gguf --format gguf", "");
        shell("cmp killed/m.gguf whole.gguf && rm killed/m.gguf");
    }
    shell("rm -rf killed whole.gguf");
}

static void a_full_disk_is_an_error(void **state)
{
    (void)state;
    shell("rm -rf full");
    assert_int_equal(run_with("ulimit -f 40;", "quantize $DIR/model $DIR/full --format modelopt"), 3);
    assert_non_null(strstr(output, "File too large"));
    assert_false(exists("full/0.safetensors"));
    shell("test -z \"$(find full -name '*.tmp')\" && rm -rf full");
}

static void memory_that_lacks_is_an_error(void **state)
{
    (void)state;
    for (int kb = 20000; kb < 60000; kb += 1000) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "ulimit -v %d;", kb);
        shell("rm -rf few");
        const int code = run_with(prefix, "quantize $DIR/model $DIR/few --format modelopt --threads 1");
        if (code == 0) shell("diff -r few out");
        else if (exists("few/0.safetensors")) quern_safetensors_close(open_shard("few/0.safetensors"));
    }
}

/* ---- bad input ---- */

static void bad_models_are_refused(void **state)
{
    (void)state;
    shell("cp -r model bad && rm -rf none");
    expect(3, "quantize $DIR/model $DIR/model --format modelopt", "same as the input");
    expect(3, "quantize $DIR/model/0.safetensors $DIR/model --format modelopt", "same as the input");
    expect(3, "quantize $DIR/model $DIR/model/sub --format modelopt", "within the input");
    expect(3, "quantize $DIR/nowhere $DIR/none --format modelopt", "nowhere");
    expect(2, "quantize $DIR/model $DIR/none --format nvfp4", "format");
    expect(2, "quantize $DIR/model $DIR/none", "--format");
    expect(2, "quantize $DIR/model $DIR/none --format gguf", ".gguf");
    expect(2, "quantize $DIR/model $DIR/none --format modelopt --dequantize", "one of them");
    expect(3, "quantize $DIR/model $DIR/none --format modelopt --include '*nothing*'", "no tensor");
    expect(3, "quantize $DIR/model $DIR/none --dequantize", "no tensor");
    shell("rm bad/1.safetensors");
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "1.safetensors");
    shell("cp model/1.safetensors bad/ && truncate -s -1 bad/1.safetensors");
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "shard");
    shell("cp model/1.safetensors bad/ && sed -i 's/lm_head/lm_tail/' bad/model.safetensors.index.json");
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "index");
    shell("cp model/*.index.json bad/ && sed -i 's/128/256/' bad/config.json");
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "hidden_size is 256");
    shell("sed 's/rs\":2/rs\":3/' model/config.json > bad/config.json");
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "num_hidden_layers is 3");
    shell("sed 's/llama/deepseek_v4/' model/config.json > bad/config.json");
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "deepseek_v4");
    expect(3, "quantize $DIR/bad $DIR/none --format compressed-tensors", "deepseek_v4");
    write_text("bad/config.json", "[", 1);
    expect(3, "quantize $DIR/bad $DIR/none --format modelopt", "config.json");
    assert_false(exists("none"));
    shell("rm -rf bad");
}

static void bad_tensors_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        quern_dtype dtype;
        int64_t rows, columns;
        const char *part;
    } bad[] = {{"a.weight", QUERN_I32, 64, 64, "I32"},
               {"a.weight", QUERN_E4M3, 64, 64, "scales are missing"},
               {"a.weight_packed", QUERN_U8, 64, 64, "scales are missing"},
               {"a.experts.down_proj_blocks", QUERN_U8, 64, 64, "_scales are missing"}};
    shell("rm -rf none");
    uint8_t *zeros = calloc(64 * 64, 4);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const int64_t shape[] = {bad[i].rows, bad[i].columns};
        const quern_tensor t = quern_tensor_contiguous(zeros, bad[i].dtype, 2, shape);
        const quern_safetensors_item item = {bad[i].name, &t};
        assert_int_equal(quern_safetensors_save(path_of("one.safetensors"), &item, 1, NULL, 0), QUERN_OK);
        expect(3, "quantize $DIR/one.safetensors $DIR/none --format modelopt", bad[i].part);
    }
    free(zeros);
    uint16_t *values = calloc(64 * 64, 2);
    values[70] = 0x7f80;
    const int64_t shape[] = {64, 64};
    const quern_tensor t = quern_tensor_contiguous(values, QUERN_BF16, 2, shape);
    const quern_safetensors_item item = {"a.weight", &t};
    assert_int_equal(quern_safetensors_save(path_of("one.safetensors"), &item, 1, NULL, 0), QUERN_OK);
    expect(3, "quantize $DIR/one.safetensors $DIR/none --format modelopt",
           "'a.weight', row 1: a value is not finite");
    free(values);
    assert_false(exists("none/one.safetensors"));
    shell("rm -rf none");
}

/* An exponent and a code whose product f32 lacks; the largest that it has. */
static void mxfp4_beyond_f32_is_refused(void **state)
{
    (void)state;
    static const struct {
        uint8_t exponent, code;
        bool good;
    } cases[] = {{0xFD, 6, false}, {0xFD, 7, false}, {0xFD, 5, true},  {0xFE, 4, false},
                 {0xFE, 7, false}, {0xFE, 3, true},  {0xFF, 0, false}, {0xFC, 7, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t codes[64 * 32] = {0}, exponents[64 * 2];
        memset(exponents, 120, sizeof exponents);
        codes[33] = (uint8_t)(cases[i].code << 4);
        exponents[2] = cases[i].exponent;
        const int64_t shape[] = {64, 32}, scales[] = {64, 2};
        const quern_tensor t[] = {quern_tensor_contiguous(codes, QUERN_I8, 2, shape),
                                  quern_tensor_contiguous(exponents, QUERN_E8M0, 2, scales)};
        const quern_safetensors_item items[] = {{"a.weight", &t[0]}, {"a.scale", &t[1]}};
        assert_int_equal(quern_safetensors_save(path_of("mx.safetensors"), items, 2, NULL, 0), QUERN_OK);
        shell("rm -rf mx mxd");
        expect(cases[i].good ? 0 : 3, "quantize $DIR/mx.safetensors $DIR/mx --format modelopt",
               cases[i].good ? "a.weight" : "row 1: an MXFP4 block has a value beyond f32");
        expect(cases[i].good ? 0 : 3, "quantize $DIR/mx.safetensors $DIR/mxd --dequantize",
               cases[i].good ? "bf16" : "beyond");
        if (!cases[i].good) continue;
        quern_safetensors *out = open_shard("mx/mx.safetensors");
        const quern_tensor kept = get(out, "a.weight");
        assert_memory_equal(kept.data, codes, sizeof codes);
        quern_safetensors_close(out);
    }
    shell("rm -rf mx mxd");
}

static void links_are_read_through_and_never_written_through(void **state)
{
    (void)state;
    shell(
        "rm -rf linked out blobs && mkdir linked blobs && mv model/0.safetensors blobs/x && ln -s ../blobs/x "
        "model/0.safetensors && cp blobs/x before");
    expect(0, "quantize $DIR/model $DIR/out --format modelopt", "");
    shell("ln -s ../blobs/x linked/0.safetensors");
    expect(3, "quantize $DIR/model $DIR/linked --format modelopt", "same as the input");
    shell("rm linked/0.safetensors && cp blobs/x blobs/y && ln -s ../blobs/y linked/0.safetensors");
    expect(3, "quantize $DIR/model $DIR/linked --format modelopt", "symbolic link");
    shell("cmp blobs/x before && cmp blobs/y before && test -L linked/0.safetensors");
}

static void folders_that_cannot_be_written_are_refused(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        shell("rm -rf ro && mkdir ro && chmod 555 ro");
        expect(3, "quantize $DIR/model $DIR/ro --format modelopt", "Permission denied");
        shell("chmod 755 ro");
    }
    write_text("file", "x", 1);
    expect(3, "quantize $DIR/model $DIR/file --format modelopt", "no folder");
    expect(3, "quantize $DIR/model $DIR/no/where --format modelopt", "cannot make folder");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formats_have_the_library_s_bytes),
        cmocka_unit_test(numbers_do_not_depend_on_threads),
        cmocka_unit_test(globs_choose),
        cmocka_unit_test(a_dry_run_writes_nothing),
        cmocka_unit_test(finished_shards_are_kept),
        cmocka_unit_test(a_killed_run_goes_on),
        cmocka_unit_test(a_killed_run_leaves_the_old_gguf_file),
        cmocka_unit_test(a_full_disk_is_an_error),
        cmocka_unit_test(memory_that_lacks_is_an_error),
        cmocka_unit_test(bad_models_are_refused),
        cmocka_unit_test(bad_tensors_are_refused),
        cmocka_unit_test(mxfp4_beyond_f32_is_refused),
        cmocka_unit_test(links_are_read_through_and_never_written_through),
        cmocka_unit_test(folders_that_cannot_be_written_are_refused),
    };
    return cmocka_run_group_tests(tests, setup, remove_directory);
}
