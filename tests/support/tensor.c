/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tensor.c - guarded tensors, and f16 and bf16 by rounding in double. */
#include "tensor.h"

#include "cmocka_c11.h"
#include "hash.h"

#include <quern/nvfp4.h>

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

test_tensor test_tensor_matrix(test_random *random, quern_dtype dtype, int64_t rows, int64_t columns)
{
    const int64_t shape[] = {rows, columns};
    test_tensor t =
        test_tensor_make(random, dtype, 2, shape, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    test_tensor_normal(&t, random, 1);
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

static uint64_t bits_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static double double_of(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The e of |x| = m 2^e with m in [1/2, 1), as frexp gives it; at most -1022 where x is subnormal. */
static int exponent_of(double x)
{
    return (int)(bits_of(x) >> 52 & 0x7ff) - 1022;
}

/* The nearest multiple of 2^(exponent - digits), ties to even; `least` is the exponent of subnormals. A sum
 * with 1.5 * 2^52 of these units is rounded to whole units. */
static double round_binary(double x, int digits, int least, double largest)
{
    if (!isfinite(x) || x == 0) return x;
    const int exponent = exponent_of(x) < least ? least : exponent_of(x);
    if (exponent > 900) return copysign(INFINITY, x); /* beyond every type here */
    const double shift = 1.5 * double_of((uint64_t)(52 + exponent - digits + 1023) << 52);
    const double rounded = copysign(x + shift - shift, x);
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
    if (isnan(x)) return 0x7e00;
    if (isinf(a)) return sign | 0x7c00;
    if (a < 0x1p-14) return (uint16_t)(sign | (int)(a * 0x1p24));
    return (uint16_t)(sign | (exponent_of(a) + 14) << 10 | (int)(bits_of(a) >> 42 & 0x3ff));
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
    double a = exponent == 0 ? mantissa * 0x1p-24
                             : double_of((uint64_t)(exponent - 15 + 1023) << 52 | (uint64_t)mantissa << 42);
    if (exponent == 31) a = mantissa != 0 ? NAN : INFINITY;
    return bits & 0x8000 ? -a : a;
}

/* The elements of a tensor, a run of the last dimension after the other. */
typedef struct runs {
    int64_t number, count, step; /* runs, elements of one, bytes between two */
    size_t size;                 /* bytes of an element */
} runs;

static runs runs_of(const test_tensor *t)
{
    const int32_t last = t->view.ndim - 1;
    const int64_t elements = test_tensor_count(t), count = last >= 0 ? t->view.shape[last] : 1;
    const size_t size = element_size(t->view.dtype);
    const int64_t step = (last >= 0 ? t->view.strides[last] : 1) * (int64_t)size;
    return (runs){elements > 0 ? elements / count : 0, count, step, size};
}

static void store(quern_dtype dtype, double value, unsigned char *p)
{
    if (dtype == QUERN_F32) {
        const float f = (float)value;
        memcpy(p, &f, sizeof f);
    } else if (dtype == QUERN_U8) {
        *p = (unsigned char)value;
    } else {
        const uint16_t h = half_bits(dtype, value);
        memcpy(p, &h, sizeof h);
    }
}

static double load(quern_dtype dtype, const unsigned char *p)
{
    if (dtype == QUERN_U8) return *p;
    if (dtype == QUERN_F32) {
        float f;
        memcpy(&f, p, sizeof f);
        return f;
    }
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return half_value(dtype, h);
}

void test_tensor_set(test_tensor *t, const double *values)
{
    const runs r = runs_of(t);
    for (int64_t run = 0; run < r.number; run++) {
        unsigned char *p = element(t, run * r.count);
        for (int64_t i = 0; i < r.count; i++) store(t->view.dtype, *values++, p + i * r.step);
    }
    if (t->bytes > 0) memcpy(t->snapshot, t->buffer, t->bytes);
}

void test_tensor_set_i32(test_tensor *t, const int32_t *values)
{
    const runs r = runs_of(t);
    for (int64_t run = 0; run < r.number; run++) {
        unsigned char *p = element(t, run * r.count);
        for (int64_t i = 0; i < r.count; i++) memcpy(p + i * r.step, values++, sizeof *values);
    }
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

/* Notes the bits of the elements for tests/hashes.sh. */
static void note_bits(const test_tensor *t, const char *name)
{
    const runs r = runs_of(t);
    uint64_t hash = TEST_HASH_START;
    if (!test_hash_wanted()) return;
    for (int64_t run = 0; run < r.number; run++) {
        const unsigned char *p = element(t, run * r.count);
        for (int64_t i = 0; i < r.count; i++) hash = test_hash(hash, p + i * r.step, r.size);
    }
    test_hash_note(name, hash);
}

double *test_tensor_get(const test_tensor *t)
{
    double *values = test_doubles(test_tensor_count(t)), *to = values;
    const runs r = runs_of(t);
    note_bits(t, "values");
    for (int64_t run = 0; run < r.number; run++) {
        const unsigned char *p = element(t, run * r.count);
        for (int64_t i = 0; i < r.count; i++) *to++ = load(t->view.dtype, p + i * r.step);
    }
    return values;
}

int32_t *test_tensor_get_i32(const test_tensor *t)
{
    int32_t *values = allocate(sizeof *values * (size_t)(test_tensor_count(t) + 1)), *to = values;
    const runs r = runs_of(t);
    note_bits(t, "values");
    for (int64_t run = 0; run < r.number; run++) {
        const unsigned char *p = element(t, run * r.count);
        for (int64_t i = 0; i < r.count; i++) memcpy(to++, p + i * r.step, sizeof *to);
    }
    return values;
}

/* The first byte at which two buffers differ, `bytes` if none. */
static size_t first_difference(const unsigned char *a, const unsigned char *b, size_t bytes)
{
    size_t i = 0;
    if (memcmp(a, b, bytes) == 0) return bytes;
    while (a[i] == b[i]) i++;
    return i;
}

void test_tensor_check_guards(const test_tensor *t, const char *name)
{
    if (t->buffer == NULL) return;
    const runs r = runs_of(t);
    note_bits(t, name);
    unsigned char *expected = allocate(t->bytes);
    memcpy(expected, t->snapshot, t->bytes);
    for (int64_t run = 0; run < r.number; run++) {
        const unsigned char *p = element(t, run * r.count);
        unsigned char *to = expected + (p - t->buffer);
        if (r.step == (int64_t)r.size) memcpy(to, p, (size_t)r.count * r.size);
        for (int64_t i = 0; r.step != (int64_t)r.size && i < r.count; i++)
            memcpy(to + i * r.step, p + i * r.step, r.size);
    }
    const size_t at = first_difference(expected, t->buffer, t->bytes);
    free(expected);
    if (at < t->bytes)
        fail_msg("%s: byte %td from the start of its data lies outside its elements and was written", name,
                 t->buffer + at - (unsigned char *)t->view.data);
}

void test_tensor_check_unchanged(const test_tensor *t, const char *name)
{
    const size_t at = t->bytes > 0 ? first_difference(t->snapshot, t->buffer, t->bytes) : 0;
    if (at < t->bytes)
        fail_msg("%s: byte %td from the start of its data was written", name,
                 t->buffer + at - (unsigned char *)t->view.data);
}

bool test_tensor_same_bits(const test_tensor *a, const test_tensor *b)
{
    const runs r = runs_of(a), other = runs_of(b);
    for (int64_t run = 0; run < r.number; run++) {
        const unsigned char *p = element(a, run * r.count), *q = element(b, run * r.count);
        for (int64_t i = 0; i < r.count; i++)
            if (memcmp(p + i * r.step, q + i * other.step, r.size) != 0) return false;
    }
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

bool test_workspace_is_new(const test_workspace *w)
{
    const unsigned char *data = w->data;
    return w->bytes == 0 || (data[0] == 0xff && memcmp(data, data + 1, w->bytes - 1) == 0);
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
    const char *all = getenv("QUERN_TEST_THREADS");
    params.cpu_level = level;
    params.threads = all != NULL ? atoi(all) : threads;
    if (quern_context_create(&params, &ctx) != QUERN_OK) fail_msg("no context: %s", quern_last_error(NULL));
    return ctx;
}

int64_t test_repacked_bytes(int64_t n, int64_t k)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    int64_t bytes;
    assert_int_equal(quern_nvfp4_repacked_bytes(ctx, QUERN_CPU, 0, n, k, &bytes), QUERN_OK);
    quern_context_destroy(ctx);
    return bytes;
}
