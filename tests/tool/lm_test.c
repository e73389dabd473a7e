/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lm_test.c - the example's own tests: its hand-written backward against finite differences, a run that is
 * interrupted and resumed against one that is not, by its functions and by the program, and the program's
 * errors. */
#include "tool/lm_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <quern/safetensors.h>

/* d loss / d value along a random direction, by central differences of the f32 model, for every parameter
 * array. */
static void check_gradients(const lm_config *config)
{
    uint8_t text[97];
    lm_model m;
    fill(text, 97);
    assert_true(model_create(&m, config, 3));
    stir(&m);
    assert_true(model_loss(&m, text, 96, true) > 0.0);
    for (int32_t i = 0; i < m.param_count; i++) {
        lm_param *p = &m.params[i];
        if (p->value == NULL || p->rule == RULE_BALANCE) continue;
        const bool index = strstr(p->name, ".index.") != NULL; /* has a loss of its own */
        const int64_t n = p->rows * p->cols;
        float *grad = malloc((size_t)n * 4), *old = malloc((size_t)n * 4);
        memcpy(grad, p->grad, (size_t)n * 4);
        memcpy(old, p->value, (size_t)n * 4);
        double norm = 0.0, numeric[2];
        for (int64_t j = 0; j < n; j++) norm += (double)grad[j] * (double)grad[j];
        norm = sqrt(norm);
        assert_true(norm > 1e-7); /* every array takes part */
        const double step = 2e-3; /* along the gradient, whose length is the derivative there */
        for (int side = 0; side < 2; side++) {
            for (int64_t j = 0; j < n; j++)
                p->value[j] = old[j] + (float)((side == 0 ? step : -step) * (double)grad[j] / norm);
            numeric[side] = model_loss(&m, text, 96, index);
            if (index) numeric[side] = m.index_loss;
        }
        memcpy(p->value, old, (size_t)n * 4);
        const double measured = (numeric[0] - numeric[1]) / (2.0 * step);
        if (fabs(measured - norm) > 2e-2 * norm + 2e-4)
            print_error("%s: %g by differences, %g by backward\n", p->name, measured, norm);
        assert_true(fabs(measured - norm) <= 2e-2 * norm + 2e-4); /* f32 loss: 1e-7 / step each way */
        free(grad);
        free(old);
    }
    model_destroy(&m);
}

/* A csa layer's queries select all entries, for a choice has no derivative. */
static void gradients_match_differences(void **unused)
{
    (void)unused;
    for (int32_t i = 0; i < ATTENTIONS; i++) {
        lm_config config = small(lm_attentions[i].name);
        config.index_top = PIECE / 4;
        check_gradients(&config);
    }
}

/* Every byte goes to every expert, for the same reason. */
static void gradients_of_experts_match_differences(void **unused)
{
    (void)unused;
    lm_config config = small("dense");
    config.inner = 96;
    config.experts = 2;
    check_gradients(&config);
}

/* Experts in bf16 lose little, in NVFP4 more, and the trained weights are left as they are. */
static void served_experts_lose_little(void **unused)
{
    (void)unused;
    uint8_t text[97];
    lm_config config = small("dense");
    config.inner = 96;
    config.experts = 4;
    lm_model m;
    fill(text, 97);
    assert_true(model_create(&m, &config, 3));
    for (int i = 0; i < 30; i++) {
        assert_true(model_loss(&m, text, 96, true) > 0.0);
        assert_true(optimizer_step(&m, 1.0f, (lm_rates)LM_RATES_DEFAULT));
    }
    const double trained = model_loss(&m, text, 96, false);
    double lost[3] = {0.0};
    for (int i = EXPERTS_BF16; i <= EXPERTS_NVFP4; i++) {
        assert_true(served_create(&m, (lm_expert_weights)i));
        lost[i] = fabs(model_loss(&m, text, 96, false) - trained) / trained;
        served_free(m.served, config.layers);
        m.served = NULL;
    }
    assert_true(lost[EXPERTS_BF16] > 0.0 && lost[EXPERTS_BF16] < 5e-3);
    assert_true(lost[EXPERTS_NVFP4] > lost[EXPERTS_BF16] && lost[EXPERTS_NVFP4] < 5e-2);
    assert_true(model_loss(&m, text, 96, false) == trained);
    model_destroy(&m);
}

/* The router's bias rises for an expert that got too few bytes and falls for one that got too many. */
static void the_balance_follows_the_load(void **unused)
{
    (void)unused;
    uint8_t text[97];
    lm_config config = small("dense");
    config.inner = 96;
    config.experts = 4;
    lm_model m;
    fill(text, 97);
    assert_true(model_create(&m, &config, 3));
    assert_true(model_loss(&m, text, 96, true) > 0.0);
    const lm_mlp *mlp = &m.layer[0].mlp;
    assert_true(optimizer_step(&m, 1.0f, (lm_rates)LM_RATES_DEFAULT));
    for (int e = 0; e < 4; e++) {
        const int load = mlp->offsets[e] - (e > 0 ? mlp->offsets[e - 1] : 0);
        const float bias = layer_param(&m, 0, L_BALANCE)->value[e];
        assert_true(load < 48 ? bias > 0.0f : load > 48 ? bias < 0.0f : bias == 0.0f);
    }
    assert_int_equal(mlp->offsets[3], 192);
    model_destroy(&m);
}

static void steps(lm_model *m, const lm_corpus *corpus, const lm_run *run, int count)
{
    for (int i = 0; i < count; i++) {
        assert_true(model_loss(m, corpus->bytes + corpus_piece(corpus, PIECE, run->seed, m->step), PIECE,
                               true) > 0.0);
        assert_true(optimizer_step(m, 1.0f, run->rates));
    }
}

static void assert_same_arrays(const float *a, const float *b, const lm_param *p)
{
    assert_true((a == NULL) == (b == NULL));
    if (a != NULL) assert_memory_equal(a, b, (size_t)(p->rows * p->cols) * 4);
}

static void a_resumed_run_repeats_bit_by_bit(void **state)
{
    const places *p = *state;
    char path[64];
    snprintf(path, sizeof path, "%s/resumed", p->folder);
    lm_corpus corpus;
    assert_true(corpus_load(p->corpus, &corpus));
    lm_run run = {.seed = 5, .steps = 6, .rates = LM_RATES_DEFAULT, .corpus_bytes = corpus.size}, read;
    memcpy(run.corpus_digest, corpus.digest, sizeof run.corpus_digest);
    lm_model whole, half, rest;
    lm_config config = small("nsa");
    config.inner = 96;
    config.experts = 4;
    assert_true(model_create(&whole, &config, 5));
    steps(&whole, &corpus, &run, 6);
    assert_true(model_create(&half, &config, 5));
    steps(&half, &corpus, &run, 3);
    assert_true(checkpoint_save(&half, path, &run));
    assert_true(checkpoint_load(&rest, path, &read));
    assert_int_equal(rest.step, 3);
    assert_int_equal(read.steps, 6);
    assert_true(read.seed == 5 && read.rates.muon == run.rates.muon && read.rates.adam == run.rates.adam);
    assert_true(read.corpus_bytes == CORPUS && strcmp(read.corpus_digest, corpus.digest) == 0);
    steps(&rest, &corpus, &read, 3);
    assert_int_equal(rest.step, whole.step);
    for (int32_t i = 0; i < whole.param_count; i++) {
        const lm_param *a = &whole.params[i], *b = &rest.params[i];
        assert_same_arrays(a->value, b->value, a);
        assert_same_arrays(a->first, b->first, a);
        assert_same_arrays(a->second, b->second, a);
    }
    corpus_free(&corpus);
    model_destroy(&whole);
    model_destroy(&half);
    model_destroy(&rest);
}

static bool exists(const places *p, const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", p->folder, name);
    return access(path, F_OK) == 0;
}

static void the_program_resumes_to_the_same_file(void **state)
{
    const places *p = *state;
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 6 --checkpoint whole", 0);
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 6 --until 3 --checkpoint half", 0);
    assert_ends(p, "", "train --corpus corpus --pieces 2 --resume half --checkpoint rest", 0);
    char command[256];
    snprintf(command, sizeof command, "cmp '%s/whole' '%s/rest'", p->folder, p->folder);
    assert_int_equal(system(command), 0);
    snprintf(command, sizeof command, "cmp -s '%s/whole' '%s/half'", p->folder, p->folder);
    assert_int_not_equal(system(command), 0);
}

/* oneDNN by itself cuts products by the number of threads where there is no AVX-512. */
static void the_number_of_threads_changes_no_bit(void **state)
{
    const places *p = *state;
    static const char *const levels[] = {"SSE41", "AVX2", "DEFAULT"};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        for (int threads = 1; threads <= 3; threads++) {
            char environment[96], command[256];
            snprintf(environment, sizeof environment, "ONEDNN_MAX_CPU_ISA=%s OMP_NUM_THREADS=%d", levels[i],
                     threads);
            assert_ends(p, environment,
                        threads == 1 ? "train " SMALL "--corpus corpus --steps 2 --checkpoint one"
                                     : "train " SMALL "--corpus corpus --steps 2 --checkpoint more",
                        0);
            if (threads == 1) continue;
            snprintf(command, sizeof command, "cmp '%s/one' '%s/more'", p->folder, p->folder);
            assert_int_equal(system(command), 0);
        }
}

/* Whatever the limit of the address space, fewer threads train the same model, or a sentence says what is
 * missing. Under the least the loader finds no room. */
static void threads_that_cannot_be_created_are_done_without(void **state)
{
    const places *p = *state;
    int done = 0;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* the sanitizer's own memory takes terabytes of address space */
#endif
    const char *const train = "train " SMALL "--corpus corpus --steps 2 --checkpoint";
    char arguments[256], command[256], limit[96];
    snprintf(arguments, sizeof arguments, "%s many", train);
    assert_ends(p, "OMP_NUM_THREADS=3", arguments, 0);
    for (int mebibytes = 60; mebibytes <= 600; mebibytes += mebibytes < 200 ? 10 : 100) {
        snprintf(limit, sizeof limit, "ulimit -v %d && OMP_WAIT_POLICY=passive OMP_NUM_THREADS=8",
                 mebibytes * 1024);
        snprintf(arguments, sizeof arguments, "%s few", train);
        const int code = program(p, limit, arguments);
        if (code != 0 && code != 127 && (code != 3 || !says(p, "no memory")))
            fail_msg("%d MiB: exit code %d", mebibytes, code);
        if (code != 0) continue;
        snprintf(command, sizeof command, "cmp '%s/many' '%s/few'", p->folder, p->folder);
        assert_int_equal(system(command), 0);
        done++;
    }
    assert_true(done > 0);
}

static void resuming_needs_the_same_corpus_and_no_options_beside_the_checkpoint(void **state)
{
    const places *p = *state;
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 2 --until 1 --checkpoint first", 0);
    assert_ends(p, "", "train --corpus other --resume first --checkpoint second", 3);
    assert_true(says(p, "only the same one is accepted"));
    static const char *const options[] = {"--steps 2", "--muon 0.02", "--adam 0.02",
                                          "--seed 1",  "--width 32",  "--attention nsa"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char arguments[128], name[16];
        snprintf(arguments, sizeof arguments, "train --corpus corpus %s --resume first --checkpoint second",
                 options[i]);
        assert_ends(p, "", arguments, 2);
        snprintf(name, sizeof name, "%.*s", (int)strcspn(options[i], " "), options[i]);
        assert_true(says(p, name));
    }
    assert_false(exists(p, "second"));
}

static void results_are_written_or_the_failure_is_reported(void **state)
{
    const places *p = *state;
    assert_ends(p, "", "order2 --corpus corpus --context 96 --steps 2 --json nowhere/order2.json", 3);
    assert_true(says(p, "nowhere/order2.json"));
    assert_ends(p, "", "order2 --corpus corpus --context 4096 --steps 2", 3); /* more than is held out */
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 1 --json nowhere/lm.json", 3);
    /* without gnuplot: a warning, and everything else */
    assert_ends(p, "PATH=/nowhere",
                "train " SMALL "--corpus corpus --steps 1 --curve curve.svg --json lm.json", 0);
    assert_true(says(p, "no curve in curve.svg"));
    assert_true(exists(p, "lm.json") && !exists(p, "curve.svg"));
}

static void bad_options_are_refused_in_a_sentence(void **state)
{
    const places *p = *state;
    static const struct {
        const char *arguments, *words;
        int code;
    } bad[] = {
        {"train --attention sparse", "--attention sparse: nsa", 2},
        {"train --heads 3", "heads of a multiple of 8", 2},
        {"train --experts 2 --top 3", "top 3 of 2 experts", 2},
        {"train --experts 8 --inner 128", "multiple of 16 (top + 1)", 2},
        {"train --experts 1000", "--experts 1000: a number from 0 to 256", 2},
        {"train --steps none", "--steps none: a number", 2},
        {"eval --expert-weights int8 --checkpoint plain", "--expert-weights int8: f32, bf16 or nvfp4", 2},
        {"eval --expert-weights nvfp4 --corpus corpus --checkpoint plain", "holds no experts", 3},
        /* before the training, which would take hours */
        {"train --context 96 --corpus corpus --steps 100000 --beside nowhere", "cannot read nowhere", 3},
        {"train --context 96 --corpus corpus --steps 100000 --beside corpus", "losses that lm train", 3},
    };
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 1 --checkpoint plain", 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_ends(p, "timeout 20", bad[i].arguments, bad[i].code);
        assert_true(says(p, bad[i].words));
    }
}

static void curves_of_two_runs_make_one_chart(void **state)
{
    const places *p = *state;
    if (system("command -v gnuplot >/dev/null") != 0) skip();
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 3 --losses nsa.losses", 0);
    assert_ends(p, "",
                "train " SMALL "--corpus corpus --steps 3 --attention dense --beside nsa.losses "
                "--curve both.svg",
                0);
    char command[128];
    snprintf(command, sizeof command, "cd '%s' && grep -q '>nsa<' both.svg && grep -q '>dense<' both.svg",
             p->folder);
    assert_int_equal(system(command), 0);
}

/* Nothing but an error where a target cannot be written, before the training, which would take hours here. */
static void unwritable_targets_are_found_before_the_training(void **state)
{
    const places *p = *state;
    static const char *const options[] = {"--checkpoint nowhere/x", "--curve nowhere/x", "--json nowhere/x",
                                          "--checkpoint .", "--json ."};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        char arguments[128];
        snprintf(arguments, sizeof arguments, "train --steps 100000 --corpus corpus --context 96 %s",
                 options[i]);
        assert_ends(p, "timeout 20", arguments, 3);
        assert_true(says(p, "cannot write"));
    }
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 1 --json /dev/full", 3);
    assert_true(says(p, "/dev/full"));
    assert_ends(p, "", "order2 --corpus corpus --context 96 --steps 2 >/dev/full #", 3);
    assert_ends(p, "", "--help >/dev/full #", 3);
    assert_ends(p, "", "train --help >/dev/full #", 3);
}

static void a_curve_of_any_name_runs_nothing(void **state)
{
    const places *p = *state;
    if (system("command -v gnuplot >/dev/null") != 0) skip();
    assert_ends(p, "",
                "train " SMALL "--corpus corpus --steps 2 --curve \"it's'; system('touch "
                "pwned'); set title '\\`touch pwned\\`.svg\"",
                0);
    assert_false(exists(p, "pwned"));
    assert_true(exists(p, "it's'; system('touch pwned'); set title '`touch pwned`.svg"));
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 2 --curve /dev/full", 3);
}

static void signals_end_it_and_leave_the_old_checkpoint(void **state)
{
    const places *p = *state;
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 1 --checkpoint kept", 0);
    assert_ends(p, "cp kept before; timeout --preserve-status -s INT 0.3",
                "train --steps 100000 --corpus corpus --context 96 --checkpoint kept --save-every 0", 130);
    assert_ends(p, "timeout --preserve-status -s TERM 0.3",
                "train --steps 100000 --corpus corpus --context 96 --checkpoint kept --save-every 1", 143);
    assert_ends(p, "timeout --preserve-status -s INT 0.3", "generate --checkpoint before --bytes 1000000",
                130);
    char command[128];
    snprintf(command, sizeof command, "ls -A '%s' | grep -q tmp", p->folder);
    assert_int_not_equal(system(command), 0);
}

/* A checkpoint whose weights hold one NaN. */
static void spoil(const places *p, const char *from, const char *to)
{
    enum { MOST = 200 };
    static quern_tensor views[MOST];
    quern_safetensors_item items[MOST];
    quern_safetensors_pair pairs[MOST];
    quern_safetensors *f = NULL;
    char path[64];
    snprintf(path, sizeof path, "%s/%s", p->folder, from);
    assert_int_equal(quern_safetensors_open(path, &f), QUERN_OK);
    const size_t count = quern_safetensors_count(f), keys = quern_safetensors_metadata_count(f);
    float *spoilt = NULL;
    assert_true(count <= MOST && keys <= MOST);
    for (size_t i = 0; i < count; i++) {
        items[i] = (quern_safetensors_item){quern_safetensors_name(f, i), &views[i]};
        assert_int_equal(quern_safetensors_get(f, items[i].name, &views[i]), QUERN_OK);
        if (strcmp(items[i].name, "norm") != 0) continue;
        spoilt = malloc((size_t)views[i].shape[1] * 4);
        memcpy(spoilt, views[i].data, (size_t)views[i].shape[1] * 4);
        spoilt[3] = NAN;
        views[i].data = spoilt;
    }
    assert_non_null(spoilt);
    for (size_t i = 0; i < keys; i++) {
        pairs[i].key = quern_safetensors_metadata_key(f, i);
        pairs[i].value = quern_safetensors_metadata(f, pairs[i].key);
    }
    snprintf(path, sizeof path, "%s/%s", p->folder, to);
    assert_int_equal(quern_safetensors_save(path, items, count, pairs, keys), QUERN_OK);
    quern_safetensors_close(f);
    free(spoilt);
}

static void nonfinite_weights_are_reported(void **state)
{
    const places *p = *state;
    assert_ends(p, "", "train " SMALL "--corpus corpus --steps 4 --until 2 --checkpoint sound", 0);
    spoil(p, "sound", "spoilt");
    assert_ends(p, "", "eval --corpus corpus --checkpoint spoilt", 3);
    assert_true(says(p, "norm holds nan as element 3"));
    assert_ends(p, "", "generate --checkpoint spoilt", 3);
    assert_true(says(p, "norm holds nan"));
    assert_ends(p, "", "train --corpus corpus --resume spoilt --checkpoint after", 3);
    assert_true(says(p, "norm holds nan"));
    assert_false(exists(p, "after"));
}

static void order2_beats_uniform_and_is_a_distribution(void **unused)
{
    (void)unused;
    uint8_t text[4096], probe[3] = {'a', 'b', 0};
    order2 *m = order2_create();
    assert_non_null(m);
    fill(text, 4096);
    order2_add(m, text, 4096);
    assert_true(order2_bits(m, text, 4096) / 4095.0 < 3.1); /* eight letters: 3 bits */
    double total = 0.0;
    for (int c = 0; c < 256; c++) {
        probe[2] = (uint8_t)c;
        const uint8_t pair[2] = {probe[0], probe[1]};
        total += exp2(-(order2_bits(m, probe, 3) - order2_bits(m, pair, 2)));
    }
    assert_true(fabs(total - 1.0) < 1e-9);
    order2_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_match_differences),
        cmocka_unit_test(gradients_of_experts_match_differences),
        cmocka_unit_test(served_experts_lose_little),
        cmocka_unit_test(the_balance_follows_the_load),
        cmocka_unit_test(bad_options_are_refused_in_a_sentence),
        cmocka_unit_test(curves_of_two_runs_make_one_chart),
        cmocka_unit_test(a_resumed_run_repeats_bit_by_bit),
        cmocka_unit_test(the_program_resumes_to_the_same_file),
        cmocka_unit_test(the_number_of_threads_changes_no_bit),
        cmocka_unit_test(threads_that_cannot_be_created_are_done_without),
        cmocka_unit_test(resuming_needs_the_same_corpus_and_no_options_beside_the_checkpoint),
        cmocka_unit_test(results_are_written_or_the_failure_is_reported),
        cmocka_unit_test(unwritable_targets_are_found_before_the_training),
        cmocka_unit_test(a_curve_of_any_name_runs_nothing),
        cmocka_unit_test(signals_end_it_and_leave_the_old_checkpoint),
        cmocka_unit_test(nonfinite_weights_are_reported),
        cmocka_unit_test(order2_beats_uniform_and_is_a_distribution),
    };
    return cmocka_run_group_tests(tests, make_places, remove_places);
}
