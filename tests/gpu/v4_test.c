/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * v4_test.c - examples/v4 on a GPU, where activations are bf16 and steps of one token a sequence are a graph
 * that is launched again, on a made model with every kind of layer and router: logits by chunks are near the
 * CPU's, and each token that is made is the likeliest by logits of all tokens in one chunk, but for rounding;
 * of one sequence, and of three that are forked, from a session and experts' files.
 */
#include "tool/v4_case.h"

#include <libgen.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 50, NEW = 12 };

static void logits_are_near_the_cpus(void **state)
{
    int32_t tokens[TOKENS];
    float here[TOKENS * V4_VOCABULARY], there[TOKENS * V4_VOCABULARY];
    static const int chunks[] = {512, 1, 7};
    (void)state;
    v4_tokens(tokens, TOKENS);
    v4_put("tokens", tokens, NULL, TOKENS);
    v4_ends(0, NULL, "logits model tokens logits");
    v4_logits("logits", TOKENS, here);
    for (int i = 0; i < 3; i++) {
        double error = 0, norm = 0;
        v4_ends(0, NULL, "logits model tokens logits --device cuda --chunk %d", chunks[i]);
        v4_logits("logits", TOKENS, there);
        for (int k = 0; k < TOKENS * V4_VOCABULARY; k++) {
            error += ((double)there[k] - here[k]) * ((double)there[k] - here[k]);
            norm += (double)here[k] * here[k];
        }
        printf("chunks of %d: %g from the CPU in f32\n", chunks[i], sqrt(error / norm));
        if (!(error < 0.01 * norm)) fail_msg("chunks of %d: %g", chunks[i], sqrt(error / norm));
    }
}

/* Each new token's logit is within a twentieth of the largest. */
static void check_greedy(const int32_t *prompt, int count, const int32_t *made)
{
    int32_t all[V4_MOST + NEW];
    float logits[(V4_MOST + NEW) * V4_VOCABULARY];
    int other = 0;
    memcpy(all, prompt, (size_t)count * sizeof *all);
    memcpy(all + count, made, NEW * sizeof *all);
    v4_put("all", all, NULL, count + NEW);
    v4_ends(0, NULL, "logits model all logits --device cuda");
    v4_logits("logits", count + NEW, logits);
    for (int i = 0; i < NEW; i++) {
        const float *row = logits + (count - 1 + i) * V4_VOCABULARY;
        float best = row[0], size = 0;
        for (int v = 0; v < V4_VOCABULARY; v++) best = fmaxf(best, row[v]), size = fmaxf(size, fabsf(row[v]));
        other += row[made[i]] != best;
        if (!(row[made[i]] >= best - 0.05F * size))
            fail_msg("token %d of %d and %d: %g, the likeliest has %g", i, count, NEW, (double)row[made[i]],
                     (double)best);
    }
    if (other > NEW / 4) fail_msg("%d of %d tokens are not the likeliest", other, NEW);
}

static void greedy_tokens_are_the_likeliest(void **state)
{
    int32_t tokens[TOKENS], made[V4_MOST];
    (void)state;
    v4_tokens(tokens, TOKENS);
    for (int i = 1; i <= TOKENS; i += 7) {
        v4_put("prompt", tokens, NULL, i);
        assert_int_equal(
            v4_ends(0, made, "generate model --tokens prompt --max-new %d --json --device cuda", NEW), NEW);
        check_greedy(tokens, i, made);
    }
}

static void batches_are_too(void **state)
{
    static const int32_t lengths[] = {21, 40, 33};
    static const char *const options[] = {"", "--chunk 4", "--session far --cache far.e",
                                          "--session far --cache far.e"};
    int32_t tokens[3][V4_MOST] = {{0}}, made[4][3 * NEW + 1];
    (void)state;
    for (int b = 0; b < 3; b++) {
        v4_tokens(tokens[b], lengths[b]);
        for (int i = 21; i < lengths[b]; i++) tokens[b][i] = (tokens[b][i] + b) % V4_VOCABULARY;
    }
    for (int i = 0; i < 4; i++) {
        v4_put("batch", tokens[0], lengths, 3);
        v4_ends(0, made[i], "generate model --batch batch --max-new %d --json --device cuda %s", NEW,
                options[i]);
        for (int b = 0; b < 3; b++) check_greedy(tokens[b], lengths[b], made[i] + b * NEW);
    }
    assert_memory_equal(made[0], made[2], 3 * NEW * sizeof **made);
    assert_memory_equal(made[0], made[3], 3 * NEW * sizeof **made);
}

int main(int argc, char **argv)
{
    static char command[4096];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_near_the_cpus),
        cmocka_unit_test(greedy_tokens_are_the_likeliest),
        cmocka_unit_test(batches_are_too),
    };
    char *self = realpath("/proc/self/exe", NULL);
    (void)argc;
    (void)argv;
    assert_non_null(self);
    snprintf(command, sizeof command, "%s/../v4", dirname(self));
    v4_command = command;
    return cmocka_run_group_tests(tests, v4_set_up, v4_tear_down);
}
