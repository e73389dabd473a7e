/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* abi_test.c - values that callers were compiled against. */
#include "cmocka_c11.h"

#include <quern/attention.h>
#include <quern/nsa.h>

static void enum_values_are_pinned(void **unused)
{
    (void)unused;
    assert_int_equal(QUERN_OK, 0);
    assert_int_equal(QUERN_ERR_INVALID_ARGUMENT, 1);
    assert_int_equal(QUERN_ERR_UNSUPPORTED, 2);
    assert_int_equal(QUERN_ERR_WORKSPACE, 3);
    assert_int_equal(QUERN_ERR_OUT_OF_MEMORY, 4);
    assert_int_equal(QUERN_ERR_IO, 5);
    assert_int_equal(QUERN_ERR_FORMAT, 6);
    assert_int_equal(QUERN_ERR_DEVICE, 7);
    assert_int_equal(QUERN_ERR_INTERNAL, 8);
    assert_int_equal(QUERN_F32, 0);
    assert_int_equal(QUERN_F16, 1);
    assert_int_equal(QUERN_BF16, 2);
    assert_int_equal(QUERN_I32, 3);
    assert_int_equal(QUERN_U8, 4);
    assert_int_equal(QUERN_CPU, 0);
    assert_int_equal(QUERN_CUDA, 1);
    assert_int_equal(QUERN_CPU_LEVEL_AVX512BF16, 4);
    assert_int_equal(QUERN_NSA_COMPRESS_GIVEN, 2);
    assert_int_equal(QUERN_NSA_GATE_GIVEN, 2);
    assert_int_equal(QUERN_NSA_BRANCH_ALL, 7);
}

static void structs_keep_their_size(void **unused)
{
    (void)unused;
    const quern_attention_params attention = QUERN_ATTENTION_PARAMS_INIT;
    const quern_nsa_params nsa = QUERN_NSA_PARAMS_INIT;
    const quern_nsa_tensors tensors = QUERN_NSA_TENSORS_INIT;
    const quern_context_params context = QUERN_CONTEXT_PARAMS_INIT;
    assert_int_equal(sizeof(quern_tensor), 120);
    assert_int_equal(attention.size, 40);
    assert_int_equal(nsa.size, sizeof nsa);
    assert_int_equal(tensors.size, sizeof tensors);
    assert_int_equal(context.size, 16);
    assert_null(tensors.q);
    assert_null(tensors.stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(enum_values_are_pinned),
        cmocka_unit_test(structs_keep_their_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
