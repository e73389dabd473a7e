/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* oracle_golden_test.c - the float64 oracle against golden vectors that other programs computed. */
#include "cmocka_c11.h"
#include "nsa_golden.h"
#include "nsa_reference.h"

#include <math.h>
#include <stdlib.h>

static void whole(void **state)
{
    nsa_golden cases[16];
    (void)state;
    const int n = nsa_golden_cases(cases);
    for (int i = 0; i < n; i++) {
        quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, cases[i].file);
        nsa_case *c = nsa_golden_case(&cases[i], file);
        nsa_reference *r = nsa_reference_new(c, false);
        nsa_reference_select(r);
        nsa_golden_compare_lists(&cases[i], c, file, r->block_idx, r->block_count);
        nsa_reference_forward(r);
        nsa_reference_backward(r);
        nsa_golden_compare(&cases[i], c, file, r->value);
        nsa_reference_free(r);
        nsa_case_free(c);
        quern_safetensors_close(file);
    }
}

/* Summed softmax probabilities per compressed entry, the score before selection. */
static void paper_scores(void **state)
{
    nsa_golden cases[16];
    (void)state;
    const nsa_golden paper = cases[nsa_golden_cases(cases) - 1];
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, paper.file);
    nsa_case *c = nsa_golden_case(&paper, file);
    nsa_reference *r = nsa_reference_new(c, false);
    const nsa_sequence s = nsa_sequence_of(c, 0);
    const int64_t entries = oracle_nsa_entries(&s.a);
    double *expected = golden_get(file, "", "sel_score", 2 * s.a.n * entries);
    oracle_choice choices[16];
    assert_true(oracle_nsa_blocks(&s.a) == 16);
    for (int64_t list = 0; list < 2; list++) {
        for (int64_t t = 0; t < s.a.n; t++) {
            oracle_nsa_block_choices(&s.a, r->value[NSA_Q], r->k_cmp, list, t, choices);
            for (int64_t i = 0; i < entries; i++)
                assert_true(fabs(choices[i].score - expected[(list * s.a.n + t) * entries + i]) < 1e-6);
        }
    }
    free(expected);
    nsa_reference_free(r);
    nsa_case_free(c);
    quern_safetensors_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(whole), cmocka_unit_test(paper_scores)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
