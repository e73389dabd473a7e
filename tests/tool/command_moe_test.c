/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_moe_test.c - golden vectors of NVFP4 and the mixture-of-experts layer through `quern run`. */
#include "command.h"
#include "compare.h"
#include "golden.h"
#include "oracle/nvfp4.h"

#include "core/half.h"

#include <math.h>
#include <stdlib.h>

enum { RENAMES_MOST = 12 };

/* Tensors of a golden file under other names, "" ends them, as a file of the test's. */
static void copy_renamed(const char *golden, const char *const names[][2], const char *name)
{
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, golden);
    quern_safetensors_item items[RENAMES_MOST];
    quern_tensor views[RENAMES_MOST];
    size_t n = 0;
    for (; n < RENAMES_MOST && names[n][0] != NULL; n++) {
        assert_int_equal(quern_safetensors_get(file, names[n][0], &views[n]), QUERN_OK);
        items[n] = (quern_safetensors_item){names[n][1], &views[n]};
    }
    assert_int_equal(quern_safetensors_save(path_of(name), items, n, NULL, 0), QUERN_OK);
    quern_safetensors_close(file);
}

/* A tensor that the command wrote, as doubles. */
static double *written(const char *name, const char *tensor, int64_t count)
{
    quern_safetensors *file = NULL;
    assert_int_equal(quern_safetensors_open(path_of(name), &file), QUERN_OK);
    double *values = golden_get(file, "", tensor, count);
    quern_safetensors_close(file);
    return values;
}

static void the_layer(void **state)
{
    enum { COUNT = 2 * 12 * 64 };
    static const char *const names[][2] = {{"hidden", "hidden"},
                                           {"topk.w.gate.weight", "weight"},
                                           {"topk.w.gate.e_score_correction_bias", "bias"},
                                           {"topk.w.experts.gate_up_proj", "gate_up"},
                                           {"topk.w.experts.down_proj", "down"},
                                           {"topk.w.shared_experts.gate_proj.weight", "shared_gate"},
                                           {"topk.w.shared_experts.up_proj.weight", "shared_up"},
                                           {"topk.w.shared_experts.down_proj.weight", "shared_down"},
                                           {"hidden", "d_out"},
                                           {NULL, NULL}};
    (void)state;
    copy_renamed("v4_moe", names, "moe.safetensors");
    char arguments[700], in[300];
    snprintf(in, sizeof in, "%s", path_of("moe.safetensors"));
    snprintf(arguments, sizeof arguments,
             "run moe %s %s --score sqrtsoftplus --top-k 3 --renormalize true --route-scale 1.5 --limit 10",
             in, path_of("layer.safetensors"));
    assert_int_equal(run(arguments), 0);
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "v4_moe");
    double *expected = golden_get(file, "topk.", "out", COUNT),
           *got = written("layer.safetensors", "out", COUNT);
    test_check_golden("out", got, expected, COUNT, 5e-6);
    free(expected), free(got);
    quern_safetensors_close(file);
    free(written("layer.safetensors", "d_hidden", COUNT));
    free(written("layer.safetensors", "d_weight", 8 * 64));
    snprintf(arguments, sizeof arguments, "run moe %s %s --top-k 9", in, path_of("none.safetensors"));
    expect(3, arguments, "top_k is 9");
}

static void the_router(void **state)
{
    static const char *const names[][2] = {
        {"topk.logits", "logits"}, {"topk.w.gate.e_score_correction_bias", "bias"}, {NULL, NULL}};
    (void)state;
    copy_renamed("v4_moe", names, "route.safetensors");
    char arguments[700], in[300];
    snprintf(in, sizeof in, "%s", path_of("route.safetensors"));
    snprintf(arguments, sizeof arguments,
             "run moe-route %s %s --score sqrtsoftplus --top-k 3 --renormalize true --route-scale 1.5", in,
             path_of("routed.safetensors"));
    assert_int_equal(run(arguments), 0);
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "v4_moe");
    double *expected = golden_get(file, "topk.", "weights_sorted", 24 * 3),
           *got = written("routed.safetensors", "weights", 24 * 3);
    test_check_golden("weights", got, expected, 24 * 3, 5e-6);
    free(expected), free(got);
    quern_safetensors_close(file);
}

/* ---- layers with NVFP4 weights ---- */

enum { T = 6, D = 32, I = 16, E = 3, V = 4 };

typedef struct small_layer {
    float hidden[T * D], weight[E * D], up_global[E * 2], down_global[E], input_global[E], d_out[T * D];
    float up_bias[E * 2 * I], up_bias_halves[E * 2 * I], down_bias[E * D];
    uint8_t up_codes[E * D / 2 * 2 * I], up_scales[E * D / 16 * 2 * I];
    uint8_t down_codes[E * I / 2 * D], down_scales[E * I / 16 * D];
    float up[E * 2 * I * D], down[E * D * I]; /* what they stand for */
    int32_t ids[T], table[V * 2];
} small_layer;

static double value_of(const uint8_t *codes, const uint8_t *scales, int e, int k, int n, int depth,
                       int columns)
{
    const int code = codes[(e * depth / 2 + k / 2) * columns + n] >> 4 * (k % 2) & 15;
    return (double)oracle_e2m1(code) * (double)oracle_e4m3(scales[(e * depth / 16 + k / 16) * columns + n]);
}

static void fill_layer(small_layer *l)
{
    for (int i = 0; i < T * D; i++) l->hidden[i] = (float)(i * 7 % 19 - 9) / 8;
    for (int i = 0; i < T * D; i++) l->d_out[i] = (float)(i * 5 % 13 - 6) / 4;
    for (int i = 0; i < E * D; i++) l->weight[i] = (float)(i * 11 % 23 - 11) / 32;
    for (int i = 0; i < E * 2; i++) l->up_global[i] = 0.02f * (float)(i + 1);
    for (int i = 0; i < E; i++) l->down_global[i] = 0.03f * (float)(i + 1), l->input_global[i] = 0.001f;
    for (int i = 0; i < E * D; i++) l->down_bias[i] = (float)(i % 7 - 3) / 4;
    for (size_t i = 0; i < sizeof l->up_codes; i++) l->up_codes[i] = (uint8_t)(i * 29 + i / 32);
    for (size_t i = 0; i < sizeof l->up_scales; i++) l->up_scales[i] = (uint8_t)(0x30 + i * 3 % 16);
    for (size_t i = 0; i < sizeof l->down_codes; i++) l->down_codes[i] = (uint8_t)(i * 31 + i / 16);
    for (size_t i = 0; i < sizeof l->down_scales; i++) l->down_scales[i] = (uint8_t)(0x30 + i * 5 % 16);
    for (int t = 0; t < T; t++) l->ids[t] = t % V;
    for (int v = 0; v < V * 2; v++) l->table[v] = (v / 2 + v % 2 * 2) % E;
    for (int e = 0; e < E; e++)
        for (int n = 0; n < 2 * I; n++) { /* a row of halves, at its column of the runs */
            const int at = (int)oracle_interleaved_at(n % I, n >= I, 8);
            l->up_bias_halves[e * 2 * I + n] = l->up_bias[e * 2 * I + at] = (float)(n % 5 - 2) / 2;
            for (int d = 0; d < D; d++)
                l->up[(e * 2 * I + n) * D + d] =
                    (float)value_of(l->up_codes, l->up_scales, e, d, at, D, 2 * I) *
                    l->up_global[2 * e + n / I];
        }
    for (int i = 0; i < E * D * I; i++)
        l->down[i] = (float)value_of(l->down_codes, l->down_scales, i / (D * I), i % I, i / I % D, I, D) *
                     l->down_global[i / (D * I)];
}

typedef struct named {
    const char *name;
    void *data;
    quern_dtype dtype;
    int64_t shape[3];
} named;

static void save(const char *name, const named *of)
{
    quern_safetensors_item items[16];
    quern_tensor views[16];
    size_t n = 0;
    for (; of[n].name != NULL; n++) {
        int32_t ndim = 0;
        while (ndim < 3 && of[n].shape[ndim] > 0) ndim++;
        views[n] = quern_tensor_contiguous(of[n].data, of[n].dtype, ndim, of[n].shape);
        items[n] = (quern_safetensors_item){of[n].name, &views[n]};
    }
    assert_int_equal(quern_safetensors_save(path_of(name), items, n, NULL, 0), QUERN_OK);
}

/* Runs the layer; returns a result. */
static double *layer(const char *in, const char *options, const char *result, int64_t count)
{
    char arguments[300];
    snprintf(arguments, sizeof arguments, "run moe $DIR/%s $DIR/out --top-k 2 --renormalize true %s", in,
             options);
    if (run(arguments) != 0) fail_msg("quern %s: %s", arguments, output);
    return written("out", result, count);
}

static void layers_of_nvfp4_weights(void **state)
{
    static small_layer l;
    (void)state;
    fill_layer(&l);
    const named codes[] = {{"hidden", l.hidden, QUERN_F32, {T, D}},
                           {"weight", l.weight, QUERN_F32, {E, D}},
                           {"gate_up_codes", l.up_codes, QUERN_U8, {E, D / 2, 2 * I}},
                           {"gate_up_scales", l.up_scales, QUERN_E4M3, {E, D / 16, 2 * I}},
                           {"gate_up_global", l.up_global, QUERN_F32, {E, 2}},
                           {"down_codes", l.down_codes, QUERN_U8, {E, I / 2, D}},
                           {"down_scales", l.down_scales, QUERN_U8, {E, I / 16, D}},
                           {"down_global", l.down_global, QUERN_F32, {E}},
                           {"gate_up_bias", l.up_bias, QUERN_F32, {E, 2 * I}},
                           {"down_bias", l.down_bias, QUERN_F32, {E, D}},
                           {"input_ids", l.ids, QUERN_I32, {T}},
                           {"tid2eid", l.table, QUERN_I32, {V, 2}},
                           {"d_out", l.d_out, QUERN_F32, {T, D}},
                           {NULL, NULL, QUERN_F32, {0}}},
                floats[] = {{"hidden", l.hidden, QUERN_F32, {T, D}},
                            {"weight", l.weight, QUERN_F32, {E, D}},
                            {"gate_up", l.up, QUERN_F32, {E, 2 * I, D}},
                            {"down", l.down, QUERN_F32, {E, D, I}},
                            {"gate_up_bias", l.up_bias_halves, QUERN_F32, {E, 2 * I}},
                            {"down_bias", l.down_bias, QUERN_F32, {E, D}},
                            {"input_ids", l.ids, QUERN_I32, {T}},
                            {"tid2eid", l.table, QUERN_I32, {V, 2}},
                            {"d_out", l.d_out, QUERN_F32, {T, D}},
                            {NULL, NULL, QUERN_F32, {0}}};
    static const char *const options[] = {"", "--without input_ids,tid2eid --score sigmoid",
                                          "--limit 0.5 --alpha 1.702 --beta 1 --route-scale 2.5"};
    save("codes", codes), save("floats", floats);
    for (int i = 0; i < 3; i++) {
        static const char *const results[] = {"out", "d_hidden", "d_weight", "d_down_bias"};
        static const int64_t counts[] = {T * D, T * D, E * D, E * D};
        for (int r = 0; r < 4; r++) {
            double *got = layer("codes", options[i], results[r], counts[r]),
                   *expected = layer("floats", options[i], results[r], counts[r]);
            test_check(results[r], got, expected, counts[r], 2e-5);
            free(got), free(expected);
        }
        double *got = layer("codes", options[i], "d_gate_up_bias", E * 2 * I),
               *halves = layer("floats", options[i], "d_gate_up_bias", E * 2 * I), expected[E * 2 * I];
        for (int n = 0; n < E * 2 * I; n++)
            expected[n / (2 * I) * 2 * I + oracle_interleaved_at(n % I, n % (2 * I) >= I, 8)] = halves[n];
        test_check("d_gate_up_bias", got, expected, E * 2 * I, 2e-5);
        free(got), free(halves);
    }
    double *whole = layer("codes", "", "out", T * D), *rounded = layer("codes", "--a4 true", "out", T * D);
    double error = 0, length = 0;
    for (int n = 0; n < T * D; n++) error += pow(rounded[n] - whole[n], 2), length += whole[n] * whole[n];
    assert_true(error > 0 && error < 0.1 * length);
    free(whole), free(rounded);
    expect(3, "run moe $DIR/floats $DIR/none --a4 true", "a4 is true with gate_up in floats");
    expect(3, "run moe $DIR/codes $DIR/none --top-k 2 --limit -1", "limit is -1");
    l.table[1] = E;
    l.down_scales[3] = 0x7F;
    save("codes", codes);
    expect(3, "run moe $DIR/codes $DIR/none --top-k 2", "tid2eid[0, 1] is 3");
    expect(3, "run moe $DIR/codes $DIR/none --top-k 2 --without input_ids,tid2eid", "scale byte 0x7F");
    l.up_global[1] = 0;
    save("codes", codes);
    expect(3, "run moe $DIR/codes $DIR/none --top-k 2 --without input_ids,tid2eid", "gate_up_global[1] is 0");
    assert_false(exists("none"));
}

/* The quantiser's golden inputs, every profile, bit for bit. */
/* Globals of one number, [] or [1], stand for all experts; ids may be of 64 bits, logits of 16. */
static void forms_of_small_tensors(void **state)
{
    static small_layer l;
    static float same[E] = {0.001f, 0.001f, 0.001f}, logits[T * E];
    static int64_t ids[T], table[V * 2];
    static uint16_t short_logits[T * E];
    (void)state;
    fill_layer(&l);
    for (int t = 0; t < T; t++) ids[t] = l.ids[t];
    for (int v = 0; v < V * 2; v++) table[v] = l.table[v];
    for (int i = 0; i < T * E; i++) {
        short_logits[i] = (uint16_t)(0x3e00 + i * 37 % 256);
        logits[i] = float_from_bf16(short_logits[i]);
    }
    static const int64_t shapes[] = {E, 1, 0};
    for (int form = 0; form < 3; form++) {
        const bool first = form == 0;
        const named of[] = {
            {"hidden", l.hidden, QUERN_F32, {T, D}},
            {"logits", first ? (void *)logits : short_logits, first ? QUERN_F32 : QUERN_BF16, {T, E}},
            {"gate_up_codes", l.up_codes, QUERN_U8, {E, D / 2, 2 * I}},
            {"gate_up_scales", l.up_scales, QUERN_E4M3, {E, D / 16, 2 * I}},
            {"gate_up_global", same, QUERN_F32, {shapes[form]}},
            {"gate_up_input_global", same, QUERN_F32, {shapes[form]}},
            {"down_codes", l.down_codes, QUERN_U8, {E, I / 2, D}},
            {"down_scales", l.down_scales, QUERN_U8, {E, I / 16, D}},
            {"down_global", same, QUERN_F32, {shapes[form]}},
            {"down_input_global", same, QUERN_F32, {shapes[form]}},
            {"input_ids", first ? (void *)l.ids : ids, first ? QUERN_I32 : QUERN_I64, {T}},
            {"tid2eid", first ? (void *)l.table : table, first ? QUERN_I32 : QUERN_I64, {V, 2}},
            {"d_out", l.d_out, QUERN_F32, {T, D}},
            {NULL, NULL, QUERN_F32, {0}}};
        save("forms", of);
        char arguments[200];
        snprintf(arguments, sizeof arguments, "run moe $DIR/forms $DIR/%s --top-k 2 --a4 true",
                 first ? "usual" : "other");
        expect(0, arguments, "");
        if (first) continue;
        expect(0, "compare $DIR/other $DIR/usual out d_hidden --tolerance 0", "PASS");
        expect(0, "compare $DIR/other $DIR/usual d_logits --tolerance 4e-3 --widen", "PASS");
    }
}

static void the_quantiser(void **state)
{
    static const char *const inputs[] = {"gauss_s1", "laplace_s1", "wide_s1", "zero_blocks_s1",
                                         "negative_tiny_s1"},
                             *const profiles[][2] = {{"rne", "rne"},
                                                     {"seed", "halfstep"},
                                                     {"modelopt", "modelopt"},
                                                     {"ct", "compressed-tensors"}};
    enum { BYTES = 37 * 32, BLOCKS = 37 * 4 };
    (void)state;
    for (int i = 0; i < 5; i++)
        for (int p = 0; p < 4; p++) {
            char source[40], name[60], arguments[700], in[300];
            snprintf(source, sizeof source, "in.%s", inputs[i]);
            const char *const names[][2] = {{source, "X"}, {NULL, NULL}};
            copy_renamed("nvfp4_quant", names, "x.safetensors");
            snprintf(in, sizeof in, "%s", path_of("x.safetensors"));
            snprintf(arguments, sizeof arguments, "run nvfp4-quantize %s %s --profile %s", in,
                     path_of("q.safetensors"), profiles[p][1]);
            assert_int_equal(run(arguments), 0);
            quern_safetensors *expected = golden_open(QUERN_TEST_VECTORS, "nvfp4_quant"), *got = NULL;
            quern_tensor a, b;
            assert_int_equal(quern_safetensors_open(path_of("q.safetensors"), &got), QUERN_OK);
            snprintf(name, sizeof name, "%s.codes.%s", profiles[p][0], inputs[i]);
            assert_int_equal(quern_safetensors_get(expected, name, &a), QUERN_OK);
            assert_int_equal(quern_safetensors_get(got, "codes", &b), QUERN_OK);
            assert_memory_equal(a.data, b.data, BYTES);
            snprintf(name, sizeof name, "%s.scales.%s", profiles[p][0], inputs[i]);
            assert_int_equal(quern_safetensors_get(expected, name, &a), QUERN_OK);
            assert_int_equal(quern_safetensors_get(got, "scales", &b), QUERN_OK);
            assert_memory_equal(a.data, b.data, BLOCKS);
            quern_safetensors_close(expected), quern_safetensors_close(got);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_layer),
        cmocka_unit_test(the_router),
        cmocka_unit_test(layers_of_nvfp4_weights),
        cmocka_unit_test(forms_of_small_tensors),
        cmocka_unit_test(the_quantiser),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
