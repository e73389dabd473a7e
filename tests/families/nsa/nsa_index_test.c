/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_index_test.c - the block indexer: random calls against the float64 oracle at every CPU level, the
 * golden vector, NaN and ties, causality, the same bits however a sequence is cut, and what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "golden.h"
#include "nsa_index_case.h"
#include "op_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static block_index_shape random_shape(test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    static const int64_t sizes[] = {1, 3, 8, 16, 24, 64, 128, 200};
    block_index_shape h = {.params = QUERN_NSA_INDEX_PARAMS_INIT,
                           .dtype = dtypes[test_random_int(random, 0, 2)],
                           .layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1),
                           .varlen = test_random_one_in(random, 2),
                           .shared = test_random_one_in(random, 2),
                           .batch = test_random_int(random, 1, 3),
                           .lists = test_random_int(random, 1, 5),
                           .d = 8 * test_random_int(random, 1, 17)};
    quern_nsa_index_params *p = &h.params;
    p->select_block = sizes[test_random_int(random, 0, 7)];
    p->forced_first = test_random_int(random, 0, 2);
    p->forced_local = test_random_int(random, 0, 3);
    p->num_selected = p->forced_first + p->forced_local + test_random_int(random, 0, 5);
    if (p->num_selected == 0) p->num_selected = 1;
    if (test_random_one_in(random, 3)) p->query_offset = test_random_int(random, 0, 300);
    for (int b = 0; b < BLOCK_INDEX_BATCH; b++) {
        const bool little = test_random_one_in(random, 3);
        h.s[b] = test_random_int(random, 0, little ? 5 : 400);
        h.n[b] = test_random_one_in(random, 2) ? h.s[b] : test_random_int(random, 0, little ? 9 : 70);
    }
    h.spare = h.varlen ? test_random_int(random, 0, 4) : 0;
    h.scores = !h.varlen && test_random_one_in(random, 2);
    return h;
}

static void random_calls_match_the_oracle(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("nsa_index", 1);
    const int trials = test_trials(240);
    for (int trial = 0; trial < trials; trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const block_index_shape h = random_shape(&random);
        block_index_case c = block_index_case_make(&h, &random);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            char what[80];
            quern_context *ctx = test_context(level, 1 + trial % 3);
            snprintf(what, sizeof what, "trial %d at %s", trial, quern_cpu_level_name(level));
            block_index_case_run(&c, ctx);
            block_index_case_check(&c, what);
            quern_context_destroy(ctx);
        }
        block_index_case_free(&c);
    }
}

/* Long lists of long sequences: more blocks than a list keeps, and in bf16 what Hopper's kernel takes. */
static void long_sequences_match_the_oracle(void **state)
{
    static const struct {
        int64_t block, k, first, local, lists, d, n, s;
        bool shared, varlen;
    } shapes[] = {{128, 16, 0, 1, 4, 128, 70, 6000, true, false},
                  {64, 40, 1, 2, 3, 64, 50, 5000, true, true},
                  {256, 5, 2, 0, 2, 72, 260, 4300, false, true},
                  {64, 16, 0, 1, 2, 128, 600, 1900, false, false},
                  {128, 64, 0, 3, 6, 40, 30, 9000, true, false}};
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int half = 0; half < 2; half++) {
            char what[80];
            test_random random = {i + 40};
            block_index_shape h = {.params = QUERN_NSA_INDEX_PARAMS_INIT,
                                   .dtype = half ? QUERN_F16 : QUERN_BF16,
                                   .layout = TEST_CONTIGUOUS,
                                   .varlen = shapes[i].varlen,
                                   .shared = shapes[i].shared,
                                   .batch = 2,
                                   .lists = shapes[i].lists,
                                   .d = shapes[i].d,
                                   .n = {shapes[i].n, 3},
                                   .s = {shapes[i].s, 700},
                                   .spare = shapes[i].varlen ? 3 : 0};
            h.params.select_block = shapes[i].block;
            h.params.num_selected = shapes[i].k;
            h.params.forced_first = shapes[i].first;
            h.params.forced_local = shapes[i].local;
            block_index_case c = block_index_case_make(&h, &random);
            quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
            snprintf(what, sizeof what, "shape %zu in %s", i, quern_dtype_name(h.dtype));
            block_index_case_run(&c, ctx);
            block_index_case_check(&c, what);
            quern_context_destroy(ctx);
            block_index_case_free(&c);
        }
}

/* tests/vectors/msa_tiny.safetensors. */
static void the_golden_vector(void **state)
{
    enum { N = 150, LISTS = 2, D = 32, K = 3, BLOCKS = 10 };
    (void)state;
    block_index_shape h = {.params = QUERN_NSA_INDEX_PARAMS_INIT, .shared = true, .scores = true, .batch = 1};
    h.params.select_block = 16;
    h.params.num_selected = K;
    h.lists = LISTS;
    h.d = D;
    h.n[0] = h.s[0] = N;
    quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "msa_tiny");
    test_random random = {1};
    block_index_case c = block_index_case_make(&h, &random);
    double *q = golden_get(file, "", "q_I", N * LISTS * D), *k = golden_get(file, "", "k_I", N * D),
           *score = golden_get(file, "", "block_score", LISTS * N * BLOCKS);
    int32_t *idx = golden_get_i32(file, "", "block_idx", LISTS * N * K),
            *count = golden_get_i32(file, "", "block_count", LISTS * N);
    test_tensor_set(&c.t[BLOCK_INDEX_Q], q), test_tensor_set(&c.t[BLOCK_INDEX_K], k);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        quern_context *ctx = test_context(level, 2);
        block_index_case_run(&c, ctx);
        double *got = test_tensor_get(&c.t[BLOCK_INDEX_SCORE]);
        int32_t *lists = test_tensor_get_i32(&c.t[BLOCK_INDEX_IDX]),
                *counts = test_tensor_get_i32(&c.t[BLOCK_INDEX_COUNT]);
        test_check_golden("block_score", got, score, (int64_t)LISTS * N * BLOCKS, GOLDEN_BOUND);
        assert_memory_equal(lists, idx, sizeof *idx * LISTS * N * K);
        assert_memory_equal(counts, count, sizeof *count * LISTS * N);
        free(got), free(lists), free(counts);
        quern_context_destroy(ctx);
    }
    free(q), free(k), free(score), free(idx), free(count);
    block_index_case_free(&c);
    quern_safetensors_close(file);
}

static block_index_shape usual_shape(quern_dtype dtype, int64_t n)
{
    block_index_shape h = {.params = QUERN_NSA_INDEX_PARAMS_INIT,
                           .dtype = dtype,
                           .shared = true,
                           .scores = true,
                           .batch = 1,
                           .lists = 4,
                           .d = 64,
                           .n = {n},
                           .s = {n}};
    h.params.select_block = 16;
    h.params.num_selected = 4;
    return h;
}

/* Scores of few values, infinities and NaN: the oracle's lists exactly, ties to the lowest index. */
static void nan_and_ties(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++)
        for (int at = 0; at < 3; at++) {
            static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
            test_random random = {(uint64_t)kind + 7};
            block_index_shape h = usual_shape(dtypes[at], 230);
            h.params.forced_first = at;
            block_index_case c = block_index_case_make(&h, &random);
            double *k = test_tensor_get(&c.t[BLOCK_INDEX_K]), *q = test_tensor_get(&c.t[BLOCK_INDEX_Q]);
            for (int64_t i = 0; i < h.s[0] * h.d; i++) k[i] = (double)test_random_int(&random, -1, 1);
            for (int64_t i = 0; i < h.n[0] * h.lists * h.d; i++) q[i] = i % 16 == 0;
            for (int64_t s = 0; s < h.s[0]; s++)
                if (kind > 0 && test_random_one_in(&random, 30))
                    k[s * h.d] = kind == 2 && s % 2 ? -INFINITY : s % 3 ? NAN : INFINITY;
            test_tensor_set(&c.t[BLOCK_INDEX_K], k), test_tensor_set(&c.t[BLOCK_INDEX_Q], q);
            for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
                quern_context *ctx = test_context(level, 2);
                block_index_case_run(&c, ctx);
                block_index_case_check(&c, "nan and ties");
                quern_context_destroy(ctx);
            }
            free(k), free(q);
            block_index_case_free(&c);
        }
}

/* What stands in rows of later tokens, NaN too, changes no bit of an earlier row. */
static void later_tokens_change_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        test_random random = {(uint64_t)i + 3};
        const block_index_shape h = usual_shape(i ? QUERN_BF16 : QUERN_F32, 200);
        block_index_case c = block_index_case_make(&h, &random);
        const int64_t k = h.params.num_selected, blocks = (h.s[0] + 15) / 16;
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            double *keys = test_tensor_get(&c.t[BLOCK_INDEX_K]),
                   *later = test_tensor_get(&c.t[BLOCK_INDEX_K]);
            block_index_case_run(&c, ctx);
            test_tensor before = test_tensor_copy(&c.t[BLOCK_INDEX_SCORE]);
            int32_t *idx = test_tensor_get_i32(&c.t[BLOCK_INDEX_IDX]);
            for (int64_t cut = 1; cut < h.s[0]; cut += 41) {
                for (int64_t s = 0; s < h.s[0] * h.d; s++)
                    later[s] = s < cut * h.d ? keys[s] : s % 7 == 0 ? NAN : 9 * test_random_normal(&random);
                test_tensor_set(&c.t[BLOCK_INDEX_K], later);
                block_index_case_run(&c, ctx);
                int32_t *now = test_tensor_get_i32(&c.t[BLOCK_INDEX_IDX]);
                for (int64_t list = 0; list < h.lists; list++) {
                    const int64_t row = list * h.n[0];
                    assert_memory_equal(now + row * k, idx + row * k, (size_t)(cut * k) * sizeof *idx);
                    assert_memory_equal((float *)c.t[BLOCK_INDEX_SCORE].view.data + row * blocks,
                                        (float *)before.view.data + row * blocks,
                                        (size_t)(cut * blocks) * sizeof(float));
                }
                free(now);
            }
            test_tensor_set(&c.t[BLOCK_INDEX_K], keys);
            test_tensor_free(&before);
            free(keys), free(later), free(idx);
            quern_context_destroy(ctx);
        }
        block_index_case_free(&c);
    }
}

/* A view of tokens [first, first + n) of a tensor whose tokens stand along `along`. */
static quern_tensor tokens_of(const quern_tensor *t, int32_t along, int64_t first, int64_t n)
{
    quern_tensor part = *t;
    part.data = (char *)t->data + first * t->strides[along] * (int64_t)quern_dtype_size(t->dtype);
    part.shape[along] = n;
    return part;
}

static void run_views(quern_context *ctx, const quern_nsa_index_params *p,
                      const quern_tensor v[BLOCK_INDEX_TENSORS])
{
    const quern_nsa_index_tensors t = {
        sizeof t, &v[BLOCK_INDEX_Q],   &v[BLOCK_INDEX_K],     NULL,
        NULL,     &v[BLOCK_INDEX_IDX], &v[BLOCK_INDEX_COUNT], &v[BLOCK_INDEX_SCORE]};
    op_case_call(ctx, "nsa-index", QUERN_OP_FORWARD, p, &t);
}

/* A sequence in chunks, each on the keys so far, or at a query_offset on all keys, gives the bits of one
 * shot. */
static void chunks_change_no_bit(void **state)
{
    static const int64_t ends[] = {1, 2, 50, 51, 113, 160, 230};
    (void)state;
    for (int i = 0; i < 8; i++) {
        test_random random = {(uint64_t)i + 11};
        block_index_shape h = usual_shape(i % 2 ? QUERN_BF16 : QUERN_F16, 230);
        h.shared = i / 2 % 2;
        if (i < 4) h.params.select_block = 128;
        block_index_case whole = block_index_case_make(&h, &random);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            block_index_case_run(&whole, ctx);
            block_index_case parts = whole;
            for (int t = BLOCK_INDEX_IDX; t < BLOCK_INDEX_TENSORS; t++) {
                parts.t[t] = test_tensor_copy(&whole.t[t]);
                memset(parts.t[t].buffer, 0x55, parts.t[t].bytes);
            }
            for (int64_t e = 0, first = 0; e < 7; first = ends[e++]) {
                quern_nsa_index_params p = h.params;
                const int64_t n = ends[e] - first, blocks = (230 + p.select_block - 1) / p.select_block,
                              seen = (ends[e] + p.select_block - 1) / p.select_block;
                const bool all = i % 3 == 0; /* all keys */
                quern_tensor v[BLOCK_INDEX_TENSORS];
                for (int t = 0; t < BLOCK_INDEX_TENSORS; t++)
                    if (t == BLOCK_INDEX_Q || t >= BLOCK_INDEX_IDX)
                        v[t] = tokens_of(&parts.t[t].view, t == BLOCK_INDEX_Q ? 1 : 2, first, n);
                v[BLOCK_INDEX_K] = tokens_of(&parts.t[BLOCK_INDEX_K].view, 1, 0, all ? 230 : ends[e]);
                p.query_offset = all ? first : -1;
                if (!all) v[BLOCK_INDEX_SCORE].shape[3] = seen;
                run_views(ctx, &p, v);
                for (int64_t r = 0; !all && r < h.lists * n; r++)
                    for (int64_t j = seen; j < blocks; j++)
                        ((float *)v[BLOCK_INDEX_SCORE].data)[r / n * v[BLOCK_INDEX_SCORE].strides[1] +
                                                             r % n * v[BLOCK_INDEX_SCORE].strides[2] + j] =
                            -INFINITY;
            }
            for (int t = BLOCK_INDEX_IDX; t < BLOCK_INDEX_TENSORS; t++) {
                assert_true(test_tensor_same_bits(&parts.t[t], &whole.t[t]));
                test_tensor_free(&parts.t[t]);
            }
            quern_context_destroy(ctx);
        }
        block_index_case_free(&whole);
    }
}

/* Packed sequences give the lists of each alone. */
static void packed_sequences_change_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        test_random random = {(uint64_t)i + 31};
        block_index_shape h = usual_shape(i % 2 ? QUERN_BF16 : QUERN_F32, 0);
        const block_index_shape lengths = {.n = {70, 0, 1, 33, 200}, .s = {70, 5, 9, 33, 210}};
        h.varlen = true;
        h.scores = false;
        h.shared = i / 2;
        h.batch = BLOCK_INDEX_BATCH;
        memcpy(h.n, lengths.n, sizeof h.n), memcpy(h.s, lengths.s, sizeof h.s);
        h.spare = 3;
        block_index_case c = block_index_case_make(&h, &random);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        block_index_case_run(&c, ctx);
        int32_t *idx = test_tensor_get_i32(&c.t[BLOCK_INDEX_IDX]);
        for (int64_t b = 0; b < h.batch; b++) {
            block_index_shape one = h;
            one.varlen = false;
            one.batch = 1;
            one.n[0] = h.n[b], one.s[0] = h.s[b];
            block_index_case alone = block_index_case_make(&one, &random);
            double *q = test_tensor_get(&c.t[BLOCK_INDEX_Q]), *k = test_tensor_get(&c.t[BLOCK_INDEX_K]);
            test_tensor_set(&alone.t[BLOCK_INDEX_Q], q + block_index_query0(&h, b) * h.lists * h.d);
            test_tensor_set(&alone.t[BLOCK_INDEX_K],
                            k + block_index_key0(&h, b) * (h.shared ? 1 : h.lists) * h.d);
            block_index_case_run(&alone, ctx);
            int32_t *lists = test_tensor_get_i32(&alone.t[BLOCK_INDEX_IDX]);
            for (int64_t list = 0; list < h.lists; list++)
                assert_memory_equal(lists + list * one.n[0] * h.params.num_selected,
                                    idx + (list * c.list_rows + block_index_query0(&h, b)) *
                                              h.params.num_selected,
                                    (size_t)(one.n[0] * h.params.num_selected) * sizeof *idx);
            free(q), free(k), free(lists);
            block_index_case_free(&alone);
        }
        free(idx);
        quern_context_destroy(ctx);
        block_index_case_free(&c);
    }
}

static void bad_calls_are_refused(void **state)
{
    (void)state;
    test_random random = {5};
    block_index_shape h = usual_shape(QUERN_F32, 40);
    h.shared = false;
    block_index_case c = block_index_case_make(&h, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    for (int i = 0; i < 9; i++) {
        static const char *const sentences[] = {
            "num_selected is 4: at least the 5 forced blocks (first 2, local 3) are accepted",
            "select_block is 0: 1 to 2147483647",
            "query_offset is -2: -1 to 2147483647",
            "k_index.shape[2] is 3: 4 is accepted",
            "k_index: dtype bf16: f32 is accepted",
            "k_index is NULL: a tensor is needed",
            "cu_seqlens_kv is given without cu_seqlens_q",
            "block_idx.shape[3] is 4: 5 is accepted",
            "block_score.shape[3] is 3: 2 is accepted"};
        quern_nsa_index_params p = h.params;
        quern_nsa_index_tensors t = QUERN_NSA_INDEX_TENSORS_INIT;
        quern_tensor k = c.t[BLOCK_INDEX_K].view;
        char memory[64];
        op_case_bind("nsa-index", c.t, BLOCK_INDEX_TENSORS, OP_CASE_ALL, &t);
        t.k_index = &k;
        if (i == 0) p.forced_first = 2, p.forced_local = 3;
        if (i == 1) p.select_block = 0;
        if (i == 2) p.query_offset = -2;
        if (i == 3) k.shape[2] = 3;
        if (i == 4) k.dtype = QUERN_BF16;
        if (i == 5) t.k_index = NULL;
        if (i == 6) t.cu_seqlens_kv = &k;
        if (i == 7) p.num_selected = 5;
        if (i == 8) p.select_block = 32;
        assert_int_equal(quern_nsa_index(ctx, NULL, &p, &t, memory, sizeof memory),
                         QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), sentences[i]) == NULL)
            fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentences[i]);
        for (int o = BLOCK_INDEX_IDX; o < BLOCK_INDEX_TENSORS; o++)
            test_tensor_check_unchanged(&c.t[o], "a result of a refused call");
    }
    quern_context_destroy(ctx);
    block_index_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls_match_the_oracle),
                                       cmocka_unit_test(long_sequences_match_the_oracle),
                                       cmocka_unit_test(the_golden_vector),
                                       cmocka_unit_test(nan_and_ties),
                                       cmocka_unit_test(later_tokens_change_no_bit),
                                       cmocka_unit_test(chunks_change_no_bit),
                                       cmocka_unit_test(packed_sequences_change_no_bit),
                                       cmocka_unit_test(bad_calls_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
