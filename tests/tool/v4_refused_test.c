/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* v4_refused_test.c - what examples/v4 cannot run ends with one sentence, exit code 3 (2 for a wrong command
 * line) and no output file; session and cache files of any bytes are refused or give the same tokens. */
#include "random.h"
#include "tool/v4_case.h"

#include <quern/safetensors.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 20, NEW = 4 };

static void put_prompt(void)
{
    int32_t tokens[TOKENS];
    v4_tokens(tokens, TOKENS);
    v4_put("tokens", tokens, NULL, TOKENS);
}

static void write_model(const made_model *m, const char *from, const char *to)
{
    char folder[64];
    snprintf(folder, sizeof folder, "%s/bad", v4_folder());
    v4_write(m, folder, from, to);
}

static void refused(const char *words)
{
    v4_ends(3, NULL, "logits bad tokens logits");
    v4_says(words);
    assert_false(v4_exists("logits"));
}

static void another_config(void **state)
{
    static const struct {
        const char *from, *to, *words;
    } changes[] = {
        {"deepseek_v4\"", "deepseek_v41\"", "deepseek_v41"},
        {"deepseek_v4\"", "llama\"", "llama"},
        {"\"head_dim\": 32, ", "", "head_dim is missing"},
        {"\"head_dim\": 32", "\"head_dim\": 40", "wq_b"},
        {"\"head_dim\": 32", "\"head_dim\": 4", "head_dim"},
        {"\"head_dim\": 32", "\"head_dim\": \"32\"", "head_dim"},
        {"\"hidden_size\": 64", "\"hidden_size\": 32", "embed.weight"},
        {"\"vocab_size\": 48", "\"vocab_size\": 49", "embed.weight"},
        {"\"num_hidden_layers\": 5", "\"num_hidden_layers\": 6", "layers.5."},
        {"\"num_hidden_layers\": 5", "\"num_hidden_layers\": 7", "compress_ratios[6]"},
        {"\"n_routed_experts\": 4", "\"n_routed_experts\": 5", "layer 0"},
        {"\"n_shared_experts\": 1", "\"n_shared_experts\": 2", "layer 0"},
        {"\"num_hash_layers\": 2", "\"num_hash_layers\": 3", "tid2eid"},
        {"\"num_hash_layers\": 2", "\"num_hash_layers\": 1", "bias"},
        {"\"o_groups\": 2", "\"o_groups\": 3", "o_groups"},
        {"sqrtsoftplus", "tanh", "tanh"},
        {"[0, 4, 8", "[0, 8, 8", "layers.1.attn.compressor"},
        {"[0, 4, 8", "[0, 4, 4", "layers.2.attn.compressor"},
        {"[0, 4, 8", "[0, 4, -1", "compress_ratios[2]"},
        {"{\"model_type\"", "{\"model_type", "config.json"},
    };
    (void)state;
    put_prompt();
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        write_model(&v4_made, changes[i].from, changes[i].to);
        refused(changes[i].words);
    }
}

/* The model without each of these, and with one of another shape or dtype. */
static void another_tensor(void **state)
{
    static const char *const names[] = {"embed.weight",
                                        "norm.weight",
                                        "hc_head_fn",
                                        "layers.0.attn.wq_a.weight",
                                        "layers.0.attn.wq_a.scale",
                                        "layers.1.attn.indexer.wq_b.weight",
                                        "layers.2.attn.compressor.ape",
                                        "layers.3.hc_ffn_base",
                                        "layers.4.ffn.experts.2.w3.weight",
                                        "layers.4.ffn.gate.bias",
                                        "layers.1.ffn.gate.tid2eid"};
    (void)state;
    put_prompt();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        made_model m = {.count = 0};
        char word[64];
        v4_make(&m, 7, false);
        made_remove(&m, names[i]);
        write_model(&m, NULL, NULL);
        snprintf(word, sizeof word, "%.*s", (int)strcspn(names[i], "."), names[i]);
        refused(strncmp(names[i], "layers", 6) == 0 ? "layer" : word);
        made_free(&m);
    }
    made_model m = {.count = 0};
    v4_make(&m, 7, false);
    made_remove(&m, "layers.2.attn.kv_norm.weight");
    made_add(&m, QUERN_F32, "layers.2.attn.kv_norm.weight", 1, (const int64_t[]){V4_DIM + 1});
    write_model(&m, NULL, NULL);
    refused("layers.2.attn.kv_norm.weight is [33]");
    made_free(&m);
}

static void a_missing_shard(void **state)
{
    char path[128];
    (void)state;
    put_prompt();
    write_model(&v4_made, NULL, NULL);
    snprintf(path, sizeof path, "%s/bad/model-00002-of-00003.safetensors", v4_folder());
    assert_int_equal(remove(path), 0);
    refused("model-00002-of-00003.safetensors");
}

static void tokens_out_of_place(void **state)
{
    int32_t tokens[V4_MOST] = {1, V4_VOCABULARY, 2}, lengths[] = {V4_MOST + 1};
    (void)state;
    v4_put("tokens", tokens, NULL, 3);
    v4_ends(3, NULL, "logits model tokens logits");
    v4_says("token 1 of sequence 0 is 48");
    tokens[1] = -1;
    v4_put("tokens", tokens, NULL, 3);
    v4_ends(3, NULL, "generate model --tokens tokens --max-new 1 --session fresh");
    v4_put("batch", tokens, lengths, 1);
    v4_ends(3, NULL, "generate model --batch batch --max-new 1");
    v4_says("lengths[0] is 65");
    v4_ends(3, NULL, "generate model --batch tokens --max-new 1");
    v4_ends(3, NULL, "generate model --tokens nowhere --max-new 1");
    v4_ends(3, NULL, "logits nowhere tokens logits");
    assert_false(v4_exists("logits"));
    assert_false(v4_exists("fresh"));
}

static void wrong_usage(void **state)
{
    static const char *const lines[] = {"",
                                        "run model",
                                        "logits model tokens",
                                        "logits model tokens logits more",
                                        "generate model --tokens tokens",
                                        "generate model --max-new 1",
                                        "generate model --tokens a --batch b --max-new 1",
                                        "generate model --tokens a --max-new x",
                                        "generate model --tokens a --max-new 1 --chunk 0",
                                        "generate model --tokens a --max-new 1 --device tpu",
                                        "generate model --nothing",
                                        "generate --tokens"};
    (void)state;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) v4_ends(2, NULL, "%s", lines[i]);
    assert_int_equal(v4_run("--help"), 0);
}

/* Too little memory is a sentence, not a crash. */
static void too_little_memory(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__clang__) /* a sanitizer takes address space of its own */
    skip();
#endif
    put_prompt();
    char command[1024];
    snprintf(command, sizeof command,
             "cd '%s' && ulimit -v 200000 && OMP_NUM_THREADS=1 '%s' generate model --tokens "
             "tokens --max-new 1000000000 --quiet >out 2>err",
             v4_folder(), V4_COMMAND);
    assert_true(system(command) != 0);
    v4_says("v4: ");
    v4_says("memory");
}

/* The file with some bytes changed, cut, or longer. */
static void damage(test_random *random, const char *name, const uint8_t *bytes, size_t size)
{
    uint8_t *changed = calloc(size + 64, 1);
    size_t n = size;
    memcpy(changed, bytes, size);
    const int64_t kind = test_random_int(random, 0, 5);
    if (kind == 0) n = (size_t)test_random_int(random, 1, (int64_t)size - 1);
    else if (kind == 1) n = size + (size_t)test_random_int(random, 1, 64);
    for (int64_t i = 0, count = test_random_int(random, 1, 4); kind > 1 && i < count; i++) {
        const int64_t most = kind == 2 ? 300 : (int64_t)size - 1; /* heads are small */
        changed[test_random_int(random, 0, most)] ^= (uint8_t)(1 << test_random_int(random, 0, 7));
    }
    v4_write_file(name, changed, n);
    free(changed);
}

static void files_of_any_bytes(void **state)
{
    static const char *const names[] = {"session", "cache"};
    const uint64_t seed = test_seed("v4_refused_test", 3);
    int32_t whole[V4_MOST], tokens[V4_MOST];
    (void)state;
    put_prompt();
    v4_ends(0, whole, "generate model --tokens tokens --max-new %d --json --session session --cache cache",
            NEW);
    for (int f = 0; f < 2; f++) {
        size_t size;
        uint8_t *bytes = v4_read(names[f], &size);
        for (int i = 0; i < test_trials(40); i++) {
            test_random random;
            if (!test_trial(seed + (uint64_t)f, i, &random)) continue;
            damage(&random, "damaged", bytes, size);
            const int code =
                v4_run("generate model --tokens tokens --max-new %d --json --%s damaged", NEW, names[f]);
            assert_true(code == 0 || code == 3);
            if (code != 0) continue;
            v4_ends(0, tokens, "generate model --tokens tokens --max-new %d --json --%s damaged", NEW,
                    names[f]);
            assert_memory_equal(tokens, whole, NEW * sizeof *whole);
        }
        free(bytes);
    }
    v4_ends(3, NULL, "generate model --tokens tokens --max-new 1 --session cache");
    v4_ends(3, NULL, "generate model --tokens tokens --max-new 1 --cache session");
}

/* Neither a session nor a cache serves another model, or other activations. */
static void files_of_another_model(void **state)
{
    made_model m = {.count = 0};
    (void)state;
    put_prompt();
    v4_ends(0, NULL, "generate model --tokens tokens --max-new 1 --session mine --cache mine.experts");
    v4_make(&m, 9, false);
    write_model(&m, NULL, NULL);
    v4_ends(3, NULL, "generate bad --tokens tokens --max-new 1 --session mine");
    v4_ends(3, NULL, "generate bad --tokens tokens --max-new 1 --cache mine.experts");
    v4_ends(3, NULL, "generate model --tokens tokens --max-new 1 --session mine --activations bf16");
    made_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_config),     cmocka_unit_test(another_tensor),
        cmocka_unit_test(a_missing_shard),    cmocka_unit_test(tokens_out_of_place),
        cmocka_unit_test(wrong_usage),        cmocka_unit_test(too_little_memory),
        cmocka_unit_test(files_of_any_bytes), cmocka_unit_test(files_of_another_model),
    };
    return cmocka_run_group_tests(tests, v4_set_up, v4_tear_down);
}
