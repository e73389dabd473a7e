/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_products_test.c - quantisers, products and layers with NVFP4 weights through `quern run`: the names
 * of their tensors in files, every option, and sentences. */
#include "command.h"
#include "oracle/nvfp4.h"

#include <quern/safetensors.h>

#include <math.h>
#include <stdint.h>

enum { T = 6, K = 64, N = 32, E = 2, I = N / 2 };

/* Operands of a product; the last row has no expert. */
static float a[T * K], bias[E * N], b_global[E * 2] = {0.5f, 1, 0.25f, 2}, old[T * N], one = 1, d_out[T * N];
static uint8_t b_codes[E * K / 2 * N], b_scales[E * K / 16 * N];
static int32_t ends[E] = {2, 5};

typedef struct named {
    const char *name;
    quern_tensor view;
} named;

static named tensor(const char *name, void *data, quern_dtype dtype, int32_t ndim, int64_t x, int64_t y,
                    int64_t z)
{
    const int64_t shape[] = {x, y, z};
    return (named){name, quern_tensor_contiguous(data, dtype, ndim, shape)};
}

static void save(const char *name, const named *of, size_t count)
{
    quern_safetensors_item items[24];
    for (size_t i = 0; i < count; i++) items[i] = (quern_safetensors_item){of[i].name, &of[i].view};
    if (quern_safetensors_save(path_of(name), items, count, NULL, 0) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
}
#define SAVE(name, ...) save(name, (named[]){__VA_ARGS__}, sizeof(named[]){__VA_ARGS__} / sizeof(named))

/* Runs an operation from one file of the directory to another. */
static void done(const char *op, const char *in, const char *out, const char *options)
{
    char arguments[600];
    snprintf(arguments, sizeof arguments, "run %s $DIR/%s $DIR/%s %s", op, in, out, options);
    if (run(arguments) != 0) fail_msg("quern %s: %s", arguments, output);
}

static void refused(const char *op, const char *in, const char *options, const char *words)
{
    char arguments[600];
    snprintf(arguments, sizeof arguments, "run %s $DIR/%s $DIR/none %s", op, in, options);
    expect(3, arguments, words);
    assert_false(exists("none"));
}

/* Copies a tensor of a file to `to`; checks its dtype and how many elements it has. */
static void load(const char *file, const char *name, quern_dtype dtype, int64_t count, void *to)
{
    quern_safetensors *f = NULL;
    quern_tensor t;
    int64_t elements = 1;
    assert_int_equal(quern_safetensors_open(path_of(file), &f), QUERN_OK);
    if (quern_safetensors_get(f, name, &t) != QUERN_OK) fail_msg("%s: %s", file, quern_last_error(NULL));
    for (int32_t i = 0; i < t.ndim; i++) elements *= t.shape[i];
    assert_int_equal(t.dtype, dtype);
    assert_int_equal(elements, count);
    memcpy(to, t.data, (size_t)count * quern_dtype_size(dtype));
    quern_safetensors_close(f);
}

static bool holds(const char *file, const char *name)
{
    quern_safetensors *f = NULL;
    assert_int_equal(quern_safetensors_open(path_of(file), &f), QUERN_OK);
    const bool there = quern_safetensors_has(f, name);
    quern_safetensors_close(f);
    return there;
}

/* The tensors of two files have the same bytes. */
static void same(const char *file, const char *name, const char *other, const char *other_name,
                 quern_dtype dtype, int64_t count)
{
    static unsigned char x[1 << 16], y[1 << 16];
    load(file, name, dtype, count, x);
    load(other, other_name, dtype, count, y);
    assert_memory_equal(x, y, (size_t)count * quern_dtype_size(dtype));
}

static int make_operands(void **state)
{
    for (int i = 0; i < T * K; i++) a[i] = (float)(i * 7 % 23 - 11) / 8;
    for (int i = 0; i < T * N; i++) old[i] = (float)(i * 5 % 17 - 8) / 4;
    for (int i = 0; i < T * N; i++) d_out[i] = (float)(i * 11 % 19 - 9) / 8;
    for (int i = 0; i < E * N; i++) bias[i] = (float)(i * 3 % 11 - 5) / 2;
    for (size_t i = 0; i < sizeof b_codes; i++) b_codes[i] = (uint8_t)(i * 37 + i / 64);
    for (size_t i = 0; i < sizeof b_scales; i++) b_scales[i] = (uint8_t)(0x28 + i * 5 % 24);
    return make_directory(state);
}

#define A_FLOATS tensor("A", a, QUERN_F32, 2, T, K, 0)
#define WEIGHTS                                                                                              \
    tensor("B_codes", b_codes, QUERN_U8, 3, E, K / 2, N),                                                    \
        tensor("B_scales", b_scales, QUERN_E4M3, 3, E, K / 16, N)
#define REST                                                                                                 \
    tensor("B_global", b_global, QUERN_F32, 2, E, 2, 0), tensor("offsets", ends, QUERN_I32, 1, E, 0, 0),     \
        tensor("bias", bias, QUERN_F32, 2, E, N, 0)

/* Entry (t, n) of A B G + bias, and the sum of its terms' sizes. */
static double exact(int t, int n, double *size)
{
    const int e = t < ends[0] ? 0 : 1;
    double sum = 0;
    *size = 0;
    if (t >= ends[1]) return 0;
    for (int k = 0; k < K; k++) {
        const int code = b_codes[(e * K / 2 + k / 2) * N + n] >> 4 * (k % 2) & 15;
        const double term = (double)a[t * K + k] * (double)oracle_e2m1(code) *
                            (double)oracle_e4m3(b_scales[(e * K / 16 + k / 16) * N + n]) *
                            (double)b_global[2 * e + n / 8 % 2];
        sum += term;
        *size += fabs(term);
    }
    *size += fabs((double)bias[e * N + n]);
    return sum + (double)bias[e * N + n];
}

static void products_of_every_layout(void **state)
{
    static uint8_t turned[sizeof b_codes], turned_scales[sizeof b_scales], tiles[E * 512];
    static float c[T * N];
    (void)state;
    SAVE("p", A_FLOATS, WEIGHTS, REST);
    done("nvfp4-gemm", "p", "c", "");
    load("c", "C", QUERN_F32, T * N, c);
    for (int i = 0; i < T * N; i++) {
        double size;
        const double expected = exact(i / N, i % N, &size);
        assert_true(fabs((double)c[i] - expected) <= (K + 9) * 0x1p-24 * size);
    }
    done("nvfp4-gemm", "p", "d", "--prepack true");
    same("c", "C", "d", "C", QUERN_F32, T * N);
    for (int e = 0; e < E; e++)
        for (int n = 0; n < N; n++) {
            for (int k = 0; k < K / 2; k++)
                turned[(e * N + n) * K / 2 + k] = b_codes[(e * K / 2 + k) * N + n];
            for (int k = 0; k < K / 16; k++) {
                const uint8_t scale = b_scales[(e * K / 16 + k) * N + n];
                turned_scales[(e * N + n) * K / 16 + k] = scale;
                tiles[e * 512 + oracle_swizzled_at(n, k, K / 16)] = scale;
            }
        }
    SAVE("p", A_FLOATS, REST, tensor("B_codes", turned, QUERN_U8, 3, E, N, K / 2),
         tensor("B_scales", turned_scales, QUERN_U8, 3, E, N, K / 16));
    done("nvfp4-gemm", "p", "d", "--b-codes k-major --b-scales k-major");
    same("c", "C", "d", "C", QUERN_F32, T * N);
    SAVE("p", A_FLOATS, REST, tensor("B_codes", b_codes, QUERN_U8, 3, E, K / 2, N),
         tensor("B_scales", tiles, QUERN_U8, 2, E, 512, 0));
    done("nvfp4-gemm", "p", "d", "--b-scales swizzled");
    same("c", "C", "d", "C", QUERN_F32, T * N);
    SAVE("w", WEIGHTS);
    done("moe-prepack", "w", "r", "");
    static uint8_t repacked[E * 2304];
    load("r", "B_repacked", QUERN_U8, E * 2304, repacked);
    SAVE("p", A_FLOATS, REST, tensor("B_repacked", repacked, QUERN_U8, 2, E, 2304, 0));
    done("nvfp4-gemm", "p", "d", "--n 32");
    same("c", "C", "d", "C", QUERN_F32, T * N);
}

static void outputs_of_products(void **state)
{
    static float c[T * N], sums[T * N], h[T * I], d_a[T * K];
    static uint16_t narrow[T * N];
    (void)state;
    SAVE("p", A_FLOATS, WEIGHTS, REST);
    done("nvfp4-gemm", "p", "c", "");
    load("c", "C", QUERN_F32, T * N, c);
    done("nvfp4-gemm", "p", "d", "--output bf16");
    load("d", "C", QUERN_BF16, T * N, narrow);
    done("nvfp4-gemm", "p", "d", "--output f16");
    load("d", "C", QUERN_F16, T * N, narrow);
    refused("nvfp4-gemm", "p", "--output nvfp4", "C_global is NULL");
    SAVE("p", A_FLOATS, WEIGHTS, REST, tensor("C_global", &one, QUERN_F32, 0, 0, 0, 0));
    done("nvfp4-gemm", "p", "d", "--output nvfp4 --profile modelopt");
    assert_false(holds("d", "C"));
    SAVE("x", tensor("X", c, QUERN_F32, 2, ends[1], N, 0), tensor("global", &one, QUERN_F32, 0, 0, 0, 0));
    done("nvfp4-quantize", "x", "q", "--profile modelopt");
    static uint8_t codes[T * N / 2], expected[T * N / 2];
    load("d", "C_codes", QUERN_U8, T * N / 2, codes);
    load("q", "codes", QUERN_U8, ends[1] * N / 2, expected);
    assert_memory_equal(codes, expected, (size_t)ends[1] * N / 2);
    for (int i = ends[1] * N / 2; i < T * N / 2; i++) assert_int_equal(codes[i], 0);
    SAVE("p", A_FLOATS, WEIGHTS, REST, tensor("C", old, QUERN_F32, 2, T, N, 0));
    done("nvfp4-gemm", "p", "d", "");
    load("d", "C", QUERN_F32, T * N, sums);
    for (int i = 0; i < T * N; i++) assert_true(sums[i] == c[i] + old[i]);
    refused("nvfp4-gemm", "p", "--output bf16", "C: dtype f32: output's bf16 is accepted");
    refused("nvfp4-gemm", "p", "--activation swiglu", "C is given with an activation");
    SAVE("p", A_FLOATS, WEIGHTS, REST, tensor("d_out", d_out, QUERN_F32, 2, T, I, 0));
    done("nvfp4-gemm", "p", "d", "--activation swiglu --limit 2 --alpha 1.702 --beta 1 --granularity 8");
    load("d", "C", QUERN_F32, T * I, h);
    for (int i = 0; i < T * I; i++) {
        const double gate = fmin(2, (double)c[i / I * N + oracle_interleaved_at(i % I, false, 8)]),
                     up = fmax(-2, fmin(2, (double)c[i / I * N + oracle_interleaved_at(i % I, true, 8)]));
        const double expected_h = i / I < ends[1] ? gate / (1 + exp(-(double)1.702f * gate)) * (up + 1) : 0;
        assert_true(fabs((double)h[i] - expected_h) <= 1e-5 * (fabs(expected_h) + 0.01));
    }
    load("d", "dA", QUERN_F32, T * K, d_a);
    for (int t = 0; t < T; t++) {
        float most = 0;
        for (int k = 0; k < K; k++) most = fmaxf(most, fabsf(d_a[t * K + k]));
        assert_true((most > 0) == (t < ends[1]));
    }
}

static void activations_of_four_bits(void **state)
{
    static uint8_t codes[T * K / 2], scales[T * K / 16], swizzled[2 * 512];
    static int32_t starts[E + 1], counts[E];
    static float globals[T], c[T * N], whole[T * N];
    (void)state;
    SAVE("x", tensor("X", a, QUERN_F32, 2, T, K, 0));
    done("nvfp4-quantize", "x", "q", "--global-per row --scales four-over-six");
    load("q", "codes", QUERN_U8, T * K / 2, codes);
    load("q", "scales", QUERN_U8, T * K / 16, scales);
    load("q", "global", QUERN_F32, T, globals);
#define A_CODES                                                                                              \
    tensor("A_codes", codes, QUERN_U8, 2, T, K / 2, 0), tensor("A_global", globals, QUERN_F32, 1, T, 0, 0)
    SAVE("p", A_CODES, WEIGHTS, REST, tensor("A_scales", scales, QUERN_U8, 2, T, K / 16, 0));
    done("nvfp4-gemm", "p", "c", "--a-global-per row");
    load("c", "C", QUERN_F32, T * N, c);
    SAVE("p", A_FLOATS, WEIGHTS, REST);
    done("nvfp4-gemm", "p", "d", "");
    load("d", "C", QUERN_F32, T * N, whole);
    double error = 0, length = 0;
    for (int i = 0; i < T * N; i++) {
        error += pow((double)c[i] - (double)whole[i], 2);
        length += pow((double)whole[i], 2);
    }
    assert_true(error > 0 && sqrt(error / length) < 0.2);
    for (int fp8 = 0; fp8 < 2; fp8++) {
        done("nvfp4-gemm", "p", "d", fp8 ? "--a8 fp8" : "--a8 int8");
        load("d", "C", QUERN_F32, T * N, c);
        error = 0;
        for (int i = 0; i < T * N; i++) error += pow((double)c[i] - (double)whole[i], 2);
        assert_true(error > 0 && sqrt(error / length) < (fp8 ? 0.06 : 0.02));
    }
    for (int e = 0; e < E; e++) counts[e] = ends[e] - (e > 0 ? ends[e - 1] : 0);
    SAVE("s", tensor("scales", scales, QUERN_U8, 2, T, K / 16, 0),
         tensor("tokens_per_expert", counts, QUERN_I32, 1, E, 0, 0));
    done("nvfp4-swizzle", "s", "t", "--experts true");
    load("t", "swizzled", QUERN_U8, sizeof swizzled, swizzled);
    load("t", "pad_row_offsets", QUERN_I32, E + 1, starts);
    SAVE("p", A_CODES, WEIGHTS, REST, tensor("A_scales", swizzled, QUERN_U8, 1, sizeof swizzled, 0, 0),
         tensor("pad_row_offsets", starts, QUERN_I32, 1, E + 1, 0, 0));
    done("nvfp4-gemm", "p", "d", "--a-global-per row --a-scales swizzled");
    same("c", "C", "d", "C", QUERN_F32, T * N);
    done("nvfp4-gemm", "p", "d", "--a-global-per tensor"); /* its shape says that it is one a row */
    same("c", "C", "d", "C", QUERN_F32, T * N);
}

static void quantisers_and_their_names(void **state)
{
    static float x[T * N], gate[T * I], global = 0.01f;
    static int64_t rounded;
    static uint8_t mx[2 * 16] = {0x21, 0x43}, exponents[2] = {127, 100}, bytes[32];
    (void)state;
    for (int i = 0; i < T * N; i++) x[i] = old[i] * 0.3f;
    for (int i = 0; i < T * I; i++) gate[i] = x[i / I * N + oracle_interleaved_at(i % I, false, 8)];
    SAVE("x", tensor("X", x, QUERN_F32, 2, T, N, 0), tensor("gate_global", &global, QUERN_F32, 0, 0, 0, 0),
         tensor("global", &global, QUERN_F32, 0, 0, 0, 0));
    done("nvfp4-fused-quantize", "x", "f", "--profile halfstep");
    assert_false(holds("f", "up_codes"));
    SAVE("g", tensor("X", gate, QUERN_F32, 2, T, I, 0), tensor("global", &global, QUERN_F32, 0, 0, 0, 0));
    done("nvfp4-quantize", "g", "q", "--profile halfstep");
    same("f", "gate_codes", "q", "codes", QUERN_U8, T * I / 2);
    same("f", "gate_scales", "q", "scales", QUERN_U8, T * I / 16);
    done("nvfp4-fused-quantize", "x", "f", "--activation swiglu --limit 3 --granularity 4");
    assert_true(holds("f", "codes") && holds("f", "scales") && !holds("f", "gate_codes"));
    refused("nvfp4-fused-quantize", "x", "--limit -1", "limit is -1");
    refused("nvfp4-fused-quantize", "x", "--granularity 3", "X.shape[1] is 32");
    SAVE("m", tensor("codes", mx, QUERN_U8, 2, 2, 16, 0),
         tensor("exponents", exponents, QUERN_U8, 2, 2, 1, 0));
    done("nvfp4-from-mxfp4", "m", "n", "");
    load("n", "rounded_blocks", QUERN_I64, 1, &rounded);
    load("n", "codes", QUERN_U8, 32, bytes);
    load("n", "global", QUERN_F32, 1, &global);
    assert_true(rounded == 0 && global == 0x1p-8f && memcmp(bytes, mx, 32) == 0); /* zeros have no exponent */
    exponents[1] = 0xFF;
    SAVE("m", tensor("codes", mx, QUERN_U8, 2, 2, 16, 0),
         tensor("exponents", exponents, QUERN_U8, 2, 2, 1, 0));
    refused("nvfp4-from-mxfp4", "m", "", "exponents[1] is the scale byte 0xFF");
    x[N + 3] = -INFINITY;
    SAVE("x", tensor("X", x, QUERN_F32, 2, T, N, 0));
    refused("nvfp4-quantize", "x", "", "X[35] (row 1, column 3) is -inf");
    global = 0;
    SAVE("x", tensor("X", gate, QUERN_F32, 2, T, I, 0), tensor("global", &global, QUERN_F32, 0, 0, 0, 0));
    refused("nvfp4-quantize", "x", "", "global[0] is 0");
    refused("nvfp4-quantize", "x", "--profile halfstep --scales search", "with profile halfstep");
}

static void globals_of_experts(void **state)
{
    static float w[E * K * N], globals[E], made[E], x[T * K];
    (void)state;
    for (int i = 0; i < E * K * N; i++) w[i] = (float)(i * 13 % 29 - 14) * (i < K * N ? 1 : 8);
    SAVE("w", tensor("W", w, QUERN_F32, 3, E, K, N));
    done("nvfp4-quantize", "w", "q", "--layout weight --global-per expert");
    load("q", "global", QUERN_F32, E, globals);
    assert_true(globals[0] == 14 / 2688.0f && globals[1] == 112 / 2688.0f);
    done("nvfp4-quantize", "w", "q", "--layout weight --profile compressed-tensors");
    load("q", "global", QUERN_F32, 1, made);
    assert_true(made[0] == 1 / 112.0f * 2688);
    for (int i = 0; i < T * K; i++) x[i] = i / K < ends[0] ? a[i] : i / K < ends[1] ? 3 * a[i] : NAN;
    SAVE("x", tensor("X", x, QUERN_F32, 2, T, K, 0), tensor("offsets", ends, QUERN_I32, 1, E, 0, 0));
    done("nvfp4-quantize", "x", "q", "--global-per expert"); /* the last row is not read */
    load("q", "global", QUERN_F32, E, globals);
    assert_true(globals[0] < globals[1]);
    refused("nvfp4-quantize", "x", "--global-per row --without offsets", "is nan");
    ends[1] = 7;
    SAVE("x", tensor("X", x, QUERN_F32, 2, T, K, 0), tensor("offsets", ends, QUERN_I32, 1, E, 0, 0));
    refused("nvfp4-quantize", "x", "--global-per expert", "offsets[1] is 7: at most the 6 rows");
    ends[1] = 5;
    SAVE("w", tensor("W", w, QUERN_F32, 2, 40, N, 0));
    refused("nvfp4-quantize", "w", "--layout weight", "W.shape[0] is 40");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_of_every_layout), cmocka_unit_test(outputs_of_products),
        cmocka_unit_test(activations_of_four_bits), cmocka_unit_test(quantisers_and_their_names),
        cmocka_unit_test(globals_of_experts),
    };
    return cmocka_run_group_tests(tests, make_operands, remove_directory);
}
