/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dsv4_tables_test.c - RoPE tables and packed weights in every dtype and layout: what f32 has, rounded once;
 * what is refused.
 */
#include "cmocka_c11.h"
#include "oracle/dsv4.h"
#include "tensor.h"

#include <quern/dsv4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};

static void tables_of_any_dtype(void **state)
{
    enum { ROWS = 700, DIM = 24 };
    (void)state;
    for (int n = 0; n < 12; n++) {
        test_random random = {(uint64_t)n + 1};
        const quern_dtype dtype = dtypes[n % 3];
        test_tensor table = test_tensor_matrix(&random, dtype, ROWS, DIM);
        quern_dsv4_rope_params p = QUERN_DSV4_ROPE_PARAMS_INIT;
        p.base = n < 6 ? 10000 : 160000;
        if (n >= 6) {
            p.factor = 16;
            p.original_length = 65536;
            p.beta_fast = 32;
            p.beta_slow = 1;
        }
        assert_int_equal(quern_dsv4_rope_table(&p, &table.view), QUERN_OK);
        test_tensor_check_guards(&table, "table");
        double *expected = test_doubles(ROWS * DIM), *got = test_tensor_get(&table);
        oracle_dsv4_rope_table(ROWS, DIM, p.base, p.factor, p.original_length, p.beta_fast, p.beta_slow,
                               expected);
        for (int i = 0; i < ROWS * DIM; i++)
            if (got[i] != test_round(dtype, expected[i]))
                fail_msg("%s: [%d][%d] is %.9g, expected %.9g", quern_dtype_name(dtype), i / DIM, i % DIM,
                         got[i], test_round(dtype, expected[i]));
        free(expected), free(got);
        test_tensor_free(&table);
    }
}

enum { IN = 5, WIDTH = 6, R = 3 };

/* w's columns [first, first + WIDTH) are those of a part, [IN, WIDTH] or as a checkpoint has it, from row
 * `from` on. */
static void check_columns(const test_tensor *w, int64_t first, const test_tensor *part, int64_t from,
                          bool turned)
{
    double *got = test_tensor_get(w), *given = test_tensor_get(part);
    const int64_t columns = w->view.shape[1], width = part->view.shape[1];
    for (int64_t i = 0; i < w->view.shape[0]; i++)
        for (int64_t c = 0; c < WIDTH; c++) {
            const double x = turned ? given[(from + c) * width + i] : given[i * width + from + c];
            assert_true(got[i * columns + first + c] == test_round(w->view.dtype, x));
        }
    free(got), free(given);
}

static void packing_of_any_dtype(void **state)
{
    (void)state;
    for (int n = 0; n < 36; n++) {
        const quern_dsv4_kind kind = n % 2 ? QUERN_DSV4_HCA : QUERN_DSV4_CSA;
        const int64_t series = kind == QUERN_DSV4_CSA ? 2 : 1;
        const quern_dtype from = dtypes[n / 2 % 3], to = dtypes[n / 6 % 3];
        test_random random = {(uint64_t)n + 40};
        test_tensor parts[4], w = test_tensor_matrix(&random, to, IN, 2 * series * WIDTH),
                              kv = test_tensor_matrix(&random, from, series * WIDTH, IN),
                              gate = test_tensor_matrix(&random, to, series * WIDTH, IN),
                              ape = test_tensor_matrix(&random, QUERN_F32, R, series * WIDTH),
                              b_a = test_tensor_matrix(&random, to, R, WIDTH),
                              b_b = test_tensor_matrix(&random, from, R, WIDTH);
        const quern_tensor *p[4] = {NULL};
        for (int i = 0; i < 2 * series; i++) {
            parts[i] = test_tensor_matrix(&random, from, IN, WIDTH);
            p[i] = &parts[i].view;
        }
        test_tensor_reset(&w);
        assert_int_equal(quern_dsv4_pack_weights(kind, p[0], p[1], p[2], p[3], &w.view), QUERN_OK);
        test_tensor_check_guards(&w, "w");
        for (int i = 0; i < 2 * series; i++) check_columns(&w, i * WIDTH, &parts[i], 0, false);
        test_tensor_reset(&w), test_tensor_reset(&b_a), test_tensor_reset(&b_b);
        assert_int_equal(quern_dsv4_pack_checkpoint(kind, &kv.view, &gate.view, &ape.view, &w.view, &b_a.view,
                                                    series == 2 ? &b_b.view : NULL),
                         QUERN_OK);
        test_tensor_check_guards(&w, "w"), test_tensor_check_guards(&b_a, "b_a");
        for (int64_t s = 0; s < series; s++) { /* the checkpoint has series b first */
            const int64_t at = (series - 1 - s) * WIDTH;
            check_columns(&w, 2 * s * WIDTH, &kv, at, true);
            check_columns(&w, (2 * s + 1) * WIDTH, &gate, at, true);
            check_columns(s == 0 ? &b_a : &b_b, 0, &ape, at, false);
        }
        if (series == 1) test_tensor_check_unchanged(&b_b, "b_b");
        test_tensor *all[] = {&w, &kv, &gate, &ape, &b_a, &b_b};
        for (int i = 0; i < 6; i++) test_tensor_free(all[i]);
        for (int i = 0; i < 2 * series; i++) test_tensor_free(&parts[i]);
    }
}

static void refused(quern_status status, const char *sentence)
{
    assert_int_equal(status, QUERN_ERR_INVALID_ARGUMENT);
    if (strstr(quern_last_error(NULL), sentence) == NULL)
        fail_msg("'%s' does not say '%s'", quern_last_error(NULL), sentence);
}

static void refusals(void **state)
{
    (void)state;
    test_random random = {2};
    test_tensor t = test_tensor_matrix(&random, QUERN_F32, 4, 6),
                w = test_tensor_matrix(&random, QUERN_F32, 4, 12);
    test_tensor_reset(&w);
    quern_tensor view = t.view;
    quern_dsv4_rope_params p = QUERN_DSV4_ROPE_PARAMS_INIT;
    p.base = 100;
    refused(quern_dsv4_rope_table(NULL, &t.view), "params is NULL");
    refused(quern_dsv4_rope_table(&p, NULL), "table is NULL");
    view.shape[1] = 5;
    refused(quern_dsv4_rope_table(&p, &view), "table.shape[1] is 5: an even number");
    view = t.view;
    view.dtype = QUERN_I32;
    refused(quern_dsv4_rope_table(&p, &view), "table: dtype i32: f32 or f16 or bf16");
    view = t.view;
    view.data = (char *)view.data + 1;
    refused(quern_dsv4_rope_table(&p, &view), "multiple of the element's 4 bytes");
    view = t.view;
    view.strides[0] = 5;
    refused(quern_dsv4_rope_table(&p, &view), "table: its strides let elements share memory");
    view.strides[0] = INT64_MAX;
    refused(quern_dsv4_rope_table(&p, &view), "table: shape times strides overflows");
    p.base = NAN;
    refused(quern_dsv4_rope_table(&p, &t.view), "base is nan");
    p.base = 100;
    p.factor = 2;
    refused(quern_dsv4_rope_table(&p, &t.view), "factor is 2, original_length 0");
    refused(quern_dsv4_pack_weights(QUERN_DSV4_HCA, &t.view, NULL, NULL, NULL, &w.view), "w_a_z is NULL");
    refused(quern_dsv4_pack_weights((quern_dsv4_kind)7, &t.view, &t.view, NULL, NULL, &w.view), "kind is 7");
    refused(quern_dsv4_pack_weights(QUERN_DSV4_CSA, &t.view, &t.view, &t.view, &t.view, &w.view),
            "w.shape[1] is 12: 24 is accepted");
    view = t.view;
    view.dtype = QUERN_BF16;
    refused(quern_dsv4_pack_weights(QUERN_DSV4_HCA, &t.view, &view, NULL, NULL, &w.view),
            "w_a_z has dtype bf16: f32, as w_a_kv");
    view = w.view;
    view.strides[0] = 3;
    refused(quern_dsv4_pack_weights(QUERN_DSV4_HCA, &t.view, &t.view, NULL, NULL, &view),
            "w: its strides let elements share memory");
    view = w.view;
    view.shape[1] = 6;
    refused(quern_dsv4_pack_weights(QUERN_DSV4_HCA, &t.view, &view, NULL, NULL, &w.view),
            "w shares memory with w_a_z");
    test_tensor_check_unchanged(&w, "w of a refused call");
    test_tensor_free(&t), test_tensor_free(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(tables_of_any_dtype),
                                       cmocka_unit_test(packing_of_any_dtype), cmocka_unit_test(refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
