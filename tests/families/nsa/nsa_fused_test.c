/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_fused_test.c - the forward in one stage against the same from separate stages, over sizes of several
 * chunks of rows; the same bits from any number of threads there; and the bound of the forward's workspace.
 */
#include "cmocka_c11.h"
#include "compare.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/levels.h"
#include "nsa_composed.h"
#include "nsa_random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const nsa_call composed = {"composed forward", nsa_composed_workspace, nsa_composed_forward};

/* Everything that the branches do not round or sum has the same bits; the rest agrees within the bounds.
 * Where lists name every block, separate stages sum the selected branch as a range. */
static void compare(const nsa_case *c, nsa_set set, const test_tensor copies[NSA_SLOTS], const char *what)
{
    const nsa_set summed = NSA_BIT(NSA_O) | NSA_BIT(NSA_O_CMP) | NSA_BIT(NSA_O_SLC) | NSA_BIT(NSA_O_WIN) |
                           NSA_BIT(NSA_LSE_SLC) | NSA_BIT(NSA_LSE_WIN);
    char name[900];
    for (int i = 0; i < NSA_SLOTS; i++) {
        if ((set & NSA_BIT(i)) == 0) continue;
        const test_tensor *t = &c->tensor[i];
        if ((summed & NSA_BIT(i)) == 0) {
            if (!test_tensor_same_bits(t, &copies[i]))
                fail_msg("%s: %s differs from the composed forward's", what, nsa_slot_name(i));
            continue;
        }
        double *out = test_tensor_get(t), *expected = test_tensor_get(&copies[i]);
        snprintf(name, sizeof name, "%s: %s", what, nsa_slot_name(i));
        test_check(name, out, expected, test_tensor_count(t), test_forward_bound(t->view.dtype));
        free(out);
        free(expected);
    }
}

/* o alone (inference), everything (training), or o and some of the rest. */
static nsa_set draw_outputs(test_random *random, nsa_set all)
{
    const int64_t kind = test_random_int(random, 0, 2);
    nsa_set set = NSA_BIT(NSA_O);
    for (int i = 0; i < NSA_SLOTS && kind > 0; i++)
        if (kind == 1 || test_random_one_in(random, 2)) set |= NSA_BIT(i);
    return set & all;
}

static void compare_forwards(const nsa_config *config, test_random *random, nsa_set outputs, const char *what)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    nsa_case *c = nsa_case_random(config, random);
    test_tensor expected[NSA_SLOTS];
    outputs = nsa_present(c, outputs & nsa_forward_outputs(c));
    nsa_run(c, ctx, composed, nsa_forward_inputs(c), outputs);
    nsa_copy(c, outputs, expected);
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), outputs);
    compare(c, outputs, expected, what);
    nsa_free_copies(expected);
    nsa_case_free(c);
    quern_context_destroy(ctx);
}

/* Around the lengths at which separate stages leave work out: no entries (below l), one window (W), every
 * block chosen (k l'). */
static void short_sequences_agree(void **state)
{
    static const int64_t lengths[] = {1, 7, 8, 19, 20, 21, 39, 40, 41};
    (void)state;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int kind = 0; kind < 5; kind++) {
            test_random random = {i + 1};
            nsa_config config = nsa_config_small(); /* l = l' = 8, k 5, W 20 */
            char text[600];
            config.n = config.lens[0] = lengths[i];
            config.lens[1] = 1;
            config.varlen = kind == 1;
            config.separate_slc = kind == 2;
            config.separate_win = kind == 3;
            config.params.causal = kind != 4;
            config.params.gate = QUERN_NSA_GATE_WEIGHTS;
            nsa_config_describe(&config, text);
            compare_forwards(&config, &random, NSA_BIT(NSA_O), text);
            compare_forwards(&config, &random, NSA_BIT(NSA_O) | NSA_BIT(NSA_O_WIN), text);
            compare_forwards(&config, &random, ~(nsa_set)0, text);
        }
}

static void fused_agrees_with_composed(void **state)
{
    const uint64_t seed = test_seed("fused_agrees_with_composed", 61);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const nsa_config config = nsa_config_random(&random, trial % 3 == 0 ? 2500 : 200);
        const quern_cpu_level level = test_random_level(&random);
        char text[600], what[700];
        snprintf(what, sizeof what, "QUERN_TEST_TRIAL=%d: %s: %s", trial, quern_cpu_level_name(level),
                 nsa_config_describe(&config, text));
        quern_context *one = test_context(level, 1), *three = test_context(level, 3);
        nsa_case *c = nsa_case_random(&config, &random);
        const nsa_set outputs = draw_outputs(&random, nsa_forward_outputs(c));
        test_tensor expected[NSA_SLOTS], alone[NSA_SLOTS];
        nsa_run(c, three, composed, nsa_forward_inputs(c), outputs);
        nsa_copy(c, outputs, expected);
        nsa_run(c, one, nsa_call_forward, nsa_forward_inputs(c), outputs);
        compare(c, outputs, expected, what);
        nsa_copy(c, outputs, alone);
        nsa_run(c, three, nsa_call_forward, nsa_forward_inputs(c), outputs);
        nsa_check_same_bits(c, outputs, alone, "3 threads after 1");
        nsa_free_copies(expected);
        nsa_free_copies(alone);
        nsa_case_free(c);
        quern_context_destroy(one);
        quern_context_destroy(three);
    }
}

/* A call of the table of bounds: parameters that are not 0 replace the defaults. */
typedef struct bound_case {
    int64_t batch, n, h, hkv, d, dv;
    quern_dtype dtype;
    int64_t block, stride, select, k, tile, groups;
    quern_nsa_metric metric;
    quern_nsa_scope scope;
    quern_nsa_compress_kind compress;
    bool varlen, separate, save, no_window;
} bound_case;

static quern_tensor shaped(quern_dtype dtype, int32_t ndim, int64_t s0, int64_t s1, int64_t s2, int64_t s3)
{
    quern_tensor t = {.dtype = dtype, .ndim = ndim, .shape = {s0, s1, s2, s3}};
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        t.strides[i] = stride;
        stride *= t.shape[i];
    }
    return t;
}

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* One copy of K and V in panels (sequences start at multiples of 64 tokens, values are 16 wide) + compressed
 * K and V + lists + one lse + 4 MiB a thread. */
static size_t bound_of(const bound_case *b, const quern_nsa_params *p, int64_t words, int32_t threads)
{
    const int64_t stride = p->stride > 0 ? p->stride : p->block_size,
                  element = (int64_t)quern_dtype_size(b->dtype);
    const int64_t tokens = b->varlen ? round_up(b->n, 64) + 64 * b->batch : b->batch * round_up(b->n, 64);
    const int64_t entries = b->varlen ? b->n / stride : b->batch * ((b->n - p->block_size) / stride + 1);
    const int64_t rows = b->varlen ? b->n / p->tile + b->batch : b->batch * round_up(b->n, p->tile) / p->tile;
    const int64_t list_heads = p->scope == QUERN_NSA_SCOPE_HEAD ? b->h : b->hkv;
    const int64_t panels = tokens * b->hkv * (b->d + round_up(b->dv, 16)) * words,
                  lse = (b->varlen ? 1 : b->batch) * b->n * b->h * 4;
    const int64_t compressed = entries * b->hkv * (b->d + b->dv) * element,
                  lists = list_heads * rows * (p->num_selected + p->max_compressed_groups) * 4;
    return (size_t)(panels + (b->save ? 0 : compressed + lists) + lse + ((int64_t)threads << 22));
}

static void check_bound(const bound_case *b, int32_t threads)
{
    quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
    const quern_dtype act = b->dtype;
    const bool varlen = b->varlen;
    if (b->block > 0) p.block_size = b->block;
    if (b->k > 0) p.num_selected = b->k;
    if (b->tile > 0) p.tile = b->tile;
    p.stride = b->stride;
    p.select_block = b->select;
    p.max_compressed_groups = b->groups;
    p.metric = b->metric;
    p.scope = b->scope;
    p.compress = b->compress;
    p.gate = QUERN_NSA_GATE_WEIGHTS;
    if (b->no_window) p.branches = QUERN_NSA_BRANCH_CMP | QUERN_NSA_BRANCH_SLC;
    const int64_t stride = p.stride > 0 ? p.stride : p.block_size,
                  entries = varlen ? b->n / stride : (b->n - p.block_size) / stride + 1;
    const int64_t l = p.block_size, heads = p.scope == QUERN_NSA_SCOPE_HEAD ? b->h : b->hkv,
                  rows = varlen ? b->n / p.tile + b->batch : round_up(b->n, p.tile) / p.tile;
#define ROWS(dtype, n, h, d) (varlen ? shaped(dtype, 3, n, h, d, 0) : shaped(dtype, 4, b->batch, n, h, d))
    const quern_tensor q = ROWS(act, b->n, b->h, b->d), k = ROWS(act, b->n, b->hkv, b->d),
                       v = ROWS(act, b->n, b->hkv, b->dv), o = ROWS(act, b->n, b->h, b->dv);
    const quern_tensor w_gate = shaped(QUERN_F32, 3, b->h, 3, b->d, 0),
                       cu = shaped(QUERN_I32, 1, b->batch + 1, 0, 0, 0);
    const quern_tensor k_cmp = ROWS(act, entries, b->hkv, b->d), v_cmp = ROWS(act, entries, b->hkv, b->dv);
    const quern_tensor w_k = shaped(QUERN_F32, 3, b->hkv, l * b->d, b->d, 0),
                       w_v = shaped(QUERN_F32, 3, b->hkv, l * b->dv, b->dv, 0);
    const quern_tensor lse =
        varlen ? shaped(QUERN_F32, 2, b->h, b->n, 0, 0) : shaped(QUERN_F32, 3, b->batch, b->h, b->n, 0);
    const quern_tensor idx = varlen ? shaped(QUERN_I32, 3, heads, rows, p.num_selected, 0)
                                    : shaped(QUERN_I32, 4, b->batch, heads, rows, p.num_selected);
#undef ROWS
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    t.q = &q;
    t.k = &k;
    t.v = &v;
    t.o = &o;
    t.w_gate = &w_gate;
    if (varlen) t.cu_seqlens = &cu;
    if (b->separate) {
        t.k_slc = t.k_win = &k;
        t.v_slc = t.v_win = &v;
    }
    if (b->separate && b->no_window) t.k_win = t.v_win = NULL;
    if (b->compress == QUERN_NSA_COMPRESS_LINEAR) {
        t.w_k = &w_k;
        t.w_v = &w_v;
    }
    if (b->compress == QUERN_NSA_COMPRESS_GIVEN || b->save) {
        t.k_cmp = &k_cmp;
        t.v_cmp = &v_cmp;
    }
    if (b->save) {
        t.o_cmp = t.o_slc = &o;
        t.lse_cmp = t.lse_slc = &lse;
        t.block_idx = &idx;
        if (!b->no_window) {
            t.o_win = &o;
            t.lse_win = &lse;
        }
    }
    if (varlen && (b->compress == QUERN_NSA_COMPRESS_GIVEN)) t.cu_seqlens_cmp = &cu;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, threads); /* or of as many as QUERN_TEST_THREADS says */
        const int own = quern_context_threads(ctx);
        const int64_t words = act == QUERN_BF16 && cpu_kernels_for(level)->attention->mm_bf16 != NULL ? 2 : 4;
        size_t bytes = 0;
        if (quern_nsa_forward_workspace(ctx, &p, &t, &bytes) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        const size_t bound = bound_of(b, &p, words, own);
        if (bytes > bound)
            fail_msg("N %lld, H %lld/%lld, D %lld/%lld, l %lld, d %lld, tile %lld, %s, %d threads at %s: %zu "
                     "bytes of workspace, at most %zu are allowed",
                     (long long)b->n, (long long)b->h, (long long)b->hkv, (long long)b->d, (long long)b->dv,
                     (long long)l, (long long)stride, (long long)p.tile, quern_dtype_name(act), own,
                     quern_cpu_level_name(level), bytes, bound);
        quern_context_destroy(ctx);
    }
}

static const bound_case bounded[] = {
    {.batch = 1,
     .n = 32768,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F32,
     .tile = 64,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT},
    {.batch = 1,
     .n = 32768,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX},
    {.batch = 1,
     .n = 131072,
     .h = 4,
     .hkv = 1,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX},
    {.batch = 1,
     .n = 131072,
     .h = 4,
     .hkv = 1,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F32,
     .tile = 64,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT,
     .separate = true},
    {.batch = 1,
     .n = 32768,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_BF16,
     .tile = 64,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT},
    {.batch = 1,
     .n = 32768,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F16,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT,
     .save = true},
    {.batch = 1,
     .n = 1048576,
     .h = 4,
     .hkv = 1,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_BF16,
     .tile = 64,
     .groups = 16,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT},
    {.batch = 1,
     .n = 1048576,
     .h = 4,
     .hkv = 1,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_BF16,
     .groups = 16,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT},
    {.batch = 1,
     .n = 65536,
     .h = 64,
     .hkv = 4,
     .d = 192,
     .dv = 128,
     .dtype = QUERN_BF16,
     .block = 32,
     .stride = 16,
     .select = 64,
     .metric = QUERN_NSA_METRIC_SOFTMAX},
    {.batch = 1,
     .n = 65536,
     .h = 64,
     .hkv = 4,
     .d = 192,
     .dv = 128,
     .dtype = QUERN_F32,
     .block = 32,
     .stride = 16,
     .select = 64,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .separate = true,
     .save = true},
    {.batch = 2,
     .n = 16384,
     .h = 8,
     .hkv = 8,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .scope = QUERN_NSA_SCOPE_HEAD,
     .k = 64},
    {.batch = 4,
     .n = 8192,
     .h = 4,
     .hkv = 4,
     .d = 32,
     .dv = 32,
     .dtype = QUERN_F16,
     .tile = 256,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT,
     .scope = QUERN_NSA_SCOPE_HEAD},
    {.batch = 1,
     .n = 20000,
     .h = 16,
     .hkv = 1,
     .d = 256,
     .dv = 256,
     .dtype = QUERN_F32,
     .tile = 256,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .block = 16,
     .k = 40},
    {.batch = 1,
     .n = 20000,
     .h = 16,
     .hkv = 1,
     .d = 256,
     .dv = 248,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .block = 16,
     .no_window = true},
    {.batch = 8,
     .n = 65536,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .varlen = true},
    {.batch = 8,
     .n = 65536,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 64,
     .dtype = QUERN_BF16,
     .tile = 64,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT,
     .varlen = true,
     .separate = true},
    {.batch = 1,
     .n = 16384,
     .h = 8,
     .hkv = 2,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .compress = QUERN_NSA_COMPRESS_LINEAR},
    {.batch = 1,
     .n = 16384,
     .h = 8,
     .hkv = 2,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_BF16,
     .metric = QUERN_NSA_METRIC_SOFTMAX,
     .block = 32,
     .stride = 8,
     .select = 32,
     .compress = QUERN_NSA_COMPRESS_LINEAR,
     .varlen = true},
    {.batch = 1,
     .n = 32768,
     .h = 4,
     .hkv = 4,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT,
     .block = 16,
     .compress = QUERN_NSA_COMPRESS_GIVEN},
    {.batch = 1,
     .n = 512,
     .h = 8,
     .hkv = 2,
     .d = 128,
     .dv = 128,
     .dtype = QUERN_F32,
     .metric = QUERN_NSA_METRIC_SOFTMAX},
    {.batch = 1,
     .n = 4194304,
     .h = 4,
     .hkv = 1,
     .d = 64,
     .dv = 64,
     .dtype = QUERN_BF16,
     .groups = 16,
     .metric = QUERN_NSA_METRIC_MEAN_LOGIT},
};

static void workspace_stays_within_the_bound(void **state)
{
    (void)state;
#ifdef QUERN_TEST_GPU
    print_message("the bound is the CPU's\n");
    skip();
#endif
    for (size_t i = 0; i < sizeof bounded / sizeof *bounded; i++)
        for (int32_t threads = 1; threads <= 16; threads *= 4) check_bound(&bounded[i], threads);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_sequences_agree),
        cmocka_unit_test(fused_agrees_with_composed),
        cmocka_unit_test(workspace_stays_within_the_bound),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
