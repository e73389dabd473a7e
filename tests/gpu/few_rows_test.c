/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * few_rows_test.c - Hopper's product of few rows against sums in float64, and against the same rows among
 * many, which cuBLASLt multiplies: the same bits, as a row of c does not depend on how many there are. Rows
 * that the caller names become 0, and no other changes.
 */
#include "one_stage.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SECONDS = 60 /* a kernel that never ends, ends with the program */, MANY = 4096 };

typedef struct product_case {
    int64_t n, k;
    quern_dtype dtype, c_dtype;
} product_case;

static uint32_t seed = 7;

static float value_of(quern_dtype dtype, uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    if (dtype == QUERN_F16)
        bits = (uint32_t)(x & 0x8000) << 16 | ((uint32_t)(x & 0x7fff) + (112 << 10)) << 13;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Values of 1/8 <= |x| < 2, which both dtypes hold as normal numbers. */
static uint16_t *drawn(quern_dtype dtype, int64_t count)
{
    const uint32_t shift = dtype == QUERN_F16 ? 10 : 7, exponent = dtype == QUERN_F16 ? 12 : 124;
    uint16_t *x = malloc((size_t)count * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (uint16_t)((exponent + (seed >> 28 & 3)) << shift | (seed >> 8 & ((1u << shift) - 1)) |
                          seed >> 31 << 15);
    }
    return x;
}

static quern_tensor on_device(quern_dtype dtype, int64_t rows, int64_t columns, const void *values)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, 2, (int64_t[]){rows, columns});
    const size_t bytes = (size_t)(rows * columns) * quern_dtype_size(dtype);
    t.device = QUERN_CUDA;
    CHECK(cudaMalloc(&t.data, bytes));
    if (values != NULL) CHECK(cudaMemcpy(t.data, values, bytes, cudaMemcpyHostToDevice));
    return t;
}

/* The first `rows` rows of c by the variant, from the first ones of a. */
static void *product_by(const char *name, gemm_args a, int64_t rows)
{
    char why[STAGE_WHY_BYTES] = "", kernel[STAGE_NAME_BYTES] = "";
    stage_exec exec = exec_here;
    void *workspace;
    a.a.shape[0] = a.c.shape[0] = rows;
    const size_t bytes = (size_t)(rows * a.c.strides[0]) * quern_dtype_size(a.c.dtype);
    exec.variant = name;
    if (!cuda->gemm.supports(&exec, &a, why)) return NULL;
    cuda->gemm.kernel(&exec, &a, kernel);
    assert_string_equal(kernel, name);
    CHECK(cudaMemset(a.c.data, 0xff, bytes));
    CHECK(cudaMalloc(&workspace, cuda->gemm.workspace(&exec, &a) + 1));
    if (cuda->gemm.run(&exec, &a, workspace) != QUERN_OK) fail_msg("%s: %s", name, quern_last_error(NULL));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(workspace));
    void *c = malloc(bytes);
    assert_non_null(c);
    CHECK(cudaMemcpy(c, a.c.data, bytes, cudaMemcpyDeviceToHost));
    return c;
}

static float element_of(const gemm_args *a, const void *c, int64_t i)
{
    return a->c.dtype == QUERN_F32 ? ((const float *)c)[i] : value_of(a->c.dtype, ((const uint16_t *)c)[i]);
}

/* Some elements of c beside sums in float64. */
static void check_sums(const gemm_args *a, const uint16_t *x, const uint16_t *w, const void *c, int64_t rows)
{
    const int64_t k = a->a.shape[1], n = a->c.shape[1];
    for (int64_t i = 0; i < rows * n; i += 1 + (int64_t)(seed >> 16) % 997) {
        double sum = 0, size = 0;
        for (int64_t j = 0; j < k; j++) {
            const double p = (double)value_of(a->a.dtype, x[i / n * k + j]) *
                             (double)value_of(a->a.dtype, w[i % n * k + j]);
            sum += p, size += fabs(p);
        }
        const double got = (double)element_of(a, c, i), off = fabs(got - sum),
                     bound = size * 1e-6 + (a->c.dtype == QUERN_F32 ? 0 : fabs(sum) / 128);
        if (!(off <= bound)) fail_msg("c[%lld] is %g, not %g", (long long)i, got, sum);
        seed = seed * 1664525u + 1013904223u;
    }
}

/* The same product where every third row is to be 0. */
static void check_cleared(gemm_args a, const void *c, int64_t rows)
{
    const size_t bytes = (size_t)a.c.shape[1] * quern_dtype_size(a.c.dtype);
    const uint8_t *zeros = calloc(1, bytes);
    int64_t *live = malloc((size_t)rows * sizeof *live);
    assert_true(zeros != NULL && live != NULL);
    for (int64_t i = 0; i < rows; i++) live[i] = i % 3 == 1 ? -1 : i;
    a.live = quern_tensor_contiguous(NULL, QUERN_I64, 1, &rows);
    CHECK(cudaMalloc(&a.live.data, (size_t)rows * sizeof *live));
    CHECK(cudaMemcpy(a.live.data, live, (size_t)rows * sizeof *live, cudaMemcpyHostToDevice));
    uint8_t *got = product_by("gemm_sm90_few", a, rows);
    assert_non_null(got);
    for (int64_t i = 0; i < rows; i++)
        assert_memory_equal(got + (size_t)i * bytes,
                            live[i] < 0 ? zeros : (const uint8_t *)c + (size_t)i * bytes, bytes);
    CHECK(cudaFree(a.live.data));
    free(got), free(live), free((void *)(uintptr_t)zeros);
}

static void agree(const product_case *h)
{
    static const int64_t rows[] = {1, 7, 64, 65, 128};
    uint16_t *x = drawn(h->dtype, MANY * h->k), *w = drawn(h->dtype, h->n * h->k);
    gemm_args a = {.b_transposed = true};
    a.a = on_device(h->dtype, MANY, h->k, x);
    a.b = on_device(h->dtype, h->n, h->k, w);
    a.c = on_device(h->c_dtype, MANY, h->n, NULL);
    void *many = product_by("gemm_cublaslt", a, MANY);
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        const size_t bytes = (size_t)(rows[r] * h->n) * quern_dtype_size(h->c_dtype);
        void *few = product_by("gemm_sm90_few", a, rows[r]), *again = product_by("gemm_sm90_few", a, rows[r]);
        if (few == NULL) continue; /* no Hopper */
        check_sums(&a, x, w, few, rows[r]);
        assert_memory_equal(few, again, bytes);
        check_cleared(a, few, rows[r]);
        int64_t differ = 0;
        for (int64_t i = 0; many != NULL && i < rows[r] * h->n; i++)
            differ += memcmp((char *)few + (size_t)i * quern_dtype_size(h->c_dtype),
                             (char *)many + (size_t)i * quern_dtype_size(h->c_dtype),
                             quern_dtype_size(h->c_dtype)) != 0;
        if (differ > 0)
            fail_msg("%lld x %lld, %lld rows: %lld elements differ from cuBLASLt's", (long long)h->n,
                     (long long)h->k, (long long)rows[r], (long long)differ);
        free(few), free(again);
    }
    free(many), free(x), free(w);
    CHECK(cudaFree(a.a.data));
    CHECK(cudaFree(a.b.data));
    CHECK(cudaFree(a.c.data));
}

static void few_rows_agree_with_many(void **state)
{
    static const product_case cases[] = {
        {1024, 4096, QUERN_BF16, QUERN_F32}, {512, 4096, QUERN_BF16, QUERN_F32},
        {128, 4096, QUERN_BF16, QUERN_F32},  {64, 4096, QUERN_BF16, QUERN_F32},
        {8192, 1024, QUERN_BF16, QUERN_F32}, {1024, 4096, QUERN_BF16, QUERN_BF16},
        {4096, 8192, QUERN_BF16, QUERN_BF16}, {136, 72, QUERN_BF16, QUERN_F32},
        {24, 16, QUERN_F16, QUERN_F16},      {512, 4096, QUERN_F16, QUERN_F32}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) agree(&cases[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(few_rows_agree_with_many)};
    (void)alarm(SECONDS);
    return cmocka_run_group_tests(tests, open_backend, NULL);
}
