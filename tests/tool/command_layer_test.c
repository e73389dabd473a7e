/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_layer_test.c - `quern run v4-layer` on the golden layers, in one shot and in chunks; mistakes. */
#include "command.h"
#include "compare.h"
#include "dsv4_golden.h"
#include "dsv4_layer_case.h"

#include <quern/safetensors.h>

#include <math.h>
#include <unistd.h>

static const char *const options[] = {"--kind csa --window 8 --top-k 4", "--kind hca --window 8",
                                      "--kind swa --window 8"};

/* Adds the weight of a compressor in FP8 or NVFP4, in the place of those in floats. */
static void add_packed(const weight *w, const char *prefix, char names[3][64], quern_safetensors_item *items,
                       size_t *count)
{
    const bool codes = w->kind == NVFP4;
    snprintf(names[0], 64, "%s%s", prefix, codes ? "codes" : "fp8");
    snprintf(names[1], 64, "%s%s", prefix, codes ? "scales" : "fp8_scales");
    snprintf(names[2], 64, "%sglobal", prefix);
    const quern_tensor *const views[] = {&w->codes.view, &w->scales.view, &w->global.view};
    for (int i = 0; i < 2 + codes; i++) items[(*count)++] = (quern_safetensors_item){names[i], views[i]};
}

static bool is_packed(const layer_case *c, int tensor)
{
    const int first[] = {LAYER_WEIGHTS + OW_CMP_KV, LAYER_WEIGHTS + OW_INDEX_KV};
    for (int i = 0; i < 2; i++)
        if (c->packed[i].codes.buffer != NULL && (tensor == first[i] || tensor == first[i] + 1)) return true;
    return false;
}

/* The case's inputs; with d_out the gradients are computed as well. */
static void write_case(const layer_case *c, const char *name, bool gradients)
{
    static const char *const prefixes[] = {"w.compressor.", "w.compressor.indexer."};
    quern_safetensors_item items[LAYER_TENSORS + 6];
    char names[2][3][64];
    quern_tensor views[LAYER_TENSORS];
    float *memory[LAYER_TENSORS];
    size_t count = 0;
    for (int i = 0; i < LAYER_TENSORS; i++) {
        if (c->t[i].buffer == NULL || (i >= LAYER_OUT && (i != LAYER_D_OUT || !gradients)) || is_packed(c, i))
            continue;
        const int64_t n = test_tensor_count(&c->t[i]);
        double *values = test_tensor_get(&c->t[i]);
        memory[count] = malloc((size_t)n * sizeof(float));
        for (int64_t k = 0; k < n; k++) memory[count][k] = (float)values[k];
        views[count] =
            quern_tensor_contiguous(memory[count], QUERN_F32, c->t[i].view.ndim, c->t[i].view.shape);
        items[count] = (quern_safetensors_item){layer_case_names[i], &views[count]};
        count++;
        free(values);
    }
    const size_t copied = count;
    for (int i = 0; i < 2; i++)
        if (c->packed[i].codes.buffer != NULL)
            add_packed(&c->packed[i], prefixes[i], names[i], items, &count);
    assert_int_equal(quern_safetensors_save(path_of(name), items, count, NULL, 0), QUERN_OK);
    for (size_t i = 0; i < copied; i++) free(memory[i]);
}

/* The file holds every result of the kind, and these are the vectors'. */
static void check_file(const layer_case *c, const char *name, double *const expected[LAYER_TENSORS])
{
    quern_safetensors *file;
    if (quern_safetensors_open(path_of(name), &file) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    for (int k = LAYER_OUT; k <= LAYER_O_A; k++) {
        quern_tensor t;
        const bool left_out = k == LAYER_CORE && *QUERN_COMMAND_DEVICE != '\0';
        assert_int_equal(quern_safetensors_has(file, layer_case_names[k]),
                         c->t[k].buffer != NULL && !left_out);
        if (expected[k] == NULL || left_out) continue;
        const int64_t n = test_tensor_count(&c->t[k]);
        double *out = test_doubles(n), *wanted = test_doubles(n);
        assert_int_equal(quern_safetensors_get(file, layer_case_names[k], &t), QUERN_OK);
        for (int i = 0; i < t.ndim; i++) assert_int_equal(t.shape[i], c->t[k].view.shape[i]);
        for (int64_t i = 0; i < n; i++) {
            out[i] = (double)((const float *)t.data)[i];
            wanted[i] =
                out[i] == -INFINITY ? -INFINITY : expected[k][i]; /* the vectors' scores are not masked */
        }
        test_check_golden(layer_case_names[k], out, wanted, n, DSV4_TINY_BOUND);
        free(out), free(wanted);
    }
    quern_safetensors_close(file);
}

/* The file's output is the vectors' within what bf16 rows make of it, and not the same. */
static void check_out(const layer_case *c, const char *name, const double *expected)
{
    quern_safetensors *file;
    quern_tensor t;
    const int64_t n = test_tensor_count(&c->t[LAYER_OUT]);
    double *out = test_doubles(n);
    char why[200];
    assert_int_equal(quern_safetensors_open(path_of(name), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "out", &t), QUERN_OK);
    for (int64_t i = 0; i < n; i++) out[i] = (double)((const float *)t.data)[i];
    const double error = test_relative_l2(out, expected, n, why);
    assert_true(error > 1e-4 && error < test_forward_bound(QUERN_BF16));
    free(out);
    quern_safetensors_close(file);
}

static void golden_layers(void **state)
{
    static const char *const chunks[] = {"", "--chunks 1,2,3,39", "--chunks 13,1,0,19,12"};
    (void)state;
    for (int i = 0; i < 3; i++) {
        double *expected[LAYER_TENSORS];
        layer_case c = layer_case_golden(QUERN_TEST_VECTORS, i, expected);
        write_case(&c, "layer", false);
        for (int k = 0; k < 4; k++) {
            char line[600] = "", tokens[200] = "--chunks 1";
            size_t end = strlen(tokens);
            for (int n = 1; n < 45; n++) end += (size_t)snprintf(tokens + end, sizeof tokens - end, ",1");
            snprintf(line, sizeof line, "run v4-layer $DIR/layer $DIR/out %s %s", options[i],
                     k < 3 ? chunks[k] : tokens);
            expect(0, line, "");
            check_file(&c, "out", expected);
        }
        for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
        layer_case_free(&c);
    }
}

/* Caches of pages give the vectors; of bf16 rows and of keys in bytes rows near them. */
static void stored_otherwise(void **state)
{
    static const char *const exact[] = {"--page 3", "--format f32 --page 1"}, *const near[] = {
                                                                                  "--format bf16",
                                                                                  "--format bf16 --page 4"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        double *expected[LAYER_TENSORS];
        layer_case c = layer_case_golden(QUERN_TEST_VECTORS, i, expected);
        char line[300];
        write_case(&c, "layer", false);
        for (int k = 0; k < 4; k++) {
            snprintf(line, sizeof line, "run v4-layer $DIR/layer $DIR/out %s --chunks 7,1,30,7 %s",
                     options[i], k < 2 ? exact[k] : near[k - 2]);
            expect(0, line, "");
            if (k < 2) check_file(&c, "out", expected);
            else check_out(&c, "out", expected[LAYER_OUT]);
        }
        for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
        layer_case_free(&c);
    }
}

/* With d_out the file has the gradients of x and of all weights but the indexer's. */
static void gradients(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        double *expected[LAYER_TENSORS];
        layer_case c = layer_case_golden(QUERN_TEST_VECTORS, i, expected);
        char line[300];
        write_case(&c, "layer", true);
        snprintf(line, sizeof line, "run v4-layer $DIR/layer $DIR/out %s --chunks 40,5", options[i]);
        expect(0, line, "");
        quern_safetensors *file;
        assert_int_equal(quern_safetensors_open(path_of("out"), &file), QUERN_OK);
        for (int k = LAYER_D_X; k < LAYER_TENSORS; k++)
            assert_int_equal(quern_safetensors_has(file, layer_case_names[k]), c.t[k].buffer != NULL);
        assert_false(quern_safetensors_has(file, "dw.compressor.indexer.q_b_proj.weight"));
        check_file(&c, "out", expected);
        quern_safetensors_close(file);
        for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
        layer_case_free(&c);
    }
}

static double *out_of(const char *name, int64_t n)
{
    quern_safetensors *file;
    quern_tensor t;
    double *out = test_doubles(n);
    assert_int_equal(quern_safetensors_open(path_of(name), &file), QUERN_OK);
    assert_int_equal(quern_safetensors_get(file, "out", &t), QUERN_OK);
    for (int64_t i = 0; i < n; i++) out[i] = (double)((const float *)t.data)[i];
    quern_safetensors_close(file);
    return out;
}

/* Weights of the compressors in FP8 and NVFP4 give what floats of the same values give. */
static void packed_weights(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        double *expected[LAYER_TENSORS];
        layer_case c = layer_case_golden(QUERN_TEST_VECTORS, i / 2, expected);
        const int64_t n = test_tensor_count(&c.t[LAYER_OUT]);
        const weight kept[2] = {{.kind = FP8_POWERS}, {.kind = FP8_POWERS}};
        weight packed[2];
        char line[300], why[200];
        test_random random = {(uint64_t)i + 3};
        layer_case_pack(&c, &random, 0, i % 2 == 0 ? FP8_SCALES : NVFP4);
        if (i < 2) layer_case_pack(&c, &random, 1, i % 2 == 0 ? NVFP4 : FP8_POWERS);
        write_case(&c, "packed", true);
        memcpy(packed, c.packed, sizeof packed);
        memcpy(c.packed, kept, sizeof kept);
        write_case(&c, "floats", true);
        memcpy(c.packed, packed, sizeof packed);
        snprintf(line, sizeof line, "run v4-layer $DIR/floats $DIR/out %s", options[i / 2]);
        expect(0, line, "");
        double *wanted = out_of("out", n);
        for (int chunks = 0; chunks < 2; chunks++) {
            snprintf(line, sizeof line, "run v4-layer $DIR/packed $DIR/out %s%s", options[i / 2],
                     chunks == 1 ? " --chunks 7,1,30,7" : "");
            expect(0, line, "");
            double *out = out_of("out", n);
            assert_true(test_relative_l2(out, wanted, n, why) < 1e-5);
            free(out);
        }
        expect(3, "run v4-layer $DIR/packed $DIR/none --kind swa", "a layer of kind swa has no compressor");
        free(wanted);
        for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
        layer_case_free(&c);
    }
}

static void mistakes_are_reported(void **state)
{
    double *expected[LAYER_TENSORS];
    layer_case c = layer_case_golden(QUERN_TEST_VECTORS, 0, expected);
    (void)state;
    write_case(&c, "layer", false);
    expect(3, "run v4-layer $DIR/layer $DIR/none --kind hca", "a layer of kind hca has no indexer");
    expect(2, "run v4-layer $DIR/layer $DIR/none --kind dense", "dense");
    expect(2, "run v4-layer $DIR/layer $DIR/none --chunks 40,6", "sum to the 45 tokens");
    expect(3, "run v4-layer $DIR/layer $DIR/none --top-k 4000", "top_k is 4000");
    expect(3, "run v4-layer $DIR/layer $DIR/none --without w.kv_norm.weight", "w.kv_norm.weight");
    expect(3, "run v4-layer $DIR/layer $DIR/none --chunks 45 --format row584", "format is 4 with dim 32");
    expect(3, "run v4-layer $DIR/layer $DIR/none --chunks 45 --key-format fp4", "index_dim is 16");
    expect(3, "run v4-layer $DIR/layer $DIR/none --chunks 45 --page -1", "page is -1: 0 to 65536");
    assert_int_not_equal(access(path_of("none"), F_OK), 0);
    for (int k = 0; k < LAYER_TENSORS; k++) free(expected[k]);
    layer_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden_layers), cmocka_unit_test(stored_otherwise),
                                       cmocka_unit_test(gradients), cmocka_unit_test(packed_weights),
                                       cmocka_unit_test(mistakes_are_reported)};
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
