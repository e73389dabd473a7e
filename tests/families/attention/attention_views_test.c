/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attention_views_test.c - views of dense attention's tensors that look dangerous but are right. */
#include "attention_case.h"
#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

/* Views that look dangerous but are right: inputs that repeat a row, gradients side by side in one buffer,
 * outputs without elements whose strides are 0. */
static void legal_views(void **state)
{
    const oracle_dense dense = {2, 6, 6, 2, 2, 8, 8, true, 0, -1, 0, NULL, NULL};
    test_random random = {1};
    attention_case c;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    float fused[2 * 6 * 3 * 2 * 8];
    (void)state;
    attention_case_make(&c, &dense, QUERN_F32, TEST_CONTIGUOUS, &random);
    attention_case_forward(&c, ctx);
    attention_case_backward(&c, ctx);
    double *expected[] = {test_tensor_get(&c.d_q), test_tensor_get(&c.d_k), test_tensor_get(&c.d_v)};
    test_tensor *const gradients[] = {&c.d_q, &c.d_k, &c.d_v};
    for (int i = 0; i < 3; i++) {
        quern_tensor *v = &gradients[i]->view;
        v->data = fused + (int64_t)i * 2 * 8;
        v->strides[1] = 3 * 2 * 8;
        v->strides[0] = 6 * v->strides[1];
    }
    size_t bytes = 0;
    assert_int_equal(quern_attention_backward_workspace(ctx, &c.params, &c.tensors, &bytes), QUERN_OK);
    void *workspace = malloc(bytes);
    if (quern_attention_backward(ctx, NULL, &c.params, &c.tensors, workspace, bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    for (int i = 0; i < 3; i++) {
        double *got = test_tensor_get(gradients[i]);
        for (int64_t j = 0; j < test_tensor_count(gradients[i]); j++) assert_true(got[j] == expected[i][j]);
        free(got);
        free(expected[i]);
    }
    free(workspace);
    c.k.view.strides[0] = 0;   /* both sequences read the first's keys */
    c.tensors.v = c.tensors.k; /* and keys as values */
    attention_case_forward(&c, ctx);
    attention_case_free(&c);
    const oracle_dense empty = {2, 0, 6, 2, 2, 8, 8, true, 0, -1, 0, NULL, NULL};
    attention_case_make(&c, &empty, QUERN_F32, TEST_CONTIGUOUS, &random);
    memset(c.o.view.strides, 0, 3 * sizeof *c.o.view.strides);
    attention_case_forward(&c, ctx);
    attention_case_free(&c);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(legal_views)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
