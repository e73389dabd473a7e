/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command_experts_test.c - `quern bench` of NVFP4's operations and the mixture of experts: what it counts,
 * what stands beside, what it refuses. */
#include "command.h"

#include <math.h>
#include <stdlib.h>

#define SMALL " --n 3 --experts 4 --width 64 --depth 96 --rounds 1 --threads 1 --json $DIR/bench.json "

/* Runs a subject with small extents and reads its JSON into `output`. */
static void bench(const char *subject, const char *options)
{
    char arguments[300];
    snprintf(arguments, sizeof arguments, "bench %s" SMALL "%s", subject, options);
    if (run(arguments) != 0) fail_msg("quern %s: %s", arguments, output);
    assert_int_equal(run_with("cat $DIR/bench.json; true", ""), 0);
}

/* A number of the results' first object from `from` on. */
static double number(const char *from, const char *key)
{
    char quoted[40];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *at = strstr(from, quoted);
    if (at == NULL) fail_msg("no %s in %s", key, from);
    return atof(at + strlen(quoted));
}

static void expect_near(double got, double expected)
{
    if (!(fabs(got - expected) <= 1e-6 * fabs(expected))) fail_msg("%g instead of %g", got, expected);
}

/* Operations (or bytes) of the pass: the rate times the median. */
static double counted(const char *from, const char *rate)
{
    return number(from, rate) * number(from, "ms_median") * 1e6;
}

static void products_count_their_work(void **state)
{
    static const char *const variants[] = {"--no-peer",
                                           "--dtype f32",
                                           "--dtype f16 --a8 int8",
                                           "--dtype bf16 --a8 fp8 --no-peer",
                                           "--dtype nvfp4",
                                           "--dtype nvfp4 --output nvfp4",
                                           "--activation swiglu --no-peer"};
    (void)state;
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        bench("nvfp4-gemm", variants[i]);
        expect_near(counted(output, "gflops"), 2.0 * 4 * 3 * 64 * 96);
        expect_near(counted(output, "gbps"), 9.0 / 16 * 4 * 64 * 96);
        assert_true(number(output, "read_fraction") > 0);
        assert_true(number(output, "fraction") >= number(output, "read_fraction"));
    }
    bench("nvfp4-gemm", "--backward --no-peer");
    const char *backward = strstr(strstr(output, "\"op\"") + 4, "\"op\"");
    assert_non_null(backward);
    assert_non_null(strstr(backward, "\"backward\": true"));
    expect_near(counted(backward, "gflops"), 2.0 * 4 * 3 * 64 * 96);
    bench("nvfp4-gemm", "--activation swiglu --backward --dtype nvfp4");
}

static void conversions_count_their_bytes(void **state)
{
    static const struct {
        const char *subject, *options;
        double bytes;
    } cases[] = {
        {"nvfp4-quantize", "", (4 + 9.0 / 16) * 3 * 96},
        {"nvfp4-quantize", "--dtype f32 --profile modelopt --scales search", (8 + 9.0 / 16) * 3 * 96},
        {"nvfp4-fused-quantize", "", (4 + 9.0 / 16) * 3 * 96},
        {"nvfp4-dequantize", "", (2 + 9.0 / 16) * 3 * 96},
        {"nvfp4-from-mxfp4", "", (17.0 / 32 + 9.0 / 16) * 3 * 96},
        {"nvfp4-swizzle", "", 2.0 * 3 * 96},
        {"nvfp4-interleave", "--granularity 16", 8.0 * 3 * 96},
        {"moe-prepack", "", 9.0 / 8 * 4 * 64 * 96}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bench(cases[i].subject, cases[i].options);
        expect_near(counted(output, "gbps"), cases[i].bytes);
        assert_non_null(strstr(output, "\"ceiling\": \"copy\""));
    }
}

static void layers_stand_beside_their_products(void **state)
{
    (void)state;
    bench("moe", "--top-k 2 --backward");
    assert_non_null(strstr(output, "\"peer\": \"its products\""));
    expect_near(number(output, "over_peer") * number(output, "of_peer"), 1);
    expect_near(counted(output, "gflops"), 6.0 * 3 * (2 + 1) * 64 * 96);
    const char *backward = strstr(output, "\"backward\": true");
    assert_non_null(backward);
    expect_near(counted(backward, "gflops"), 10.0 * 3 * (2 + 1) * 64 * 96);
    assert_non_null(strstr(output, "\"top_k\": 2,"));
    assert_non_null(strstr(output, "\"renormalize\": true"));
    bench("moe", "--top-k 2 --dtype f32 --no-peer --a4 true");
    assert_non_null(strstr(output, "\"peer\": null"));
    bench("moe-route", "--top-k 2 --backward");
    expect_near(counted(output, "gflops"), 2.0 * 3 * 4 * 96);
    bench("moe-route", "--top-k 2 --score sigmoid --renormalize true");
}

static void profiles_print_every_choice(void **state)
{
    (void)state;
    expect(0, "bench nvfp4-profiles --json $DIR/bench.json", "heavy-tailed");
    assert_int_equal(run_with("cat $DIR/bench.json; true", ""), 0);
    int count = 0;
    for (const char *at = output; (at = strstr(at, "\"relative_rmse\": ")) != NULL; at++, count++)
        assert_true(number(at, "relative_rmse") > 0.05 && number(at, "relative_rmse") < 0.2);
    assert_int_equal(count, 3 * (4 * 3 - 2));
}

static void what_the_bench_refuses(void **state)
{
    (void)state;
    expect(2, "bench nvfp4-gemm --n 12,x", "--n '12,x'");
    expect(2, "bench nvfp4-gemm --rounds 0", "--rounds 0");
    expect(2, "bench nvfp4-gemm --experts -1", "--experts -1");
    expect(2, "bench nvfp4-gemm --n 1M --experts 4096", "below 2^31 rows");
    expect(2, "bench nvfp4-quantize --dtype nvfp4", "--dtype 'nvfp4': f32|f16|bf16");
    expect(2, "bench nvfp4-gemm extra", "one subject");
    expect(3, "bench nvfp4-gemm --n 1 --experts 1 --width 64 --depth 100", "K a multiple of 16");
    expect(3, "bench nvfp4-gemm --n 1 --experts 1 --width 64 --depth 40 --dtype nvfp4", "A_scales [T K/16]");
    expect(3, "bench moe-route --n 1 --experts 4 --top-k 5", "top_k is 5");
    expect(3, "bench nvfp4-gemm --json $DIR/no/such/place", "no/such/place");
    expect(0, "bench nvfp4-gemm --help", "--activation");
    expect(2, "bench", "nvfp4-profiles");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_count_their_work),
        cmocka_unit_test(conversions_count_their_bytes),
        cmocka_unit_test(layers_stand_beside_their_products),
        cmocka_unit_test(profiles_print_every_choice),
        cmocka_unit_test(what_the_bench_refuses),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
