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

static size_t bytes_of(const quern_tensor *t)
{
    return (size_t)(t->shape[0] * t->shape[1]) * quern_dtype_size(t->dtype);
}

/* c by the variant; NULL where it does not take the call. */
static uint16_t *product_by(const char *name, const e4m3_gemm_args *a)
{
    const size_t bytes = bytes_of(&a->c);
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
        {1, 160008, 128, 1, QUERN_BF16, QUERN_F32, false, true, false, false}, /* nineteen */
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

/* ---- late copies ---- */

/* What the device copies all the time, beside the products. */
enum { TRAFFIC = 128 << 20, COPIES = 4 };
typedef struct traffic {
    cudaStream_t stream;
    void *from, *to;
} traffic;

static traffic traffic_make(void)
{
    traffic t;
    CHECK(cudaStreamCreateWithFlags(&t.stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&t.from, TRAFFIC));
    CHECK(cudaMalloc(&t.to, TRAFFIC));
    return t;
}

static void start_traffic(const traffic *t)
{
    for (int i = 0; i < COPIES; i++)
        CHECK(cudaMemcpyAsync(t->to, t->from, TRAFFIC, cudaMemcpyDeviceToDevice, t->stream));
}

static void traffic_free(traffic *t)
{
    CHECK(cudaStreamDestroy(t->stream));
    CHECK(cudaFree(t->from));
    CHECK(cudaFree(t->to));
}

/* The tensor's rows in the host's memory, where the device reads them: its copies come late, and in another
 * order than it asked for them. */
static void *on_host(const quern_tensor *t)
{
    void *there;
    CHECK(cudaHostAlloc(&there, bytes_of(t), cudaHostAllocMapped));
    CHECK(cudaMemcpy(there, t->data, bytes_of(t), cudaMemcpyDeviceToHost));
    return there;
}

/* The product of few rows, again and again beside the traffic, has the bits of `expected`. */
static void repeat_late(const e4m3_gemm_args *a, const uint16_t *expected, const traffic *beside,
                        const char *where)
{
    stage_exec exec = exec_here;
    void *workspace;
    uint16_t *c = malloc(bytes_of(&a->c));
    assert_non_null(c);
    exec.variant = "e4m3_gemm_sm90_few";
    CHECK(cudaMalloc(&workspace, cuda->e4m3_gemm.workspace(&exec, a) + 1));
    for (int trial = 0; trial < test_trials(64); trial++) {
        CHECK(cudaMemset(a->c.data, 0xff, bytes_of(&a->c)));
        CHECK(cudaDeviceSynchronize());
        start_traffic(beside);
        if (cuda->e4m3_gemm.run(&exec, a, workspace) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(c, a->c.data, bytes_of(&a->c), cudaMemcpyDeviceToHost));
        if (memcmp(c, expected, bytes_of(&a->c)) != 0)
            fail_msg("%lld x %lld x %lld, %s late: other bits in trial %d", (long long)a->a.shape[0],
                     (long long)a->c.shape[1], (long long)a->a.shape[1], where, trial);
    }
    CHECK(cudaFree(workspace));
    free(c);
}

/* Tiles of 16 tokens (in shares, and whole), of 32 and of 64, whose rings have 6 stages of a, 10 of W and 5
 * of a: no multiple of the four warpgroups that take them in turn. */
static void late_copies_change_no_bit(void **state)
{
    static const int64_t sizes[][2] = {{16, 4096}, {16, 8192}, {32, 8192}, {64, 8192}};
    test_random random = {test_seed("projections", 7)};
    traffic beside = traffic_make();
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const int64_t rows = sizes[i][0], n = sizes[i][1], k = 4096;
        e4m3_gemm_args a = {.groups = 1, .block_rows = 128, .block_columns = 128};
        a.a = drawn(&random, QUERN_BF16, rows, k, 0, 0);
        a.codes = drawn(&random, QUERN_U8, n, k, 0, 255);
        a.scales = drawn(&random, QUERN_U8, n / 128, k / 128, 119, 123);
        a.c = drawn(&random, QUERN_BF16, rows, n, 0, 0);
        uint16_t *expected = product_by("e4m3_gemm_sm90", &a), *few = product_by("e4m3_gemm_sm90_few", &a);
        void *const there[] = {a.a.data, a.codes.data}, *const late[] = {on_host(&a.a), on_host(&a.codes)};
        static const char *const names[] = {"neither", "rows", "codes", "both"};
        for (int which = 0; few != NULL && which < 4; which++) {
            a.a.data = which & 1 ? late[0] : there[0];
            a.codes.data = which & 2 ? late[1] : there[1];
            repeat_late(&a, expected, &beside, names[which]);
        }
        void *const all[] = {there[0], there[1], a.scales.data, a.c.data};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) CHECK(cudaFree(all[j]));
        for (int j = 0; j < 2; j++) CHECK(cudaFreeHost(late[j]));
        free(expected);
        free(few);
    }
    traffic_free(&beside);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(variants_agree),
                                       cmocka_unit_test(late_copies_change_no_bit)};
    (void)alarm(SECONDS);
    return cmocka_run_group_tests(tests, open_backend, NULL);
}
