/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_moe_test.c - golden vectors of NVFP4 and the mixture-of-experts layer through `quern run`. */
#include "command.h"
#include "compare.h"
#include "golden.h"

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

/* The quantiser's golden inputs, every profile, bit for bit. */
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
        cmocka_unit_test(the_quantiser),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
