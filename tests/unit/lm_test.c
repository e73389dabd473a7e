/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lm_test.c - the example's own tests: its hand-written backward against finite differences, and a run that is
 * interrupted and resumed against one that is not. */
#include "lm.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

int failure(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    return 1;
}

static const lm_config dense_config = {32, 2, 2, 1, 48, 96, false, 16, 4, 32};
static const lm_config sparse_config = {32, 2, 2, 1, 48, 96, true, 16, 4, 32};

static void fill(uint8_t *text, int n)
{
    uint64_t state = 7;
    for (int i = 0; i < n; i++) text[i] = (uint8_t)("abcdefgh"[random_next(&state) % 8]);
}

/* d loss / d value along a random direction, by central differences of the f32 model, for every parameter array. */
static void check_gradients(const lm_config *config)
{
    uint8_t text[97];
    lm_model m;
    fill(text, 97);
    assert_true(model_create(&m, config, 3));
    uint64_t state = 11;
    for (int32_t i = 0; i < m.param_count; i++) /* zero matrices would hide gradients behind them */
        for (int64_t j = 0; j < m.params[i].rows * m.params[i].cols; j++) m.params[i].value[j] += 0.05f * random_normal(&state);
    assert_true(model_loss(&m, text, 96, true) > 0.0);
    for (int32_t i = 0; i < m.param_count; i++) {
        lm_param *p = &m.params[i];
        if (!config->sparse && strstr(p->name, ".gate") != NULL) continue; /* dense attention has no gate */
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
            for (int64_t j = 0; j < n; j++) p->value[j] = old[j] + (float)((side == 0 ? step : -step) * (double)grad[j] / norm);
            numeric[side] = model_loss(&m, text, 96, false);
        }
        memcpy(p->value, old, (size_t)n * 4);
        const double measured = (numeric[0] - numeric[1]) / (2.0 * step);
        if (fabs(measured - norm) > 2e-2 * norm + 2e-4) print_error("%s: %g by differences, %g by backward\n", p->name, measured, norm);
        assert_true(fabs(measured - norm) <= 2e-2 * norm + 2e-4); /* f32 loss: 1e-7 / step each way */
        free(grad);
        free(old);
    }
    model_destroy(&m);
}

static void dense_gradients_match_differences(void **unused)
{
    (void)unused;
    check_gradients(&dense_config);
}

static void sparse_gradients_match_differences(void **unused)
{
    (void)unused;
    check_gradients(&sparse_config);
}

static void steps(lm_model *m, const uint8_t *text, int count)
{
    const lm_rates rates = LM_RATES_DEFAULT;
    for (int i = 0; i < count; i++) {
        assert_true(model_loss(m, text + m->step, 96, true) > 0.0);
        optimizer_step(m, 1.0f, rates);
    }
}

static void a_resumed_run_repeats_bit_by_bit(void **unused)
{
    (void)unused;
    uint8_t text[128];
    char path[] = "/tmp/lm_test_XXXXXX";
    fill(text, 128);
    const int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    const lm_run run = {5, 6, LM_RATES_DEFAULT};
    lm_run read;
    lm_model whole, half, rest;
    assert_true(model_create(&whole, &sparse_config, 5));
    steps(&whole, text, 6);
    assert_true(model_create(&half, &sparse_config, 5));
    steps(&half, text, 3);
    assert_true(checkpoint_save(&half, path, &run));
    assert_true(checkpoint_load(&rest, path, &read));
    assert_int_equal(rest.step, 3);
    assert_int_equal(read.steps, 6);
    assert_true(read.seed == 5 && read.rates.muon == run.rates.muon && read.rates.adam == run.rates.adam);
    steps(&rest, text, 3);
    for (int32_t i = 0; i < whole.param_count; i++)
        assert_memory_equal(whole.params[i].value, rest.params[i].value, (size_t)(whole.params[i].rows * whole.params[i].cols) * 4);
    unlink(path);
    model_destroy(&whole);
    model_destroy(&half);
    model_destroy(&rest);
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
        cmocka_unit_test(dense_gradients_match_differences),
        cmocka_unit_test(sparse_gradients_match_differences),
        cmocka_unit_test(a_resumed_run_repeats_bit_by_bit),
        cmocka_unit_test(order2_beats_uniform_and_is_a_distribution),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
