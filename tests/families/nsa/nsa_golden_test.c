/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_golden_test.c - the library against the golden vectors, at every CPU level of this machine. */
#include "cmocka_c11.h"
#include "compare.h"
#include "nsa_golden.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Calls `body` with a context of every level. */
static void for_levels(void (*body)(quern_context *ctx))
{
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        body(ctx);
        quern_context_destroy(ctx);
    }
}

/* The results that stand in the case, for nsa_golden_compare. */
static void take(const nsa_case *c, nsa_set set, double *values[NSA_SLOTS])
{
    const nsa_set ints = NSA_BIT(NSA_BLOCK_IDX) | NSA_BIT(NSA_BLOCK_COUNT);
    for (int i = 0; i < NSA_SLOTS; i++)
        if (set & ~ints & NSA_BIT(i)) values[i] = test_tensor_get(&c->tensor[i]);
}

static void whole_on(quern_context *ctx)
{
    nsa_golden cases[16];
    const int n = nsa_golden_cases(cases);
    for (int i = 0; i < n; i++) {
        quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, cases[i].file);
        nsa_case *c = nsa_golden_case(&cases[i], file);
        double *values[NSA_SLOTS] = {NULL};
        nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
        take(c, nsa_forward_outputs(c), values);
        int32_t *idx = test_tensor_get_i32(&c->tensor[NSA_BLOCK_IDX]);
        int32_t *count = test_tensor_get_i32(&c->tensor[NSA_BLOCK_COUNT]);
        nsa_golden_compare_lists(&cases[i], c, file, idx, count);
        nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
        take(c, nsa_backward_outputs(c), values);
        nsa_golden_compare(&cases[i], c, file, values);
        for (int s = 0; s < NSA_SLOTS; s++) free(values[s]);
        free(idx);
        free(count);
        nsa_case_free(c);
        quern_safetensors_close(file);
    }
}

static void small_and_paper(void **state)
{
    (void)state;
    for_levels(whole_on);
}

static void expect(const nsa_case *c, nsa_slot slot, const quern_safetensors *file, const char *name)
{
    const int64_t count = test_tensor_count(&c->tensor[slot]);
    double *expected = golden_get(file, "", name, count), *out = test_tensor_get(&c->tensor[slot]);
    test_check_golden(name, out, expected, count, GOLDEN_BOUND);
    free(expected);
    free(out);
}

static void gating_on(quern_context *ctx)
{
    nsa_config config = nsa_config_small();
    test_random random = {1};
    config.batch = 1;
    config.n = 24;
    config.h = config.hkv = 4;
    config.d = config.dv = 64;
    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "nsa_gating");
    nsa_case *c = nsa_case_new(&config, &random);
    const nsa_set branches = NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_O_WIN);
    const nsa_set gradients = NSA_BIT(NSA_D_O_CMP) | NSA_BIT(NSA_D_O_SLC) | NSA_BIT(NSA_D_O_WIN);
    const nsa_set weights = NSA_BIT(NSA_Q) | NSA_BIT(NSA_W_GATE);
    nsa_golden_set(c, NSA_Q, file, "", "Q");
    nsa_golden_set(c, NSA_W_GATE, file, "", "W");
    nsa_golden_set(c, NSA_D_O, file, "", "dO");
    nsa_golden_set(c, NSA_O_CMP, file, "", "O_cmp");
    nsa_golden_set(c, NSA_O_SLC, file, "", "O_slc");
    nsa_golden_set(c, NSA_O_WIN, file, "", "O_sld");
    nsa_run(c, ctx, nsa_call_gates, weights, NSA_BIT(NSA_GATES));
    expect(c, NSA_GATES, file, "gates");
    nsa_run(c, ctx, nsa_call_combine, branches | NSA_BIT(NSA_GATES), NSA_BIT(NSA_O));
    expect(c, NSA_O, file, "out");
    nsa_run(c, ctx, nsa_call_gate, weights | branches, NSA_BIT(NSA_GATES) | NSA_BIT(NSA_O));
    expect(c, NSA_GATES, file, "gates");
    expect(c, NSA_O, file, "out");
    nsa_run(c, ctx, nsa_call_gate_backward, weights | branches | NSA_BIT(NSA_GATES) | NSA_BIT(NSA_D_O),
            gradients | NSA_BIT(NSA_D_Q) | NSA_BIT(NSA_D_W_GATE));
    expect(c, NSA_D_O_CMP, file, "dO_cmp");
    expect(c, NSA_D_O_SLC, file, "dO_slc");
    expect(c, NSA_D_O_WIN, file, "dO_sld");
    expect(c, NSA_D_Q, file, "dQ");
    expect(c, NSA_D_W_GATE, file, "dW");
    c->config.params.gate = QUERN_NSA_GATE_NONE;
    nsa_run(c, ctx, nsa_call_combine, branches, NSA_BIT(NSA_O));
    expect(c, NSA_O, file, "out_nogate");
    nsa_run(c, ctx, nsa_call_gate, branches | NSA_BIT(NSA_Q), NSA_BIT(NSA_O));
    expect(c, NSA_O, file, "out_nogate");
    nsa_case_free(c);
    quern_safetensors_close(file);
}

static void gating(void **state)
{
    (void)state;
    for_levels(gating_on);
}

/* The file pads compressed rows to nine per sequence; the library lays them end to end. */
enum { PADDED = 9 };

static double *varlen_rows(const nsa_case *c, const double *padded, const int32_t *n_cmp)
{
    const int64_t width = c->config.hkv * c->config.d;
    double *rows = test_doubles(c->entries * width);
    int64_t row = 0;
    for (int64_t b = 0; b < c->config.batch; b++) {
        memcpy(rows + row * width, padded + b * PADDED * width, sizeof *rows * (size_t)(n_cmp[b] * width));
        row += n_cmp[b];
    }
    return rows;
}

static void varlen_on(quern_context *ctx)
{
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "nsa_compress_varlen");
    const nsa_slot cmp[] = {NSA_K_CMP, NSA_V_CMP}, d_cmp[] = {NSA_D_K_CMP, NSA_D_V_CMP};
    const char *const cmp_names[] = {"K_cmp", "V_cmp"}, *const d_names[] = {"dK_cmp", "dV_cmp"};
    int32_t *n_cmp = golden_get_i32(file, "", "n_cmp", 4);
    for (int project = 0; project < 2; project++) {
        const char *prefix = project ? "proj." : "noproj.";
        nsa_config config = nsa_config_small();
        test_random random = {1};
        config.varlen = true;
        config.batch = 4;
        config.project_k = config.project_v = project;
        memcpy(config.lens, (int64_t[]){100, 64, 300, 31}, 4 * sizeof(int64_t));
        config.params.block_size = 32;
        nsa_case *c = nsa_case_new(&config, &random);
        nsa_golden_set(c, NSA_K, file, "", "K");
        nsa_golden_set(c, NSA_V, file, "", "V");
        nsa_golden_set(c, NSA_W_K, file, "", "W_k");
        nsa_golden_set(c, NSA_W_V, file, "", "W_v");
        const nsa_set inputs =
            NSA_BIT(NSA_K) | NSA_BIT(NSA_V) | NSA_BIT(NSA_W_K) | NSA_BIT(NSA_W_V) | NSA_BIT(NSA_CU_SEQLENS);
        const nsa_set outputs = NSA_BIT(NSA_K_CMP) | NSA_BIT(NSA_V_CMP) | NSA_BIT(NSA_CU_SEQLENS_CMP);
        nsa_run(c, ctx, nsa_call_compress, inputs, outputs);
        const int64_t padded_count = 4 * PADDED * config.hkv * config.d;
        for (int i = 0; i < 2; i++) {
            double *padded = golden_get(file, prefix, cmp_names[i], padded_count);
            double *expected = varlen_rows(c, padded, n_cmp), *out = test_tensor_get(&c->tensor[cmp[i]]);
            test_check_golden(cmp_names[i], out, expected, c->entries * config.hkv * config.d, GOLDEN_BOUND);
            free(padded);
            free(expected);
            free(out);
            padded = golden_get(file, "", d_names[i], padded_count);
            expected = varlen_rows(c, padded, n_cmp);
            test_tensor_set(&c->tensor[d_cmp[i]], expected);
            free(padded);
            free(expected);
        }
        int32_t *cu = test_tensor_get_i32(&c->tensor[NSA_CU_SEQLENS_CMP]);
        for (int b = 0; b < 4; b++) assert_int_equal(cu[b + 1] - cu[b], n_cmp[b]);
        free(cu);
        nsa_run(c, ctx, nsa_call_compress_backward,
                inputs | NSA_BIT(NSA_CU_SEQLENS_CMP) | NSA_BIT(NSA_D_K_CMP) | NSA_BIT(NSA_D_V_CMP),
                NSA_BIT(NSA_D_K) | NSA_BIT(NSA_D_V) | NSA_BIT(NSA_D_W_K) | NSA_BIT(NSA_D_W_V));
        expect(c, NSA_D_K, file, project ? "proj.dK" : "noproj.dK");
        expect(c, NSA_D_V, file, project ? "proj.dV" : "noproj.dV");
        if (project) {
            expect(c, NSA_D_W_K, file, "proj.dW_k");
            expect(c, NSA_D_W_V, file, "proj.dW_v");
        }
        nsa_case_free(c);
    }
    free(n_cmp);
    quern_safetensors_close(file);
}

static void compress_varlen(void **state)
{
    (void)state;
    for_levels(varlen_on);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_and_paper),
        cmocka_unit_test(gating),
        cmocka_unit_test(compress_varlen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
