/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_golden.c - the golden vectors of the whole of NSA. */
#include "nsa_golden.h"

#include "cmocka_c11.h"
#include "compare.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static nsa_config small_config(bool started)
{
    nsa_config c = {.params = QUERN_NSA_PARAMS_INIT,
                    .batch = 1,
                    .n = 192,
                    .h = 4,
                    .hkv = 2,
                    .d = 32,
                    .dv = 32,
                    .project_k = true,
                    .project_v = true};
    c.params.block_size = 32;
    c.params.num_selected = 3;
    c.params.tile = 64;
    c.params.window = 64;
    c.params.scope = QUERN_NSA_SCOPE_HEAD;
    c.params.metric = QUERN_NSA_METRIC_MEAN_LOGIT;
    c.params.forced_first = c.params.forced_local = 0;
    c.params.compressed_visibility = started ? QUERN_NSA_VISIBLE_STARTED : QUERN_NSA_VISIBLE_COMPLETE;
    c.params.gate = QUERN_NSA_GATE_WEIGHTS;
    return c;
}

static nsa_config paper_config(void)
{
    nsa_config c = {.params = QUERN_NSA_PARAMS_INIT,
                    .batch = 1,
                    .n = 250,
                    .h = 6,
                    .hkv = 2,
                    .d = 32,
                    .dv = 32,
                    .project_k = true,
                    .project_v = true};
    c.params.block_size = 16;
    c.params.num_selected = 6;
    c.params.window = 48;
    c.params.gate = QUERN_NSA_GATE_WEIGHTS;
    return c;
}

int nsa_golden_cases(nsa_golden cases[16])
{
    static const struct {
        const char *prefix, *lists;
        bool started;
    } small[] = {
        {"full.mslk.", "full.", true},           {"full.causal.", "full.", false},
        {"nogate.mslk.", "nogate.", true},       {"nogate.causal.", "nogate.", false},
        {"noproj.mslk.", "noproj.", true},       {"noproj.causal.", "noproj.", false},
        {"noncausal.mslk.", "noncausal.", true},
    };
    int n = 0;
    for (; n < (int)(sizeof small / sizeof *small); n++) {
        nsa_golden g = {"nsa_small", small[n].prefix, small[n].lists, small_config(small[n].started)};
        if (strncmp(g.prefix, "nogate", 6) == 0) g.config.params.gate = QUERN_NSA_GATE_NONE;
        if (strncmp(g.prefix, "noproj", 6) == 0) g.config.project_k = g.config.project_v = false;
        if (strncmp(g.prefix, "noncausal", 9) == 0) g.config.params.causal = false;
        cases[n] = g;
    }
    const nsa_golden paper = {"nsa_paper_b", "", NULL, paper_config()};
    cases[n++] = paper;
    return n;
}

void nsa_golden_set(nsa_case *c, nsa_slot slot, const quern_safetensors *file, const char *prefix,
                    const char *name)
{
    if (c->tensor[slot].buffer == NULL) return;
    double *values = golden_get(file, prefix, name, test_tensor_count(&c->tensor[slot]));
    test_tensor_set(&c->tensor[slot], values);
    free(values);
}

nsa_case *nsa_golden_case(const nsa_golden *golden, const quern_safetensors *file)
{
    test_random random = {1};
    nsa_case *c = nsa_case_new(&golden->config, &random);
    nsa_golden_set(c, NSA_Q, file, "", "Q");
    nsa_golden_set(c, NSA_K, file, "", "K");
    nsa_golden_set(c, NSA_V, file, "", "V");
    nsa_golden_set(c, NSA_W_K, file, "", "W_k");
    nsa_golden_set(c, NSA_W_V, file, "", "W_v");
    nsa_golden_set(c, NSA_W_GATE, file, "", "gate");
    nsa_golden_set(c, NSA_D_O, file, "", "dO");
    return c;
}

/* Branch outputs of nsa_paper_b are stored for some tokens only. */
static void compare_rows(const nsa_case *c, const quern_safetensors *file, nsa_slot slot, const char *name,
                         const double *values)
{
    const int64_t width = c->config.h * c->config.dv;
    int32_t *rows = golden_get_i32(file, "", "branch_rows", 12);
    double *expected = golden_get(file, "", name, 12 * width), *out = test_doubles(12 * width);
    for (int i = 0; i < 12; i++)
        memcpy(out + i * width, values + rows[i] * width, sizeof *out * (size_t)width);
    test_check_golden(nsa_slot_name(slot), out, expected, 12 * width, GOLDEN_BOUND);
    free(rows);
    free(expected);
    free(out);
}

void nsa_golden_compare(const nsa_golden *golden, const nsa_case *c, const quern_safetensors *file,
                        double *const values[NSA_SLOTS])
{
    static const struct {
        nsa_slot slot;
        const char *name;
        bool per_case; /* stored once per case, not per visibility */
    } tensors[] = {
        {NSA_O, "O", false},
        {NSA_D_Q, "dQ", false},
        {NSA_D_K, "dK", false},
        {NSA_D_V, "dV", false},
        {NSA_D_W_K, "dW_k", false},
        {NSA_D_W_V, "dW_v", false},
        {NSA_D_W_GATE, "dgate", false},
        {NSA_O_CMP, "O_cmp", false},
        {NSA_LSE_CMP, "lse_cmp", false},
        {NSA_O_SLC, "O_slc", true},
        {NSA_O_WIN, "O_sld", true},
        {NSA_LSE_SLC, "lse_slc", true},
        {NSA_LSE_WIN, "lse_sld", true},
        {NSA_GATES, "gates", true},
        {NSA_K_CMP, "K_cmp", true},
        {NSA_V_CMP, "V_cmp", true},
        {NSA_O_CMP, "O_cmp.rows", false},
        {NSA_O_SLC, "O_slc.rows", false},
        {NSA_O_WIN, "O_sld.rows", false},
    };
    int compared = 0;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        const nsa_slot slot = tensors[i].slot;
        const bool shared = tensors[i].per_case && golden->lists != NULL;
        const char *prefix = shared ? golden->lists : golden->prefix;
        char name[200];
        snprintf(name, sizeof name, "%s%s", prefix, tensors[i].name);
        if (values[slot] == NULL || !quern_safetensors_has(file, name)) continue;
        compared++;
        if (strstr(name, ".rows") != NULL) {
            compare_rows(c, file, slot, name, values[slot]);
            continue;
        }
        const int64_t count = test_tensor_count(&c->tensor[slot]);
        double *expected = golden_get(file, prefix, tensors[i].name, count);
        test_check_golden(name, values[slot], expected, count, GOLDEN_BOUND);
        free(expected);
    }
    if (compared == 0) fail_msg("%s has nothing named %s", golden->file, golden->prefix);
}

void nsa_golden_compare_lists(const nsa_golden *golden, const nsa_case *c, const quern_safetensors *file,
                              const int32_t *block_idx, const int32_t *block_count)
{
    const int64_t k = c->config.params.num_selected, count = test_tensor_count(&c->tensor[NSA_BLOCK_IDX]);
    int32_t *expected = golden->lists != NULL ? golden_get_i32(file, golden->lists, "block_idx_sorted", count)
                                              : golden_get_i32(file, "", "sel_idx", count);
    for (int64_t i = 0; i < count; i++) {
        if (block_idx[i] != expected[i])
            fail_msg("%s%s: block_idx[%lld] is %d, expected %d", golden->file, golden->prefix, (long long)i,
                     block_idx[i], expected[i]);
    }
    for (int64_t row = 0; row < count / k; row++) {
        int32_t valid = 0;
        for (int64_t i = 0; i < k; i++) valid += expected[row * k + i] >= 0;
        assert_int_equal(block_count[row], valid);
    }
    free(expected);
}
