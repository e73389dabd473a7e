/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * tight_test.c - attention whose tensors fill their allocations to the last byte, with windows that begin
 * past the last key: a load past an end, masked or not, is what compute-sanitizer's memcheck finds here.
 */
#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>

enum { QUERIES = 256, KEYS = 100, H = 2, D = 64, WINDOW = 10 };

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

/* `gap` elements more between heads; small random bf16 values, or poison. */
static quern_tensor make(quern_dtype dtype, int64_t n, int64_t gap, bool random)
{
    static uint32_t seed = 1;
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, 4, (int64_t[]){1, n, H, D});
    t.strides[2] = D + gap;
    t.strides[1] = H * t.strides[2];
    t.strides[0] = n * t.strides[1];
    const size_t bytes = (size_t)(t.strides[0] - gap) * quern_dtype_size(dtype);
    uint16_t *values = malloc(bytes);
    assert_non_null(values);
    memset(values, 0xfe, bytes);
    for (size_t i = 0; random && i < bytes / 2; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (uint16_t)(0x3e00 + (seed >> 31 << 15) + (seed >> 16 & 0x1ff)); /* 1/8 <= |x| < 2 */
    }
    t.device = QUERN_CUDA;
    OK(quern_cuda_allocate(0, bytes, &t.data));
    OK(quern_cuda_copy(0, t.data, values, bytes, NULL));
    OK(quern_cuda_synchronize(0, NULL));
    free(values);
    return t;
}

/* Rows from `first` on see no key: output 0, LSE -inf, gradient 0. */
static void check_unseen(const quern_tensor *t, int64_t first, bool lse)
{
    const size_t size = quern_dtype_size(t->dtype),
                 count = lse ? H * QUERIES : (size_t)(t->strides[1] * QUERIES - (t->strides[2] - D));
    char *values = malloc(count * size);
    assert_non_null(values);
    OK(quern_cuda_copy(0, values, t->data, count * size, NULL));
    OK(quern_cuda_synchronize(0, NULL));
    for (int64_t h = 0; h < H; h++)
        for (int64_t n = first; n < QUERIES; n++) {
            if (lse) {
                assert_true(((float *)(void *)values)[h * QUERIES + n] == -INFINITY);
                continue;
            }
            for (int64_t d = 0; d < D; d++)
                assert_int_equal(
                    ((uint16_t *)(void *)values)[n * t->strides[1] + h * t->strides[2] + d] & 0x7fff, 0);
        }
    free(values);
}

static void check(int64_t offset, int64_t gap)
{
    quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    params.window = WINDOW;
    params.query_offset = offset;
    quern_context *ctx;
    OK(quern_context_create(NULL, &ctx));
    quern_tensor q = make(QUERN_BF16, QUERIES, 0, true), k = make(QUERN_BF16, KEYS, 0, true),
                 v = make(QUERN_BF16, KEYS, 0, true);
    quern_tensor d_o = make(QUERN_BF16, QUERIES, gap, true), o = make(QUERN_BF16, QUERIES, gap, false),
                 d_q = make(QUERN_BF16, QUERIES, 0, false);
    quern_tensor d_k = make(QUERN_BF16, KEYS, 0, false), d_v = make(QUERN_BF16, KEYS, 0, false);
    quern_tensor lse = quern_tensor_contiguous(NULL, QUERN_F32, 3, (int64_t[]){1, H, QUERIES});
    lse.device = QUERN_CUDA;
    OK(quern_cuda_allocate(0, H * QUERIES * sizeof(float), &lse.data));
    quern_attention_tensors t = QUERN_ATTENTION_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.o = &o;
    t.lse = &lse;
    size_t bytes;
    void *workspace = NULL;
    OK(quern_attention_forward_workspace(ctx, &params, &t, &bytes));
    OK(quern_cuda_allocate(0, bytes, &workspace));
    OK(quern_attention_forward(ctx, NULL, &params, &t, workspace, bytes));
    OK(quern_cuda_free(0, workspace));
    t.d_o = &d_o;
    t.d_q = &d_q;
    t.d_k = &d_k;
    t.d_v = &d_v;
    OK(quern_attention_backward_workspace(ctx, &params, &t, &bytes));
    OK(quern_cuda_allocate(0, bytes, &workspace));
    OK(quern_attention_backward(ctx, NULL, &params, &t, workspace, bytes));
    OK(quern_cuda_free(0, workspace));
    const int64_t past = KEYS + WINDOW - 1 - offset, first = past > 0 ? past : 0;
    check_unseen(&o, first, false);
    check_unseen(&lse, first, true);
    check_unseen(&d_q, first, false);
    const quern_tensor *const all[] = {&q, &k, &v, &d_o, &o, &d_q, &d_k, &d_v, &lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) OK(quern_cuda_free(0, all[i]->data));
    quern_context_destroy(ctx);
}

/* A gap of 4 elements leaves 16-byte alignment, and with it the kernels that need it. */
static void windows_past_the_last_key_read_nothing(void **state)
{
    (void)state;
    static const int64_t offsets[] = {0, 40, 90, 1000};
    for (int i = 0; i < 4; i++) {
        check(offsets[i], 0);
        check(offsets[i], 4);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(windows_past_the_last_key_read_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
