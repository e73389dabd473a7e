/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tensor.c - guarded tensors, and f16 and bf16 by rounding in double. */
#include "tensor.h"

#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, SENTINEL = 0x5a };

static void *allocate(size_t bytes)
{
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (p == NULL) fail_msg("the test is out of memory: %zu bytes", bytes);
    return p;
}

double *test_doubles(int64_t count)
{
    double *p = allocate(sizeof *p * (size_t)(count + 1));
    memset(p, 0, sizeof *p * (size_t)(count + 1));
    return p;
}

static size_t element_size(quern_dtype dtype)
{
    return dtype == QUERN_F16 || dtype == QUERN_BF16 ? 2 : dtype == QUERN_U8 ? 1 : dtype == QUERN_I64 ? 8 : 4;
}

int64_t test_tensor_count(const test_tensor *t)
{
    int64_t count = 1;
    for (int32_t i = 0; i < t->view.ndim; i++) count *= t->view.shape[i];
    return count;
}

const char *test_layout_name(test_layout layout)
{
    static const char *const names[TEST_LAYOUTS] = {"contiguous", "unaligned", "strided", "spaced"};
    return names[layout];
}

test_tensor test_tensor_make(test_random *random, quern_dtype dtype, int32_t ndim, const int64_t *shape,
                             test_layout layout)
{
    test_tensor t = {quern_tensor_contiguous(NULL, dtype, ndim, shape), NULL, NULL, 0};
    const size_t size = element_size(dtype);
    int64_t extent = 1;
    int32_t order[QUERN_MAX_DIMS];
    for (int32_t i = 0; i < ndim; i++) order[i] = i;
    const bool gaps = layout == TEST_STRIDED || layout == TEST_SPACED;
    const int64_t unit = layout == TEST_SPACED ? 16 / (int64_t)size : 1;
    if (gaps) {
        for (int32_t i = ndim - 2; i > 0; i--) { /* shuffle all but the last */
            const int32_t j = (int32_t)test_random_int(random, 0, i), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
    }
    for (int32_t i = ndim - 1; i >= 0; i--) {
        const int32_t dim = order[i];
        t.view.strides[dim] = extent;
        extent *= shape[dim] > 0 ? shape[dim] : 1;
        if (gaps) extent = (extent + unit - 1) / unit * unit + unit * test_random_int(random, 0, 5);
    }
    const size_t offset = GUARD + (layout == TEST_CONTIGUOUS || layout == TEST_SPACED
                                       ? 0
                                       : size * (size_t)test_random_int(random, 1, 7));
    t.bytes = offset + (size_t)extent * size + GUARD;
    t.buffer = allocate(t.bytes);
    t.snapshot = allocate(t.bytes);
    t.view.data = t.buffer + offset;
    test_tensor_reset(&t);
    return t;
}

test_tensor test_tensor_copy(const test_tensor *t)
{
    test_tensor copy = *t;
    copy.snapshot = NULL;
    copy.buffer = allocate(t->bytes);
    memcpy(copy.buffer, t->buffer, t->bytes);
    copy.view.data = copy.buffer + ((unsigned char *)t->view.data - t->buffer);
    return copy;
}

void test_tensor_free(test_tensor *t)
{
    free(t->buffer);
    free(t->snapshot);
    memset(t, 0, sizeof *t);
}

void test_tensor_reset(test_tensor *t)
{
    memset(t->buffer, SENTINEL, t->bytes);
    memset(t->snapshot, SENTINEL, t->bytes);
}

/* Address of element number `index` in row-major order. */
static unsigned char *element(const test_tensor *t, int64_t index)
{
    int64_t offset = 0;
    for (int32_t i = t->view.ndim - 1; i >= 0; i--) {
        offset += index % t->view.shape[i] * t->view.strides[i];
        index /= t->view.shape[i];
    }
    return (unsigned char *)t->view.data + offset * (int64_t)element_size(t->view.dtype);
}

/* The nearest multiple of 2^(exponent - digits), ties to even; `least` is the exponent of subnormals. */
static double round_binary(double x, int digits, int least, double largest)
{
    int exponent;
    if (!isfinite(x) || x == 0) return x;
    frexp(x, &exponent);
    if (exponent < least) exponent = least;
    const double rounded = ldexp(nearbyint(ldexp(x, digits - exponent)), exponent - digits);
    return fabs(rounded) > largest ? copysign(INFINITY, x) : rounded;
}

double test_round(quern_dtype dtype, double x)
{
    if (dtype == QUERN_F16) return round_binary(x, 11, -13, 65504);
    if (dtype == QUERN_BF16) return round_binary(x, 8, -125, 0x1.fep127);
    return (float)x;
}

static uint16_t half_bits(quern_dtype dtype, double x)
{
    if (dtype == QUERN_BF16) {
        const float f = (float)test_round(dtype, x);
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        return (uint16_t)(isnan(x) ? 0x7fc0 : bits >> 16);
    }
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs(test_round(dtype, x));
    int exponent;
    if (isnan(x)) return 0x7e00;
    if (isinf(a)) return sign | 0x7c00;
    frexp(a, &exponent);
    if (a == 0 || exponent < -13) return (uint16_t)(sign | (int)ldexp(a, 24));
    return (uint16_t)(sign | (exponent + 14) << 10 | ((int)ldexp(a, 11 - exponent) & 0x3ff));
}

static double half_value(quern_dtype dtype, uint16_t bits)
{
    if (dtype == QUERN_BF16) {
        const uint32_t wide = (uint32_t)bits << 16;
        float f;
        memcpy(&f, &wide, sizeof f);
        return f;
    }
    const int exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    double a = exponent == 0 ? ldexp(mantissa, -24) : ldexp(mantissa + 0x400, exponent - 25);
    if (exponent == 31) a = mantissa != 0 ? NAN : INFINITY;
    return bits & 0x8000 ? -a : a;
}

void test_tensor_set(test_tensor *t, const double *values)
{
    const int64_t count = test_tensor_count(t);
    for (int64_t i = 0; i < count; i++) {
        if (t->view.dtype == QUERN_F32) {
            const float f = (float)values[i];
            memcpy(element(t, i), &f, sizeof f);
        } else if (t->view.dtype == QUERN_U8) {
            *(unsigned char *)element(t, i) = (unsigned char)values[i];
        } else {
            const uint16_t h = half_bits(t->view.dtype, values[i]);
            memcpy(element(t, i), &h, sizeof h);
        }
    }
    if (t->bytes > 0) memcpy(t->snapshot, t->buffer, t->bytes);
}

void test_tensor_set_i32(test_tensor *t, const int32_t *values)
{
    const int64_t count = test_tensor_count(t);
    for (int64_t i = 0; i < count; i++) memcpy(element(t, i), &values[i], sizeof *values);
    memcpy(t->snapshot, t->buffer, t->bytes);
}

void test_tensor_normal(test_tensor *t, test_random *random, double sigma)
{
    const int64_t count = test_tensor_count(t);
    double *values = test_doubles(count);
    for (int64_t i = 0; i < count; i++) values[i] = sigma * test_random_normal(random);
    test_tensor_set(t, values);
    free(values);
}

double *test_tensor_get(const test_tensor *t)
{
    const int64_t count = test_tensor_count(t);
    double *values = test_doubles(count);
    for (int64_t i = 0; i < count; i++) {
        if (t->view.dtype == QUERN_F32) {
            float f;
            memcpy(&f, element(t, i), sizeof f);
            values[i] = f;
        } else if (t->view.dtype == QUERN_U8) {
            values[i] = *(const unsigned char *)element(t, i);
        } else {
            uint16_t h;
            memcpy(&h, element(t, i), sizeof h);
            values[i] = half_value(t->view.dtype, h);
        }
    }
    return values;
}

int32_t *test_tensor_get_i32(const test_tensor *t)
{
    const int64_t count = test_tensor_count(t);
    int32_t *values = allocate(sizeof *values * (size_t)(count + 1));
    for (int64_t i = 0; i < count; i++) memcpy(&values[i], element(t, i), sizeof *values);
    return values;
}

void test_tensor_check_guards(const test_tensor *t, const char *name)
{
    if (t->buffer == NULL) return;
    const int64_t count = test_tensor_count(t);
    const size_t size = element_size(t->view.dtype);
    unsigned char *expected = allocate(t->bytes);
    memcpy(expected, t->snapshot, t->bytes);
    for (int64_t i = 0; i < count; i++) {
        const unsigned char *p = element(t, i);
        memcpy(expected + (p - t->buffer), p, size);
    }
    for (size_t i = 0; i < t->bytes; i++) {
        if (expected[i] != t->buffer[i])
            fail_msg("%s: byte %td from the start of its data lies outside its elements and was written",
                     name, t->buffer + i - (unsigned char *)t->view.data);
    }
    free(expected);
}

void test_tensor_check_unchanged(const test_tensor *t, const char *name)
{
    for (size_t i = 0; i < t->bytes; i++) {
        if (t->snapshot[i] != t->buffer[i])
            fail_msg("%s: byte %td from the start of its data was written", name,
                     t->buffer + i - (unsigned char *)t->view.data);
    }
}

bool test_tensor_same_bits(const test_tensor *a, const test_tensor *b)
{
    const int64_t count = test_tensor_count(a);
    for (int64_t i = 0; i < count; i++)
        if (memcmp(element(a, i), element(b, i), element_size(a->view.dtype)) != 0) return false;
    return true;
}

test_workspace test_workspace_make(size_t bytes)
{
    test_workspace w = {NULL, bytes, allocate(bytes + 2 * GUARD + 1)};
    memset(w.buffer, SENTINEL, bytes + 2 * GUARD + 1);
    w.data = w.buffer + GUARD + 1;
    memset(w.data, 0xff, bytes);
    return w;
}

void test_workspace_close(test_workspace *w)
{
    const unsigned char *data = w->data;
    for (size_t i = 1; i <= GUARD; i++) {
        if (*(data - i) != SENTINEL) fail_msg("byte %zu before the workspace was written", i);
        if (data[w->bytes + i - 1] != SENTINEL)
            fail_msg("byte %zu past the workspace's %zu was written", i - 1, w->bytes);
    }
    free(w->buffer);
    memset(w, 0, sizeof *w);
}

quern_context *test_context(quern_cpu_level level, int32_t threads)
{
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *ctx = NULL;
    params.cpu_level = level;
    params.threads = threads;
    if (quern_context_create(&params, &ctx) != QUERN_OK) fail_msg("no context: %s", quern_last_error(NULL));
    return ctx;
}
