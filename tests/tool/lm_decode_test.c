/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lm_decode_test.c - examples/lm from its caches: every kind of attention learns, and decodes what one shot
 * gives, however the text is cut; sampling; the program's verbs that decode. */
#include "decode.h"
#include "random.h"
#include "tool/lm_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void every_kind_learns(void **unused)
{
    (void)unused;
    uint8_t text[97];
    fill(text, 97);
    for (int32_t i = 0; i < ATTENTIONS; i++) {
        lm_config config = small(lm_attentions[i].name);
        config.inner = 96;
        config.experts = 4;
        lm_model m;
        assert_true(model_create(&m, &config, 3));
        const double before = model_loss(&m, text, 96, false);
        for (int step = 0; step < 12; step++) {
            assert_true(model_loss(&m, text, 96, true) > 0.0);
            assert_true(optimizer_step(&m, 1.0f, (lm_rates)LM_RATES_DEFAULT));
        }
        assert_true(model_loss(&m, text, 96, false) < 0.5 * before);
        model_destroy(&m);
    }
}

/* Every array of the indexer learns, and its loss falls by more than half. */
static void training_teaches_the_indexer(void **unused)
{
    (void)unused;
    uint8_t text[97];
    const lm_config config = small("csa");
    lm_model m, fresh;
    fill(text, 97);
    assert_true(model_create(&m, &config, 3) && model_create(&fresh, &config, 3));
    assert_true(model_loss(&m, text, 96, true) > 0.0);
    const double before = m.index_loss;
    assert_true(before > 0.0);
    for (int step = 0; step < 30; step++) {
        assert_true(optimizer_step(&m, 1.0f, (lm_rates)LM_RATES_DEFAULT));
        assert_true(model_loss(&m, text, 96, true) > 0.0);
    }
    assert_true(m.index_loss < 0.5 * before);
    for (int32_t i = 0; i < m.param_count; i++) {
        const lm_param *p = &m.params[i];
        const size_t n = (size_t)(p->rows * p->cols);
        if (n > 0 && strstr(p->name, ".index.") != NULL)
            assert_memory_not_equal(p->value, fresh.params[i].value, n * 4);
    }
    model_destroy(&m);
    model_destroy(&fresh);
}

static double relative(const float *a, const float *b, int64_t n)
{
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        norm += (double)b[i] * (double)b[i];
    }
    return sqrt(error / norm);
}

static int likeliest(const float *logits)
{
    int best = 0;
    for (int c = 1; c < BYTES; c++) best = logits[c] > logits[best] ? c : best;
    return best;
}

/* Greedy decoding after a prompt: each byte is the likeliest after a forward pass over the whole text. */
static void greedy_bytes_are_those_of_one_shot(void **unused)
{
    (void)unused;
    for (int32_t i = 0; i < ATTENTIONS; i++) {
        lm_config config = small(lm_attentions[i].name);
        config.layers = 3;
        lm_model m;
        lm_decoder d;
        uint8_t text[96];
        float logits[BYTES];
        uint64_t state = 1;
        fill(text, 96);
        assert_true(model_create(&m, &config, 3));
        stir(&m);
        assert_true(decoder_open(&d, &m, 96));
        for (int n = 23, fresh = 23; n < 96; n++, fresh = 1) {
            assert_true(decoder_extend(&d, text, fresh));
            memcpy(logits, decoder_logits(&d, fresh), sizeof logits);
            text[n] = (uint8_t)sample(logits, 0.0, 1.0, &state);
            if (!test_in_share((uint64_t)n)) continue;
            assert_true(model_forward(&m, text, 0, n, NULL));
            const float *whole = m.logits + (n - 1) * BYTES;
            assert_int_equal(text[n], likeliest(whole));
            assert_true(relative(logits, whole, BYTES) < 1e-5); /* three layers of 2e-6 each */
        }
        decoder_close(&d);
        model_destroy(&m);
    }
}

/* The same logits from 1, 2, 3 ... bytes a call, also past the context that the model trains with. */
static void chunks_of_any_size_give_the_same_logits(void **unused)
{
    (void)unused;
    enum { LONG = 96 + 41 };
    for (int32_t i = 0; i < ATTENTIONS; i++) {
        lm_config config = small(lm_attentions[i].name);
        lm_model m;
        lm_decoder whole, parts;
        uint8_t text[LONG];
        float logits[BYTES];
        fill(text, LONG);
        assert_true(model_create(&m, &config, 3));
        stir(&m);
        assert_true(decoder_open(&whole, &m, LONG) && decoder_open(&parts, &m, LONG));
        assert_true(decoder_extend(&whole, text, LONG)); /* 96, then 41 */
        memcpy(logits, decoder_logits(&whole, LONG), sizeof logits);
        for (int64_t size = 1; parts.position < LONG; size++) {
            const int64_t n = size < LONG - parts.position ? size : LONG - parts.position;
            assert_true(decoder_extend(&parts, text, n));
            if (parts.position == LONG)
                assert_true(relative(decoder_logits(&parts, n), logits, BYTES) < 1e-5);
        }
        assert_true(decoder_bytes(&parts) == decoder_bytes(&whole) && decoder_bytes(&parts) > 0);
        decoder_close(&whole);
        decoder_close(&parts);
        model_destroy(&m);
    }
}

static void compressed_caches_are_smaller(void **unused)
{
    (void)unused;
    int64_t bytes[ATTENTIONS];
    uint8_t text[96];
    fill(text, 96);
    for (int32_t i = 0; i < ATTENTIONS; i++) {
        const lm_config config = small(lm_attentions[i].name);
        lm_model m;
        lm_decoder d;
        assert_true(model_create(&m, &config, 3) && decoder_open(&d, &m, 96));
        assert_true(decoder_extend(&d, text, 96));
        bytes[i] = decoder_bytes(&d);
        decoder_close(&d);
        model_destroy(&m);
    }
    const int64_t dense = bytes[config_attention("dense")];
    assert_int_equal(dense, 2 * 96 * 2 * 16 * 4); /* layers, tokens, key and value, channels */
    assert_true(bytes[config_attention("nsa")] > dense);
    assert_true(bytes[config_attention("csa")] < dense && bytes[config_attention("hca")] < dense);
}

static void sampling_keeps_to_top_p(void **unused)
{
    (void)unused;
    float logits[BYTES];
    uint64_t state = 3;
    int seen[BYTES] = {0};
    for (int c = 0; c < BYTES; c++) logits[c] = -20.0f;
    logits[65] = logf(0.5f);
    logits[66] = logf(0.3f);
    logits[67] = logf(0.2f);
    for (int i = 0; i < 4000; i++) seen[sample(logits, 1.0, 1.0, &state)]++;
    assert_true(abs(seen[65] - 2000) < 150 && abs(seen[66] - 1200) < 150 && abs(seen[67] - 800) < 150);
    for (int i = 0; i < 400; i++) {
        const int c = sample(logits, 1.0, 0.7, &state); /* 0.5 alone falls short of it */
        assert_true(c == 65 || c == 66);
        assert_int_equal(sample(logits, 1.0, 0.0, &state), 65);
    }
    logits[64] = logits[65];
    assert_int_equal(sample(logits, 0.0, 1.0, &state), 64);
}

static bool same(const places *p, const char *a, const char *b)
{
    char command[256];
    snprintf(command, sizeof command, "cmp -s '%s/%s' '%s/%s'", p->folder, a, p->folder, b);
    return system(command) == 0;
}

static int keep_output(const places *p, const char *name)
{
    char command[128];
    snprintf(command, sizeof command, "cd '%s' && mv out %s", p->folder, name);
    return system(command);
}

/* Every kind by the program: a resumed run, chunks, a text that the same seed repeats on any number of
 * threads. */
static void every_kind_runs_in_the_program(void **state)
{
    const places *p = *state;
    for (int32_t i = 0; i < ATTENTIONS; i++) {
        char arguments[400];
        const char *name = lm_attentions[i].name;
        if (!test_in_share((uint64_t)i)) continue;
        snprintf(arguments, sizeof arguments,
                 "train " SMALL
                 "--ratio 16 --index-top 8 --corpus corpus --attention %s --steps 4 --checkpoint "
                 "whole",
                 name);
        assert_ends(p, "", arguments, 0);
        snprintf(arguments + strlen(arguments) - 5, 32, "half --until 2");
        assert_ends(p, "", arguments, 0);
        assert_ends(p, "", "train --corpus corpus --pieces 2 --resume half --checkpoint rest", 0);
        assert_true(same(p, "whole", "rest") && !same(p, "whole", "half"));
        assert_ends(p, "", "eval --checkpoint whole --corpus corpus --pieces 2 --chunk 7 --json j", 0);
        static const char generate[] = "generate --checkpoint whole --prompt abc --bytes 150 --top-p 0.9";
        assert_ends(p, "OMP_NUM_THREADS=1", generate, 0);
        assert_int_equal(keep_output(p, "first"), 0);
        assert_ends(p, "OMP_NUM_THREADS=3", generate, 0);
        assert_true(same(p, "first", "out"));
        snprintf(arguments, sizeof arguments, "%s --seed 2", generate);
        assert_ends(p, "", arguments, 0);
        assert_false(same(p, "first", "out"));
    }
}

/* Two key heads, whose queries select apart; experts as a server holds them. */
static void chunks_equal_one_shot_with_more_heads_and_experts(void **state)
{
    const places *p = *state;
    static const char *const options[] = {"--kv-heads 2 --attention dense", "--kv-heads 2 --attention nsa",
                                          "--experts 4 --inner 96 --attention hybrid --ratio 16"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char arguments[300];
        const bool experts = strstr(options[i], "experts") != NULL;
        snprintf(arguments, sizeof arguments, "train " SMALL "%s --corpus corpus --steps 4 --checkpoint more",
                 options[i]);
        assert_ends(p, "", arguments, 0);
        snprintf(arguments, sizeof arguments,
                 "eval --checkpoint more --corpus corpus --pieces 2 --chunk 13 --expert-weights %s",
                 experts ? "nvfp4" : "f32");
        assert_ends(p, "", arguments, 0);
    }
    assert_ends(p, "", "generate --checkpoint more --bytes 20 --expert-weights bf16", 0);
}

static void speed_reports_three_contexts(void **state)
{
    const places *p = *state;
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 1 --checkpoint one", 0);
    assert_ends(p, "", "speed --checkpoint one --corpus corpus --json speed.json", 0);
    char command[256];
    snprintf(
        command, sizeof command,
        "cd '%s' && grep -q tokens_per_second_1k speed.json && grep -q tokens_per_second_4k speed.json && "
        "grep -q cache_bytes_16k speed.json",
        p->folder);
    assert_int_equal(system(command), 0);
}

static void bad_options_are_refused_in_a_sentence(void **state)
{
    const places *p = *state;
    static const struct {
        const char *arguments, *words;
        int code;
    } bad[] = {
        {"train --attention csa --kv-heads 2", "kv-heads 2: one is accepted with csa", 2},
        {"train --attention hca --context 96", "ratio 128: at most the context of 96", 2},
        {"train --attention csa --context 3", "at least an entry's 4 tokens", 2},
        {"generate --checkpoint plain --top-p 2", "--top-p 2: a number from 0 to 1", 2},
        {"generate --checkpoint plain --temperature -1", "--temperature -1", 2},
        {"generate", "--checkpoint FILE is needed", 2},
        {"speed", "--checkpoint FILE is needed", 2},
        {"eval --checkpoint plain --chunk 0", "--chunk 0: a number from 1", 2},
        {"eval --checkpoint plain --corpus corpus --chunk 97", "--chunk 97: 1 to the context of 96", 3},
    };
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 1 --checkpoint plain", 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_ends(p, "", bad[i].arguments, bad[i].code);
        assert_true(says(p, bad[i].words));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_learns),
        cmocka_unit_test(training_teaches_the_indexer),
        cmocka_unit_test(greedy_bytes_are_those_of_one_shot),
        cmocka_unit_test(chunks_of_any_size_give_the_same_logits),
        cmocka_unit_test(compressed_caches_are_smaller),
        cmocka_unit_test(sampling_keeps_to_top_p),
        cmocka_unit_test(every_kind_runs_in_the_program),
        cmocka_unit_test(chunks_equal_one_shot_with_more_heads_and_experts),
        cmocka_unit_test(speed_reports_three_contexts),
        cmocka_unit_test(bad_options_are_refused_in_a_sentence),
    };
    return cmocka_run_group_tests(tests, make_places, remove_places);
}
