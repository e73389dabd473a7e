/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_dsv4_layer_test.c - the float64 oracle of the whole layer against the golden vectors. */
#include "cmocka_c11.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_layer_case.h"

#include <math.h>
#include <stdlib.h>

/* The oracle's own choice: with it every intermediate is the vectors'. */
static void golden_layers(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        double *expected[LAYER_TENSORS], *w[ORACLE_LAYER_WEIGHTS] = {NULL};
        layer_case c = layer_case_golden(QUERN_TEST_VECTORS, i, expected);
        double *x = test_tensor_get(&c.t[LAYER_X]), *table = test_tensor_get(&c.t[LAYER_COS_SIN]);
        for (int k = 0; k < ORACLE_LAYER_WEIGHTS; k++)
            if (c.t[LAYER_WEIGHTS + k].buffer != NULL) w[k] = test_tensor_get(&c.t[LAYER_WEIGHTS + k]);
        for (int64_t b = 0; b < c.batch; b++) {
            double *to[LAYER_TENSORS] = {NULL};
            for (int k = LAYER_OUT; k <= LAYER_O_A; k++)
                if (expected[k] != NULL) to[k] = test_doubles(test_tensor_count(&c.t[k]) / c.batch);
            oracle_dsv4_layer(&c.shape, x + b * c.shape.tokens * c.shape.width, w, table, NULL,
                              &(oracle_layer_results){.q_residual = to[LAYER_Q_RESIDUAL],
                                                      .kv = to[LAYER_KV],
                                                      .compressed = to[LAYER_COMPRESSED],
                                                      .idx_k = to[LAYER_IDX_K],
                                                      .idx_q = to[LAYER_IDX_Q],
                                                      .idx_score = to[LAYER_IDX_SCORE],
                                                      .core = to[LAYER_CORE],
                                                      .core_irope = to[LAYER_CORE_IROPE],
                                                      .o_a = to[LAYER_O_A],
                                                      .out = to[LAYER_OUT]});
            for (int k = LAYER_OUT; k <= LAYER_O_A; k++) {
                if (to[k] == NULL || k == LAYER_Q) continue;
                const int64_t n = test_tensor_count(&c.t[k]) / c.batch;
                for (int64_t e = 0; e < n; e++) /* the vectors' scores are not masked */
                    if (to[k][e] == -INFINITY) expected[k][b * n + e] = -INFINITY;
                test_check_golden(layer_case_names[k], to[k], expected[k] + b * n, n, DSV4_TINY_BOUND);
            }
            for (int k = 0; k < LAYER_TENSORS; k++) free(to[k]);
        }
        for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
        for (int k = 0; k < ORACLE_LAYER_WEIGHTS; k++) free(w[k]);
        free(x), free(table);
        layer_case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden_layers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
