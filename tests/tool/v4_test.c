/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * v4_test.c - examples/v4 against a walk in double through the oracle, from the bytes of a made checkpoint
 * with every kind of layer and router: one shot, in chunks, token by token; greedy tokens, in batches that
 * fork what they begin with, resumed from a session, with experts from a file. The example's logits are
 * within 1e-4 of the walk's, and its tokens are the likeliest wherever the two likeliest are further apart.
 */
#include "tool/v4_case.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double bound = 1e-4;
enum { TOKENS = 50, NEW = 10 };

static double *walked(const int32_t *tokens, int64_t count, const made_model *m)
{
    double *logits = malloc((size_t)(count * V4_VOCABULARY) * sizeof *logits);
    v4_walk(m, tokens, count, logits);
    return logits;
}

static double distance(const float *a, const double *b, int64_t n)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += b[i] * b[i];
    }
    return sqrt(error / norm);
}

static void check_logits(const char *folder, const made_model *m)
{
    int32_t tokens[TOKENS];
    float first[TOKENS * V4_VOCABULARY], logits[TOKENS * V4_VOCABULARY];
    static const int chunks[] = {512, 1, 7, TOKENS};
    v4_tokens(tokens, TOKENS);
    v4_put("tokens", tokens, NULL, TOKENS);
    double *expected = walked(tokens, TOKENS, m);
    for (int i = 0; i < 4; i++) {
        v4_ends(0, NULL, "logits %s tokens logits --chunk %d", folder, chunks[i]);
        v4_logits("logits", TOKENS, i == 0 ? first : logits);
        if (i > 0) assert_memory_equal(logits, first, sizeof first);
    }
    for (int t = 0; t < TOKENS; t++) {
        const double d = distance(first + t * V4_VOCABULARY, expected + t * V4_VOCABULARY, V4_VOCABULARY);
        if (!(d <= bound)) fail_msg("token %d: %g from the walk", t, d);
    }
    free(expected);
}

static void logits_are_the_walks(void **state)
{
    (void)state;
    check_logits("model", &v4_made);
}

static void fp8_experts(void **state)
{
    made_model m = {.count = 0};
    char folder[64];
    (void)state;
    v4_make(&m, 8, true);
    snprintf(folder, sizeof folder, "%s/fp8", v4_folder());
    v4_write(&m, folder, NULL, NULL);
    check_logits("fp8", &m);
    made_free(&m);
}

/* bf16 activations give other logits, by no more than what bf16's 8 bits explain over five layers. */
static void bf16_activations(void **state)
{
    int32_t tokens[TOKENS];
    float logits[TOKENS * V4_VOCABULARY];
    (void)state;
    v4_tokens(tokens, TOKENS);
    v4_put("tokens", tokens, NULL, TOKENS);
    double *expected = walked(tokens, TOKENS, &v4_made);
    v4_ends(0, NULL, "logits model tokens logits --activations bf16");
    v4_logits("logits", TOKENS, logits);
    const double d = distance(logits, expected, TOKENS * V4_VOCABULARY);
    assert_true(d > bound && d < 0.1);
    free(expected);
}

/* Each new token is the walk's likeliest. */
static void check_greedy(const int32_t *prompt, int count, const int32_t *made)
{
    int32_t all[V4_MOST + NEW];
    memcpy(all, prompt, (size_t)count * sizeof *all);
    memcpy(all + count, made, NEW * sizeof *all);
    double *logits = walked(all, count + NEW - 1, &v4_made);
    for (int i = 0; i < NEW; i++) {
        const double *row = logits + (count - 1 + i) * V4_VOCABULARY;
        double best = row[0], second = -HUGE_VAL, size = 0;
        int at = 0;
        for (int v = 0; v < V4_VOCABULARY; v++) {
            size = fmax(size, fabs(row[v]));
            if (v > 0 && row[v] > best) second = best, best = row[v], at = v;
            else if (v > 0) second = fmax(second, row[v]);
        }
        if (best - second > bound * size) assert_int_equal(made[i], at);
    }
    free(logits);
}

static void greedy_tokens_are_the_walks(void **state)
{
    static const int counts[] = {1, 9, TOKENS};
    int32_t tokens[TOKENS], made[V4_MOST], again[V4_MOST];
    (void)state;
    v4_tokens(tokens, TOKENS);
    for (int i = 0; i < 3; i++) {
        v4_put("prompt", tokens, NULL, counts[i]);
        assert_int_equal(v4_ends(0, made, "generate model --tokens prompt --max-new %d --greedy --json", NEW),
                         NEW);
        check_greedy(tokens, counts[i], made);
        assert_int_equal(v4_ends(0, again, "generate model --tokens prompt --max-new %d --chunk 3", NEW),
                         NEW);
        assert_memory_equal(made, again, NEW * sizeof *made);
    }
    assert_int_equal(v4_ends(0, made, "generate model --tokens prompt --max-new 0 --json"), 0);
}

/* Three sequences of which all begin alike, one is the beginning itself, and one goes on for long. */
static void make_batch(int32_t tokens[3][V4_MOST], int32_t lengths[3])
{
    static const int32_t of[] = {21, 40, 33};
    memset(tokens, 0, 3 * sizeof *tokens);
    for (int b = 0; b < 3; b++) {
        lengths[b] = of[b];
        v4_tokens(tokens[b], of[b]);
        for (int i = 21; i < of[b]; i++) tokens[b][i] = (tokens[b][i] + b) % V4_VOCABULARY;
    }
}

/* A batch gives what each of its sequences gives alone. */
static void check_batch(const char *options)
{
    int32_t tokens[3][V4_MOST], lengths[3], together[3 * NEW + 1], alone[NEW + 1];
    make_batch(tokens, lengths);
    v4_put("batch", tokens[0], lengths, 3);
    assert_int_equal(
        v4_ends(0, together, "generate model --batch batch --max-new %d --json %s", NEW, options), 3 * NEW);
    for (int b = 0; b < 3; b++) {
        v4_put("alone", tokens[b], NULL, lengths[b]);
        assert_int_equal(v4_ends(0, alone, "generate model --tokens alone --max-new %d --json", NEW), NEW);
        assert_memory_equal(alone, together + b * NEW, NEW * sizeof *alone);
    }
}

static void batches_fork_what_they_begin_with(void **state)
{
    (void)state;
    check_batch("");
    check_batch("--chunk 4");
    check_batch("--session both"); /* written, then read */
    check_batch("--session both");
}

/* A run that begins with a session's tokens gives what a run without it gives; also where they are all. */
static void sessions_go_on(void **state)
{
    int32_t tokens[TOKENS], whole[V4_MOST], resumed[V4_MOST];
    static const int before[] = {1, 3, 8, 30, TOKENS};
    (void)state;
    v4_tokens(tokens, TOKENS);
    v4_put("prompt", tokens, NULL, TOKENS);
    v4_ends(0, whole, "generate model --tokens prompt --max-new %d --json", NEW);
    for (int i = 0; i < 5; i++) {
        char name[16];
        snprintf(name, sizeof name, "session%d", i);
        v4_put("begin", tokens, NULL, before[i]);
        v4_ends(0, NULL, "generate model --tokens begin --max-new 3 --session %s --chunk %d", name, i + 1);
        v4_ends(0, resumed, "generate model --tokens prompt --max-new %d --json --session %s", NEW, name);
        assert_memory_equal(resumed, whole, NEW * sizeof *whole);
    }
    tokens[4]++;
    v4_put("other", tokens, NULL, TOKENS);
    v4_ends(3, NULL, "generate model --tokens other --max-new 1 --session session0");
    v4_says("at token 4 of the session's 50");
}

/* Experts from the file give the same tokens; a run goes on where one ended after two layers. */
static void experts_come_from_a_file(void **state)
{
    int32_t tokens[TOKENS], plain[V4_MOST], mapped[V4_MOST];
    size_t size;
    (void)state;
    v4_tokens(tokens, TOKENS);
    v4_put("prompt", tokens, NULL, TOKENS);
    v4_ends(0, plain, "generate model --tokens prompt --max-new %d --json", NEW);
    for (int i = 0; i < 3; i++) {
        v4_ends(0, mapped, "generate model --tokens prompt --max-new %d --json --cache experts", NEW);
        assert_memory_equal(mapped, plain, NEW * sizeof *plain);
        uint8_t *bytes = v4_read("experts", &size);
        if (i == 0) { /* as a run leaves it that ends there */
            memset(bytes + 32 + 8 * 2, 0, 8 * (V4_LAYERS - 2));
            memset(bytes + size / 2, 0, size - size / 2);
            v4_write_file("experts", bytes, size);
        }
        free(bytes);
    }
}

/* A killed run leaves the session it found or a whole one, experts that the next run goes on with, and
 * nothing else where files may be nameless until they are whole. */
static void killed_runs_leave_no_other_file(void **state)
{
    int32_t tokens[TOKENS], plain[V4_MOST], again[V4_MOST];
    char command[512];
    (void)state;
    v4_tokens(tokens, TOKENS);
    v4_put("prompt", tokens, NULL, TOKENS);
    v4_ends(0, plain, "generate model --tokens prompt --max-new %d --json", NEW);
    const int nameless = open(v4_folder(), O_WRONLY | O_TMPFILE, 0600);
    for (int i = 0; i < 16; i++) {
        snprintf(command, sizeof command,
                 "cd '%s' && rm -f killed && timeout -s KILL 0.0%02d '%s' generate model --tokens prompt "
                 "--max-new 0 --session killed --cache slow >out 2>err",
                 v4_folder(), 1 + 5 * i, v4_command);
        (void)!system(command);
        snprintf(command, sizeof command, "test -z \"$(find '%s' -name '.quern-*')\"", v4_folder());
        if (nameless >= 0) assert_int_equal(system(command), 0);
        if (i % 4 > 0) continue;
        v4_write_file("cut", (const uint8_t[5000]){0}, 5000); /* as a run leaves it that reserves the space */
        v4_ends(0, again, "generate model --tokens prompt --max-new %d --json --session killed --cache %s",
                NEW, i % 8 == 0 ? "slow" : "cut");
        assert_memory_equal(again, plain, NEW * sizeof *plain);
    }
    if (nameless >= 0) close(nameless);
}

/* The folder that `quern quantize` makes, whose experts are in NVFP4 with the same values. */
static void nvfp4_folders(void **state)
{
    (void)state;
#ifdef QUERN_COMMAND
    char command[512];
    snprintf(command, sizeof command,
             "cd '%s' && '%s' quantize model nvfp4 --format modelopt --input-scales 1 >out 2>err",
             v4_folder(), QUERN_COMMAND);
    assert_int_equal(system(command), 0);
    check_logits("nvfp4", &v4_made);
#endif
}

/* With --device cuda on the mock device, whose memory the host cannot touch, the bits are the CPU's. */
static void another_device(void **state)
{
    (void)state;
#ifdef V4_MOCK_COMMAND
    int32_t tokens[3][V4_MOST], lengths[3], here[3 * NEW + 1], there[3 * NEW + 1];
    float logits[2][TOKENS * V4_VOCABULARY];
    v4_tokens(tokens[0], TOKENS);
    v4_put("tokens", tokens[0], NULL, TOKENS);
    make_batch(tokens, lengths);
    v4_put("batch", tokens[0], lengths, 3);
    v4_ends(0, NULL, "logits model tokens logits --chunk 9 --activations bf16");
    v4_logits("logits", TOKENS, logits[0]);
    v4_ends(0, here, "generate model --batch batch --max-new %d --json --activations bf16", NEW);
    v4_command = V4_MOCK_COMMAND;
    v4_ends(0, NULL, "logits model tokens logits --chunk 9 --device cuda");
    v4_logits("logits", TOKENS, logits[1]);
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    for (int i = 0; i < 2; i++) { /* session and experts' file are written, then read */
        v4_ends(0, there,
                "generate model --batch batch --max-new %d --json --device cuda --session far --cache far.e",
                NEW);
        assert_memory_equal(here, there, 3 * NEW * sizeof *here);
    }
    v4_command = V4_COMMAND;
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_the_walks),
        cmocka_unit_test(fp8_experts),
        cmocka_unit_test(bf16_activations),
        cmocka_unit_test(greedy_tokens_are_the_walks),
        cmocka_unit_test(batches_fork_what_they_begin_with),
        cmocka_unit_test(sessions_go_on),
        cmocka_unit_test(experts_come_from_a_file),
        cmocka_unit_test(killed_runs_leave_no_other_file),
        cmocka_unit_test(nvfp4_folders),
        cmocka_unit_test(another_device),
    };
    return cmocka_run_group_tests(tests, v4_set_up, v4_tear_down);
}
