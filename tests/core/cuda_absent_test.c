/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cuda_absent_test.c - calls for a GPU where there is no backend, or a wrong one, say so and touch nothing.
 */
#include "cmocka_c11.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>

static void a_missing_backend_is_an_error_that_names_it(void **unused)
{
    (void)unused;
    int32_t count = 7;
    void *p = &count;
    setenv("QUERN_CUDA_LIBRARY", "/nowhere/libquern_cuda.so.0", 1);
    assert_int_equal(quern_cuda_check(0), QUERN_ERR_DEVICE);
    assert_non_null(strstr(quern_last_error(NULL), "/nowhere/libquern_cuda.so.0"));
    assert_int_equal(quern_cuda_device_count(&count), QUERN_ERR_DEVICE);
    assert_int_equal(quern_cuda_allocate(0, 16, &p), QUERN_ERR_DEVICE);
    assert_int_equal(quern_cuda_copy(0, &count, &p, 4, NULL), QUERN_ERR_DEVICE);
    assert_int_equal(count, 7);
    assert_ptr_equal(p, &count);
}

static void a_library_that_is_no_backend_is_refused(void **unused)
{
    (void)unused;
    setenv("QUERN_CUDA_LIBRARY", "libm.so.6", 1);
    assert_int_equal(quern_cuda_check(0), QUERN_ERR_DEVICE);
    assert_non_null(strstr(quern_last_error(NULL), "another build"));
}

/* The version and every function are there, but a field of a stage's arguments has another offset. */
static void a_backend_of_another_build_is_refused(void **unused)
{
    (void)unused;
    setenv("QUERN_CUDA_LIBRARY", QUERN_PLUGIN_STALE, 1);
    assert_int_equal(quern_cuda_check(0), QUERN_ERR_DEVICE);
    assert_non_null(strstr(quern_last_error(NULL), "another build"));
}

/* This test runs last, because a backend that was loaded stays loaded. The device's struct may be an older or
 * a newer caller's. */
static void a_backend_of_this_build_is_taken(void **unused)
{
    (void)unused;
    const quern_cuda_device none = QUERN_CUDA_DEVICE_INIT;
    struct {
        quern_cuda_device known;
        int64_t newer;
    } info = {none, 0};
    setenv("QUERN_CUDA_LIBRARY", QUERN_PLUGIN_CURRENT, 1);
    assert_int_equal(quern_cuda_check(0), QUERN_OK);
    info.known.size = sizeof info;
    assert_int_equal(quern_cuda_device_get(0, &info.known), QUERN_OK);
    assert_int_equal(info.known.size, sizeof info);
    assert_int_equal(info.known.l2_bytes, 7);
    info.newer = 1;
    assert_int_equal(quern_cuda_device_get(0, &info.known), QUERN_ERR_INVALID_ARGUMENT);
    info.known = none;
    info.known.size = offsetof(quern_cuda_device, l2_bytes);
    assert_int_equal(quern_cuda_device_get(0, &info.known), QUERN_OK);
    assert_int_equal(info.known.compute_major, 9);
    assert_int_equal(info.known.l2_bytes, 0);
}

static void arguments_are_checked_before_the_backend(void **unused)
{
    (void)unused;
    quern_cuda_device info = QUERN_CUDA_DEVICE_INIT;
    int32_t x = 0;
    setenv("QUERN_CUDA_LIBRARY", "/nowhere", 1);
    info.size = 3;
    assert_int_equal(quern_cuda_device_get(0, &info), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_device_get(0, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_device_count(NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_allocate(0, 1, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_copy(0, &x, NULL, 4, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_copy(0, NULL, &x, 4, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_event_elapsed(0, NULL, &x, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_cuda_free(0, NULL), QUERN_OK);
    assert_int_equal(quern_cuda_copy(0, NULL, NULL, 0, NULL), QUERN_OK);
}

static void a_call_on_the_gpu_fails_and_leaves_its_output(void **unused)
{
    (void)unused;
    float q[8] = {0}, o[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    const int64_t shape[] = {1, 1, 1, 8};
    quern_tensor in = quern_tensor_contiguous(q, QUERN_F32, 4, shape),
                 out = quern_tensor_contiguous(o, QUERN_F32, 4, shape);
    in.device = out.device = QUERN_CUDA;
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = t.k = t.v = &in;
    t.o = &out;
    quern_context *ctx;
    size_t bytes = 5;
    setenv("QUERN_CUDA_LIBRARY", "/nowhere", 1);
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    assert_int_equal(quern_attention_forward_workspace(ctx, &params, &t, &bytes), QUERN_ERR_DEVICE);
    assert_int_equal(quern_attention_forward(ctx, NULL, &params, &t, NULL, 0), QUERN_ERR_DEVICE);
    assert_int_equal(bytes, 5);
    for (int i = 0; i < 8; i++) assert_true(o[i] == 7);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_missing_backend_is_an_error_that_names_it),
        cmocka_unit_test(a_library_that_is_no_backend_is_refused),
        cmocka_unit_test(a_backend_of_another_build_is_refused),
        cmocka_unit_test(arguments_are_checked_before_the_backend),
        cmocka_unit_test(a_call_on_the_gpu_fails_and_leaves_its_output),
        cmocka_unit_test(a_backend_of_this_build_is_taken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
