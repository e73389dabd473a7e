/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * projections_test.c - the variants of products with e4m3 weights on Hopper: each is forced in turn on the
 * same tensors. All give the same bits, whatever number of rows each is for; the one of few rows, which is
 * the first, is checked against float64 by the other tests.
 */
#include "one_stage.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SECONDS = 30 }; /* a kernel that never ends, ends with the program */

typedef struct product_case {
    int64_t rows, n, k, groups;
    quern_dtype dtype, scale_dtype;
    bool one, bias, round;
    bool spread; /* a has zeros, and numbers far from each other in some runs of 128 */
} product_case;

static quern_tensor on_device(const test_tensor *t)
{
    quern_tensor there = t->view;
    const size_t bytes = (size_t)test_tensor_count(t) * quern_dtype_size(there.dtype);
    there.device = QUERN_CUDA;
    CHECK(cudaMalloc(&there.data, bytes));
    CHECK(cudaMemcpy(there.data, t->view.data, bytes, cudaMemcpyHostToDevice));
    return there;
}

/* Normal numbers, or bytes of e4m3 without NaN and of powers of two. */
static quern_tensor drawn(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns,
                          int64_t least, int64_t most)
{
    test_tensor t = test_tensor_make(random, dtype, 2, (int64_t[]){rows, columns}, TEST_CONTIGUOUS);
    if (dtype != QUERN_U8) test_tensor_normal(&t, random, 1);
    for (int64_t i = 0; dtype == QUERN_U8 && i < rows * columns; i++) {
        const int64_t byte = test_random_int(random, least, most);
        ((uint8_t *)t.view.data)[i] = (uint8_t)(least == 0 && byte % 128 == 127 ? 1 : byte);
    }
    const quern_tensor there = on_device(&t);
    test_tensor_free(&t);
    return there;
}

/* In every third run of 128 numbers down to 2^-44, in every third one large; zeros in all. */
static void spread(test_random *random, quern_tensor *a)
{
    const int64_t count = a->shape[0] * a->shape[1];
    uint16_t *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    CHECK(cudaMemcpy(x, a->data, (size_t)count * sizeof *x, cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) {
        const int64_t kind = i / 128 % 3, odds = test_random_int(random, 0, 15);
        if (odds == 0) x[i] = 0;
        else if (odds < 3 && kind > 0) x[i] = (uint16_t)(x[i] + (kind == 1 ? -(40 << 7) : 20 << 7));
    }
    CHECK(cudaMemcpy(a->data, x, (size_t)count * sizeof *x, cudaMemcpyHostToDevice));
    free(x);
}

/* c by the variant; NULL where it does not take the call. */
static uint16_t *product_by(const char *name, const e4m3_gemm_args *a)
{
    const size_t bytes = (size_t)(a->c.shape[0] * a->c.shape[1]) * sizeof(uint16_t);
    char why[STAGE_WHY_BYTES] = "", kernel[STAGE_NAME_BYTES] = "";
    stage_exec exec = exec_here;
    void *workspace;
    exec.variant = name;
    if (!cuda->e4m3_gemm.supports(&exec, a, why)) return NULL;
    cuda->e4m3_gemm.kernel(&exec, a, kernel);
    assert_string_equal(kernel, name);
    CHECK(cudaMemset(a->c.data, 0xff, bytes));
    CHECK(cudaMalloc(&workspace, cuda->e4m3_gemm.workspace(&exec, a) + 1));
    if (cuda->e4m3_gemm.run(&exec, a, workspace) != QUERN_OK)
        fail_msg("%s: %s", name, quern_last_error(NULL));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(workspace));
    uint16_t *c = malloc(bytes);
    assert_non_null(c);
    CHECK(cudaMemcpy(c, a->c.data, bytes, cudaMemcpyDeviceToHost));
    return c;
}

static void agree(test_random *random, const product_case *h)
{
    static const char *const names[] = {"e4m3_gemm_sm90", "e4m3_gemm_sm90_few", "e4m3_gemm_sm90_short",
                                        "e4m3_gemm_sm90_fp8", "e4m3_gemm_sm90_large", "e4m3_gemm_sm90_row"};
    const int64_t down = h->one ? 1 : (h->groups * h->n + 127) / 128,
                  across = h->one ? 1 : (h->k + 127) / 128;
    e4m3_gemm_args a = {.round = h->round, .groups = h->groups, .block_rows = 128, .block_columns = 128};
    if (h->one) a.block_rows = h->n, a.block_columns = h->k;
    a.a = drawn(random, h->dtype, h->rows, h->groups * h->k, 0, 0);
    if (h->spread) spread(random, &a.a);
    a.codes = drawn(random, QUERN_U8, h->groups * h->n, h->k, 0, 255);
    a.scales = drawn(random, h->scale_dtype, down, across, 119, 123);
    if (h->bias) {
        a.bias = drawn(random, QUERN_F32, 1, h->groups * h->n, 0, 0);
        a.bias.ndim = 1;
        a.bias.shape[0] = h->groups * h->n;
        a.bias.strides[0] = 1;
    }
    a.c = drawn(random, h->dtype, h->rows, h->groups * h->n, 0, 0);
    uint16_t *first = NULL;
    int taken = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        uint16_t *c = product_by(names[i], &a);
        for (int64_t j = 0; first != NULL && c != NULL && j < h->rows * h->groups * h->n; j++)
            if (c[j] != first[j])
                fail_msg("%s, %lld x %lld x %lld: c[%lld] is %04x, expected %04x", names[i],
                         (long long)h->rows, (long long)h->n, (long long)h->k, (long long)j, c[j], first[j]);
        taken += c != NULL;
        if (first == NULL) first = c;
        else free(c);
    }
    assert_true(exec_here.compute != 90 || taken >= 2);
    free(first);
    quern_tensor *const all[] = {&a.a, &a.codes, &a.scales, &a.bias, &a.c};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->data != NULL) CHECK(cudaFree(all[i]->data));
}

static void variants_agree(void **state)
{
    static const product_case cases[] = {
        {1, 256, 512, 1, QUERN_BF16, QUERN_U8, false, false, false, false},
        {1, 1000, 4112, 1, QUERN_F16, QUERN_F32, false, true, false, false},
        {1, 40, 256, 3, QUERN_BF16, QUERN_F32, false, true, false, false},
        {1, 64, 8192, 1, QUERN_BF16, QUERN_F32, true, false, false, false},
        {1, 20008, 384, 1, QUERN_BF16, QUERN_F32, false, true, false, false}, /* three panels of W a block */
        {1, 200, 4112, 1, QUERN_BF16, QUERN_U8, false, false, false, true},
        {1, 1024, 4096, 1, QUERN_BF16, QUERN_F32, false, true, false, true},
        {2, 512, 4096, 1, QUERN_BF16, QUERN_U8, false, false, false, false},  /* in shares */
        {7, 200, 4096, 3, QUERN_F16, QUERN_F32, true, true, false, false},
        {16, 1000, 640, 1, QUERN_F16, QUERN_F32, false, true, false, false},
        {33, 40, 512, 3, QUERN_BF16, QUERN_F32, false, true, false, false},
        {50, 33000, 256, 1, QUERN_BF16, QUERN_U8, false, true, false, false}, /* several tiles a block */
        {64, 1024, 1152, 8, QUERN_BF16, QUERN_U8, false, false, false, false},
        {64, 1032, 4096, 1, QUERN_F16, QUERN_F32, false, true, false, false},
        {64, 4096, 1920, 1, QUERN_BF16, QUERN_U8, false, false, false, false},
        {128, 1000, 4112, 1, QUERN_BF16, QUERN_F32, false, true, false, false},
        {300, 256, 512, 1, QUERN_BF16, QUERN_U8, false, false, false, false},
        {300, 256, 512, 1, QUERN_BF16, QUERN_U8, false, false, true, false},
        {129, 264, 4112, 1, QUERN_F16, QUERN_F32, false, true, false, false},
        {129, 264, 4112, 1, QUERN_F16, QUERN_F32, false, true, true, false},
        {700, 128, 256, 3, QUERN_BF16, QUERN_F32, false, true, false, false},
        {700, 128, 272, 3, QUERN_BF16, QUERN_F32, false, true, true, false},
        {17, 6000, 4096, 1, QUERN_BF16, QUERN_F32, true, false, false, false}, /* in two passes */
        {5000, 520, 144, 1, QUERN_BF16, QUERN_U8, false, false, false, false},
        {5000, 520, 144, 1, QUERN_F16, QUERN_U8, false, false, true, false}};
    test_random random = {test_seed("projections", 6)};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) agree(&random, &cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(variants_agree)};
    (void)alarm(SECONDS);
    return cmocka_run_group_tests(tests, open_backend, NULL);
}
