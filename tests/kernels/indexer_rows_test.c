/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_rows_test.c - the indexer's kernels at every level against double. Bounds are those of
 * src/cpu/kernels.inc. */
#include "cmocka_c11.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/formats/format_kernels.h"
#include "cpu/levels.h"
#include "kernel_time.h"
#include "kernels.h"
#include "oracle/dsv4.h"
#include "tensor.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS_MOST = 70, WORDS_MOST = 130, PANEL_MOST = 64, PARTS = 2 };

/* A word: a float, or two bf16 values. */
typedef struct word {
    float value[PARTS];
} word;

static void store_word(bool pairs, word w, float *to)
{
    uint32_t bits[PARTS];
    memcpy(bits, w.value, sizeof bits);
    if (pairs) bits[0] = bits[0] >> 16 | (bits[1] & 0xffff0000u);
    memcpy(to, bits, sizeof *to);
}

static word random_word(test_random *random, bool pairs)
{
    word w = {{0}};
    for (int i = 0; i < (pairs ? PARTS : 1); i++)
        w.value[i] = (float)test_round(pairs ? QUERN_BF16 : QUERN_F32, test_random_normal(random));
    return w;
}

static void check_score(const indexer_kernels *kernels, bool pairs, int64_t heads, int64_t words,
                        test_random *random)
{
    static word q[HEADS_MOST * WORDS_MOST], key[WORDS_MOST * PANEL_MOST];
    static float q_words[HEADS_MOST * WORDS_MOST + 1], key_words[WORDS_MOST * PANEL_MOST + 1], w[HEADS_MOST];
    float sum[PANEL_MOST + 2];
    const int64_t panel = kernels->panel;
    for (int64_t i = 0; i < heads * words; i++)
        store_word(pairs, q[i] = random_word(random, pairs), &q_words[i + 1]);
    for (int64_t i = 0; i < words * panel; i++)
        store_word(pairs, key[i] = random_word(random, pairs), &key_words[i + 1]);
    for (int64_t h = 0; h < heads; h++) w[h] = (float)test_random_normal(random);
    if (test_random_one_in(random, 3) && words > 0) { /* NaN in one key stays there */
        key[1].value[0] = NAN;
        store_word(pairs, key[1], &key_words[2]);
    }
    sum[0] = sum[panel + 1] = 77;
    const indexer_tile tile = {q_words + 1,
                               w,
                               heads,
                               words,
                               key_words + 1,
                               sum + 1,
                               (const char *)key_words,
                               test_random_int(random, 0, 3000)};
    (pairs ? kernels->score_bf16 : kernels->score_f32)(&tile);
    TEST_TIME("indexer", pairs ? "score_bf16" : "score_f32", kernels->level,
              heads * words * panel * (pairs ? PARTS : 1),
              (pairs ? kernels->score_bf16 : kernels->score_f32)(&tile));
    const double terms = (double)(heads + words * (pairs ? PARTS : 1));
    const double unit =
        test_kernel_bound("indexer", pairs ? "score_bf16" : "score_f32", kernels->level, terms, 0);
    assert_true(sum[0] == 77 && sum[panel + 1] == 77);
    for (int64_t j = 0; j < panel; j++) {
        double exact = 0, size = 0;
        for (int64_t h = 0; h < heads; h++) {
            double dot = 0, absolute = 0;
            for (int64_t p = 0; p < words; p++)
                for (int i = 0; i < PARTS; i++) {
                    const double term =
                        (double)q[h * words + p].value[i] * (double)key[p * panel + j].value[i];
                    dot += term;
                    absolute += fabs(term);
                }
            exact += (double)w[h] * (dot < 0 ? 0 : dot);
            size += fabs((double)w[h]) * absolute;
        }
        const double out = (double)sum[j + 1];
        if (isnan(exact) ? !isnan(out) : !(fabs(out - exact) <= unit * size))
            fail_msg("%s, heads %lld, words %lld: [%lld] is %.9g, expected %.9g within %.3g",
                     quern_cpu_level_name(kernels->level), (long long)heads, (long long)words, (long long)j,
                     out, exact, unit * size);
    }
}

static void scores(void **state)
{
    static const int64_t heads[] = {1, 2, 3, 5, 6, 7, 11, 64, 70}, words[] = {0, 1, 4, 31, 64, 130};
    (void)state;
    test_random random = {test_seed("scores", 5)};
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const indexer_kernels *kernels = cpu_kernels_for(level)->indexer;
        for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
            for (size_t j = 0; j < sizeof words / sizeof *words; j++) {
                check_score(kernels, false, heads[i], words[j], &random);
                if (kernels->score_bf16 != NULL) check_score(kernels, true, heads[i], words[j], &random);
            }
    }
}

static void scaling(void **state)
{
    (void)state;
    test_random random = {test_seed("scaling", 6)};
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const indexer_kernels *kernels = cpu_kernels_for(level)->indexer;
        const double unit = test_kernel_bound("indexer", "scale_scores", kernels->level, 1, 0);
        for (int64_t n = 0; n <= PANEL_MOST; n++) {
            float x[PANEL_MOST + 1], key[PANEL_MOST], before[PANEL_MOST + 1];
            for (int64_t i = 0; i <= n; i++) x[i] = before[i] = (float)test_random_normal(&random);
            for (int64_t i = 0; i < n; i++) key[i] = (float)fabs(test_random_normal(&random));
            if (n > 3) x[3] = before[3] = -0.0f;
            kernels->scale_scores(x, n % 2 ? key : NULL, 0.375f, n);
            assert_true(x[n] == before[n]);
            for (int64_t i = 0; i < n; i++) {
                const double exact = (double)before[i] * (n % 2 ? (double)key[i] : 1) * 0.375;
                assert_true(fabs((double)x[i] - exact) <= unit * fabs(exact));
                assert_true(x[i] != 0 || !signbit(x[i]));
            }
            TEST_TIME("indexer", "scale_scores", kernels->level, 8 * n,
                      kernels->scale_scores(x, NULL, 1.0f, n));
        }
    }
}

/* The rank of a score by its order among all others. */
static int32_t rank_of(float x)
{
    int32_t bits;
    if (isnan(x)) return RANK_NAN;
    if (x == 0) return 0;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? (int32_t)(0x80000000u - (uint32_t)bits) - 1 : bits;
}

static void collecting(void **state)
{
    static const float edges[] = {NAN,   -NAN,      INFINITY,   -INFINITY, 0.0f,
                                  -0.0f, 0x1p-149f, -0x1p-149f, 3.5f,      -3.5f};
    (void)state;
    test_random random = {test_seed("collecting", 7)};
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const indexer_kernels *kernels = cpu_kernels_for(level)->indexer;
        assert_true(test_kernel_bound("indexer", "collect", kernels->level, 1, 0) == 0);
        for (int trial = 0; trial < 300; trial++) {
            const int64_t n = test_random_int(&random, 0, PANEL_MOST);
            float x[PANEL_MOST];
            int32_t rank[PANEL_MOST + 4], index[PANEL_MOST + 4];
            for (int64_t i = 0; i < n; i++)
                x[i] = test_random_one_in(&random, 4) ? edges[test_random_int(&random, 0, 9)]
                                                      : (float)test_random_normal(&random);
            indexer_best best = {rank, index, 1,
                                 trial % 3 == 0 ? INT32_MIN : rank_of(edges[test_random_int(&random, 0, 9)])};
            rank[0] = index[0] = 5;
            kernels->collect(x, n, 1000, &best);
            int64_t at = 1;
            for (int64_t i = 0; i < n; i++) {
                if (rank_of(x[i]) <= best.least) continue;
                assert_true(at < best.n && rank[at] == rank_of(x[i]) && index[at] == 1000 + i);
                at++;
            }
            assert_int_equal(best.n, at);
            TEST_TIME("indexer", "collect", kernels->level, 4 * n,
                      (best.n = 1, kernels->collect(x, n, 1000, &best)));
            assert_true(rank[0] == 5 && index[0] == 5);
        }
    }
}

enum { CUT_MOST = 700 };

/* Whether fewer than k ranks go before [i]: those that are higher, and equal ones before it. */
static bool is_best(const int32_t *rank, int64_t n, int64_t i, int64_t k)
{
    int64_t before = 0;
    for (int64_t j = 0; j < n; j++) before += rank[j] > rank[i] || (rank[j] == rank[i] && j < i);
    return before < k;
}

static void check_cut(const indexer_kernels *kernels, const int32_t *ranks, int64_t n, int64_t k)
{
    int32_t rank[CUT_MOST + 1], index[CUT_MOST + 1];
    memcpy(rank, ranks, (size_t)n * sizeof *rank);
    for (int64_t i = 0; i < n; i++) index[i] = (int32_t)(3 * i);
    rank[n] = index[n] = 77;
    indexer_best best = {rank, index, n, INT32_MIN};
    kernels->cut(&best, k);
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!is_best(ranks, n, i, k)) continue;
        assert_true(at < best.n && rank[at] == ranks[i] && index[at] == 3 * i);
        assert_true(best.least <= ranks[i]);
        at++;
    }
    assert_int_equal(best.n, at);
    for (int64_t i = 0; i < n && n > k; i++) /* what is left out is not taken again */
        assert_true(is_best(ranks, n, i, k) || ranks[i] <= best.least);
    assert_true(n <= k || best.least > INT32_MIN);
    assert_true(rank[n] == 77 && index[n] == 77);
    TEST_TIME("indexer", "cut", kernels->level, 8 * n,
              (memcpy(rank, ranks, (size_t)n * sizeof *rank), best.n = n, kernels->cut(&best, k)));
}

static void cutting(void **state)
{
    static const int64_t lengths[] = {1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 384, 511, CUT_MOST};
    static const float edges[] = {NAN, INFINITY, -INFINITY, 0.0f, 0x1p-149f, -0x1p-149f, FLT_MAX, -FLT_MAX};
    (void)state;
    test_random random = {test_seed("cutting", 8)};
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const indexer_kernels *kernels = cpu_kernels_for(level)->indexer;
        assert_true(test_kernel_bound("indexer", "cut", kernels->level, 1, 0) == 0);
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (int kind = 0; kind < 12; kind++) {
                const int64_t n = lengths[l], k = test_random_int(&random, 1, kind == 0 ? n + 2 : n);
                int32_t rank[CUT_MOST];
                for (int64_t i = 0; i < n; i++)
                    rank[i] = kind % 4 == 0   ? rank_of((float)test_random_normal(&random))
                              : kind % 4 == 1 ? rank_of(edges[test_random_int(&random, 0, 7)])
                              : kind % 4 == 2 ? (int32_t)test_random_int(&random, -2, 2)
                                              : rank_of(NAN);
                check_cut(kernels, rank, n, k);
            }
    }
}

static void codes(void **state)
{
    (void)state;
    unsigned char bytes[256], nibbles[128 + 8];
    double expected[256];
    float out[257], scales[8];
    const float one = 1;
    for (int i = 0; i < 256; i++) bytes[i] = (unsigned char)i;
    for (int i = 0; i < 128; i++) nibbles[i] = (unsigned char)(i * 37);
    for (int i = 0; i < 8; i++) {
        nibbles[128 + i] = (unsigned char)(127 - 15 * i);
        scales[i] = ldexpf(1, -15 * i);
    }
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        const format_kernels *kernels = cpu_kernels_for(level)->formats;
        assert_true(test_kernel_bound("format", "widen_e4m3", kernels->level, 1, 0) == 0);
        assert_true(test_kernel_bound("format", "widen_e2m1", kernels->level, 1, 0) == 0);
        for (int64_t n = 0; n <= 256; n += n < 40 ? 1 : 27) {
            out[n] = 77;
            kernels->widen_e4m3(bytes, n, out);
            for (int64_t i = 0; i < n; i++) {
                unsigned char row[5] = {(unsigned char)i};
                memcpy(row + 1, &one, sizeof one);
                oracle_dsv4_widen_fp8(row, 1, expected);
                if ((i & 127) == 127) assert_true(isnan(out[i]));
                else assert_true((double)out[i] == expected[0] && !signbit(out[i]) == (i < 128));
            }
            assert_true(out[n] == 77);
            TEST_TIME("format", "widen_e4m3", kernels->level, 5 * n, kernels->widen_e4m3(bytes, n, out));
        }
        for (int64_t n = 0; n <= 256; n += 32) {
            unsigned char row[128 + 8];
            memcpy(row, nibbles, (size_t)n / 2);
            memcpy(row + n / 2, nibbles + 128, (size_t)n / 32);
            out[n] = 77;
            oracle_dsv4_widen_fp4(row, n, expected);
            kernels->widen_e2m1(row, scales, n, out);
            for (int64_t i = 0; i < n; i++) assert_true((double)out[i] == expected[i]);
            assert_true(out[n] == 77);
            TEST_TIME("format", "widen_e2m1", kernels->level, 4 * n + n / 2,
                      kernels->widen_e2m1(row, scales, n, out));
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores),
        cmocka_unit_test(scaling),
        cmocka_unit_test(collecting),
        cmocka_unit_test(cutting),
        cmocka_unit_test(codes),
        cmocka_unit_test_prestate(test_every_kernel, (char *)"indexer_rows_test")};
    return TEST_KERNELS_MAIN(argc, argv, tests);
}
