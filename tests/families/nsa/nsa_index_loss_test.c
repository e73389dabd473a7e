/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_index_loss_test.c - the block indexer's loss and its gradients: random calls against the float64 oracle
 * at every CPU level, the golden vector, causality, the same bits for packed and cut sequences and any number
 * of threads, NaN and infinities, and what is refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "golden.h"
#include "op_case.h"
#include "oracle/nsa.h"

#include <quern/nsa.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQUENCES = 4 };
/* In the order of quern_nsa_index_loss_tensors. */
enum { Q_I, K_I, Q, K, IDX, LSE, CU_Q, CU_KV, LOSS, ROW_LOSS, D_Q, D_K, TENSORS };

typedef struct loss_shape {
    quern_nsa_index_loss_params params;
    quern_dtype dtype;
    test_layout layout;
    bool varlen, shared, lse; /* lse: handed in */
    int64_t batch, lists, group, d_index, d, length, spare;
    int64_t n[SEQUENCES], s[SEQUENCES]; /* fixed length: the first of each */
} loss_shape;

typedef struct loss_case {
    loss_shape shape;
    int64_t n, s, list_rows; /* of the tensors */
    test_tensor t[TENSORS];
} loss_case;

static int64_t start_of(const loss_shape *h, const int64_t *lengths, int64_t b)
{
    int64_t at = h->varlen ? 0 : b * lengths[0];
    for (int64_t i = 0; h->varlen && i < b; i++) at += lengths[i];
    return at;
}

/* Lists as a caller may hand them in: any order, repeats, padding, blocks of the future and out of range. */
static void draw_lists(loss_case *c, test_random *random)
{
    const int64_t count = test_tensor_count(&c->t[IDX]), most = c->s / c->shape.params.select_block + 2;
    int32_t *x = malloc((size_t)(count + 1) * sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = test_random_one_in(random, 5) ? -1 : (int32_t)test_random_int(random, 0, most);
    test_tensor_set_i32(&c->t[IDX], x);
    free(x);
}

static loss_case make(const loss_shape *h, test_random *random)
{
    const int64_t b = h->batch, n = h->varlen ? start_of(h, h->n, b) + h->spare : h->n[0],
                  s = h->varlen ? start_of(h, h->s, b) + h->spare : h->s[0], rows = h->varlen ? n + b : n,
                  heads = h->lists * h->group;
    loss_case c = {.shape = *h, .n = n, .s = s, .list_rows = rows};
    const struct {
        quern_dtype dtype;
        int32_t ndim;
        int64_t extent[4];
    } all[TENSORS] = {{h->dtype, 4, {b, n, h->lists, h->d_index}},
                      {h->dtype, h->shared ? 3 : 4, {b, s, h->shared ? h->d_index : h->lists, h->d_index}},
                      {h->dtype, 4, {b, n, heads, h->d}},
                      {h->dtype, 4, {b, s, h->lists, h->d}},
                      {QUERN_I32, 4, {b, h->lists, rows, h->length}},
                      {QUERN_F32, 3, {b, heads, n}},
                      {QUERN_I32, 2, {0, b + 1}},
                      {QUERN_I32, 2, {0, b + 1}},
                      {QUERN_F32, 0, {0}},
                      {QUERN_F32, 3, {b, h->lists, rows}},
                      {h->dtype, 4, {b, n, h->lists, h->d_index}},
                      {h->dtype, h->shared ? 3 : 4, {b, s, h->shared ? h->d_index : h->lists, h->d_index}}};
    for (int i = 0; i < TENSORS; i++) {
        const bool starts = i == CU_Q || i == CU_KV, cut = i != LOSS && (h->varlen || starts);
        if ((starts && !h->varlen) || (i == LSE && !h->lse)) continue;
        c.t[i] = test_tensor_make(random, all[i].dtype, all[i].ndim - cut, all[i].extent + cut,
                                  starts || i == LOSS ? TEST_CONTIGUOUS : h->layout);
        if (i <= K) test_tensor_normal(&c.t[i], random, 1);
    }
    draw_lists(&c, random);
    int32_t cu[2][SEQUENCES + 1];
    for (int64_t i = 0; i <= b; i++) {
        cu[0][i] = (int32_t)start_of(h, h->n, i);
        cu[1][i] = (int32_t)start_of(h, h->s, i);
    }
    if (h->varlen) test_tensor_set_i32(&c.t[CU_Q], cu[0]), test_tensor_set_i32(&c.t[CU_KV], cu[1]);
    return c;
}

static void release(loss_case *c)
{
    for (int i = 0; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
}

static void run(loss_case *c, quern_context *ctx)
{
    quern_nsa_index_loss_tensors t = QUERN_NSA_INDEX_LOSS_TENSORS_INIT;
    for (int i = LOSS; i < TENSORS; i++)
        if (c->t[i].buffer != NULL) test_tensor_reset(&c->t[i]);
    op_case_bind("nsa-index-loss", c->t, TENSORS, OP_CASE_ALL, &t);
    op_case_run(ctx, "nsa-index-loss", QUERN_OP_FORWARD, &c->shape.params, &t, c->t, TENSORS);
}

typedef struct reference {
    double *in[K + 1];
    int32_t *blocks;
    double loss, size, *row_loss, *row_size, *d_q, *d_k; /* size: of loss's terms, as row_size */
} reference;

static oracle_index_loss sequence(const loss_case *c, const reference *r, int64_t b)
{
    const loss_shape *h = &c->shape;
    const int64_t i = h->varlen ? b : 0, q0 = start_of(h, h->n, b), k0 = start_of(h, h->s, b),
                  keys = h->shared ? 1 : h->lists, heads = h->lists * h->group,
                  list0 = h->varlen ? q0 : b * h->lists * c->list_rows;
    const quern_nsa_index_loss_params *p = &h->params;
    return (oracle_index_loss){p->select_block,
                               p->query_offset,
                               h->n[i],
                               h->s[i],
                               h->lists,
                               heads,
                               h->d_index,
                               h->d,
                               h->shared,
                               p->scale > 0 ? (double)p->scale : 1 / sqrt((double)h->d),
                               p->index_scale > 0 ? (double)p->index_scale : 1 / sqrt((double)h->d_index),
                               r->in[Q_I] + q0 * h->lists * h->d_index,
                               r->in[K_I] + k0 * keys * h->d_index,
                               r->in[Q] + q0 * heads * h->d,
                               r->in[K] + k0 * h->lists * h->d,
                               r->blocks + list0 * h->length,
                               c->list_rows,
                               h->length};
}

static reference refer(const loss_case *c)
{
    const loss_shape *h = &c->shape;
    reference r = {.blocks = test_tensor_get_i32(&c->t[IDX]),
                   .row_loss = test_doubles(test_tensor_count(&c->t[ROW_LOSS])),
                   .row_size = test_doubles(test_tensor_count(&c->t[ROW_LOSS])),
                   .d_q = test_doubles(test_tensor_count(&c->t[D_Q])),
                   .d_k = test_doubles(test_tensor_count(&c->t[D_K]))};
    int64_t rows = 0;
    for (int i = 0; i <= K; i++) r.in[i] = test_tensor_get(&c->t[i]);
    for (int64_t b = 0; b < h->batch; b++) {
        const oracle_index_loss a = sequence(c, &r, b);
        for (int64_t t = 0; t < a.n; t++) rows += oracle_index_loss_counts(&a, t);
    }
    const double factor = (double)h->params.lambda / ((double)h->lists * (double)(rows > 0 ? rows : 1));
    for (int64_t b = 0; b < h->batch; b++) {
        const oracle_index_loss a = sequence(c, &r, b);
        const int64_t keys = h->shared ? 1 : h->lists;
        const int64_t row = (a.blocks - r.blocks) / h->length;
        oracle_index_loss_rows(&a, factor, r.row_loss + row, r.row_size + row,
                               r.d_q + start_of(h, h->n, b) * h->lists * h->d_index,
                               r.d_k + start_of(h, h->s, b) * keys * h->d_index);
    }
    for (int64_t i = 0; i < test_tensor_count(&c->t[ROW_LOSS]); i++) {
        r.loss += factor * r.row_loss[i];
        r.size = hypot(r.size, factor * r.row_size[i]);
    }
    return r;
}

static void forget(reference *r)
{
    for (int i = 0; i <= K; i++) free(r->in[i]);
    free(r->blocks), free(r->row_loss), free(r->row_size), free(r->d_q), free(r->d_k);
}

static double norm(const double *x, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum = hypot(sum, x[i]);
    return sum;
}

/* Half a subnormal step of f16 is free. */
static void forgive_subnormals(double *got, const double *expected, int64_t n)
{
    const double half = 0x1p-25;
    for (int64_t i = 0; i < n; i++) {
        const double off = got[i] - expected[i];
        got[i] = fabs(off) <= half ? expected[i] : got[i] - copysign(half, off);
    }
}

/* Losses are sums that cancel, measured by their terms. */
static void compare(const loss_case *c, const reference *r, const char *what)
{
    static const char *const names[] = {"loss", "row_loss", "d_q_index", "d_k_index"};
    const double *const expected[] = {&r->loss, r->row_loss, r->d_q, r->d_k}, *const sizes[] = {&r->size,
                                                                                                r->row_size};
    for (int i = LOSS; i < TENSORS; i++) {
        char text[160];
        const int64_t n = test_tensor_count(&c->t[i]);
        double *got = test_tensor_get(&c->t[i]), bound = test_gradient_bound(c->shape.dtype);
        if (i < D_Q) {
            const double own = norm(expected[i - LOSS], n), size = norm(sizes[i - LOSS], n);
            bound = test_forward_bound(c->shape.dtype) * (own > 0 ? fmax(1, size / own) : 1);
        }
        if (i >= D_Q && c->shape.dtype == QUERN_F16) forgive_subnormals(got, expected[i - LOSS], n);
        snprintf(text, sizeof text, "%s: %s", what, names[i - LOSS]);
        test_check(text, got, expected[i - LOSS], n, bound);
        free(got);
    }
}

/* lse_slc over the lists. */
static void set_lse(loss_case *c)
{
    const loss_shape *h = &c->shape;
    reference r = refer(c);
    double *lse = test_tensor_get(&c->t[LSE]);
    for (int64_t b = 0; b < h->batch; b++) {
        const oracle_index_loss a = sequence(c, &r, b);
        for (int64_t t = 0; t < a.n; t++)
            for (int64_t head = 0; head < a.heads; head++) {
                const int64_t j = head / h->group;
                double most = -INFINITY, sum = 0;
                for (int pass = 0; pass < 2; pass++)
                    for (int64_t s = 0; s < a.s; s++) {
                        const int32_t *list = a.blocks + (j * a.list_rows + t) * a.length;
                        const int64_t position = t + (a.query_offset >= 0 ? a.query_offset : a.s - a.n);
                        bool listed = false;
                        for (int64_t e = 0; e < a.length; e++) listed |= list[e] == s / a.block_size;
                        if (!listed || s > position) continue;
                        double dot = 0;
                        for (int64_t i = 0; i < a.d; i++)
                            dot += a.q[(t * a.heads + head) * a.d + i] * a.k[(s * a.lists + j) * a.d + i];
                        if (pass == 0) most = fmax(most, a.scale * dot);
                        else sum += exp(a.scale * dot - most);
                    }
                const int64_t row =
                    h->varlen ? head * c->n + start_of(h, h->n, b) + t : (b * a.heads + head) * c->n + t;
                lse[row] = sum > 0 ? most + log(sum) : -INFINITY;
            }
    }
    test_tensor_set(&c->t[LSE], lse);
    free(lse);
    forget(&r);
}

static loss_shape random_shape(test_random *random)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    static const int64_t sizes[] = {1, 3, 8, 16, 24, 64, 128, 200};
    loss_shape h = {.params = QUERN_NSA_INDEX_LOSS_PARAMS_INIT,
                    .dtype = dtypes[test_random_int(random, 0, 2)],
                    .layout = (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1),
                    .varlen = test_random_one_in(random, 2),
                    .shared = test_random_one_in(random, 2),
                    .lse = test_random_one_in(random, 2),
                    .batch = test_random_int(random, 1, 3),
                    .lists = test_random_int(random, 1, 3),
                    .group = test_random_int(random, 1, 5),
                    .d_index = 8 * test_random_int(random, 1, 17),
                    .d = 8 * test_random_int(random, 1, 9),
                    .length = test_random_int(random, 1, 6)};
    h.params.select_block = sizes[test_random_int(random, 0, 7)];
    h.params.lambda = test_random_one_in(random, 2) ? 1 : 0.3f;
    if (test_random_one_in(random, 3)) h.params.query_offset = test_random_int(random, 0, 200);
    if (test_random_one_in(random, 3)) h.params.scale = 0.2f, h.params.index_scale = 0.15f;
    for (int b = 0; b < SEQUENCES; b++) {
        const bool little = test_random_one_in(random, 3);
        h.s[b] = test_random_int(random, 0, little ? 5 : 260);
        h.n[b] = test_random_one_in(random, 2) ? h.s[b] : test_random_int(random, 0, little ? 9 : 70);
    }
    h.spare = h.varlen ? test_random_int(random, 0, 4) : 0;
    return h;
}

static void random_calls_match_the_oracle(void **state)
{
    (void)state;
    const uint64_t seed = test_seed("nsa_index_loss", 1);
    const int trials = test_trials(160);
    for (int trial = 0; trial < trials; trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const loss_shape h = random_shape(&random);
        loss_case c = make(&h, &random);
        if (h.lse) set_lse(&c);
        reference r = refer(&c);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            char what[80];
            quern_context *ctx = test_context(level, 1 + trial % 3);
            snprintf(what, sizeof what, "trial %d at %s", trial, quern_cpu_level_name(level));
            run(&c, ctx);
            compare(&c, &r, what);
            quern_context_destroy(ctx);
        }
        forget(&r);
        release(&c);
    }
}

static loss_shape usual_shape(quern_dtype dtype, int64_t n)
{
    loss_shape h = {.params = QUERN_NSA_INDEX_LOSS_PARAMS_INIT,
                    .dtype = dtype,
                    .shared = true,
                    .batch = 1,
                    .lists = 2,
                    .group = 4,
                    .d_index = 64,
                    .d = 32,
                    .length = 4,
                    .n = {n},
                    .s = {n}};
    h.params.select_block = 16;
    return h;
}

/* tests/vectors/msa_tiny.safetensors, with the teacher's lse computed and handed in. */
static void the_golden_vector(void **state)
{
    enum { N = 150, LISTS = 2, D = 32, LENGTH = 3 };
    static const char *const names[] = {"q_I", "k_I", "Q", "K"}, *const results[] = {"loss", "row_loss",
                                                                                     "dq_I", "dk_I"};
    (void)state;
    for (int lse = 0; lse < 2; lse++) {
        loss_shape h = usual_shape(QUERN_F32, N);
        h.d_index = D;
        h.length = LENGTH;
        h.lse = lse;
        quern_safetensors *file = golden_open(QUERN_TEST_VECTORS, "msa_tiny");
        test_random random = {1};
        loss_case c = make(&h, &random);
        for (int i = Q_I; i <= K; i++) {
            double *x = golden_get(file, "", names[i], test_tensor_count(&c.t[i]));
            test_tensor_set(&c.t[i], x);
            free(x);
        }
        int32_t *idx = golden_get_i32(file, "", "block_idx", LISTS * N * LENGTH);
        test_tensor_set_i32(&c.t[IDX], idx);
        if (lse) set_lse(&c);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            run(&c, ctx);
            for (int i = LOSS; i < TENSORS; i++) {
                double *got = test_tensor_get(&c.t[i]),
                       *expected = golden_get(file, "", results[i - LOSS], test_tensor_count(&c.t[i]));
                test_check_golden(results[i - LOSS], got, expected, test_tensor_count(&c.t[i]), GOLDEN_BOUND);
                free(got), free(expected);
            }
            quern_context_destroy(ctx);
        }
        free(idx);
        release(&c);
        quern_safetensors_close(file);
    }
}

/* Later tokens, NaN and infinities among them, change no bit of an earlier row's loss or, where they are not
 * chosen, gradient. (Gradients are divided by the number of rows, which stays.) */
static void later_tokens_change_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        test_random random = {(uint64_t)i + 3};
        loss_shape h = usual_shape((quern_dtype)(i % 3), 300);
        h.shared = i < 3;
        if (i % 2) h.params.select_block = 128, h.length = 2;
        loss_case c = make(&h, &random);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            double *before[K + 1];
            run(&c, ctx);
            test_tensor loss = test_tensor_copy(&c.t[ROW_LOSS]), d_q = test_tensor_copy(&c.t[D_Q]);
            for (int x = 0; x <= K; x++) before[x] = test_tensor_get(&c.t[x]);
            for (int64_t cut = 1; cut < h.s[0]; cut += 71) {
                for (int x = 0; x <= K; x++) {
                    double *later = test_tensor_get(&c.t[x]);
                    const int64_t row = test_tensor_count(&c.t[x]) / h.s[0];
                    for (int64_t e = cut * row; e < h.s[0] * row; e++)
                        later[e] = e % 97 == 0 ? NAN : e % 89 == 0 ? INFINITY : -3 * before[x][e];
                    test_tensor_set(&c.t[x], later);
                    free(later);
                }
                run(&c, ctx);
                double *now = test_tensor_get(&c.t[ROW_LOSS]), *was = test_tensor_get(&loss),
                       *d_now = test_tensor_get(&c.t[D_Q]), *d_was = test_tensor_get(&d_q);
                for (int64_t j = 0; j < h.lists; j++)
                    assert_memory_equal(now + j * h.n[0], was + j * h.n[0], (size_t)cut * sizeof *now);
                assert_memory_equal(d_now, d_was, (size_t)(cut * h.lists * h.d_index) * sizeof *d_now);
                free(now), free(was), free(d_now), free(d_was);
                for (int x = 0; x <= K; x++) test_tensor_set(&c.t[x], before[x]);
            }
            for (int x = 0; x <= K; x++) free(before[x]);
            test_tensor_free(&loss), test_tensor_free(&d_q);
            quern_context_destroy(ctx);
        }
        release(&c);
    }
}

/* A nonfinite element shows in the gradients of all that see it, and in no other. */
static void nonfinite_elements_reach_what_sees_them(void **state)
{
    static const double values[] = {NAN, INFINITY, -INFINITY};
    (void)state;
    for (int i = 0; i < 3 * 4 * 3; i++) {
        const int where = i / 3 % 4;
        test_random random = {(uint64_t)i + 3};
        loss_shape h = usual_shape((quern_dtype)(i / 12), 150);
        loss_case c = make(&h, &random);
        double *x = test_tensor_get(&c.t[where]);
        const int64_t row = test_tensor_count(&c.t[where]) / h.n[0];
        x[70 * row + 1] = values[i % 3];
        test_tensor_set(&c.t[where], x);
        reference r = refer(&c);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            run(&c, ctx);
            const double *const expected[] = {r.row_loss, r.d_q, r.d_k};
            for (int o = ROW_LOSS; o < TENSORS; o++) {
                double *got = test_tensor_get(&c.t[o]);
                for (int64_t e = 0; e < test_tensor_count(&c.t[o]); e++)
                    if (isfinite(got[e]) != isfinite(expected[o - ROW_LOSS][e]))
                        fail_msg("%g in input %d, %s: result %d [%lld] is %g, the oracle's %g", values[i % 3],
                                 where, quern_cpu_level_name(level), o, (long long)e, got[e],
                                 expected[o - ROW_LOSS][e]);
                free(got);
            }
            quern_context_destroy(ctx);
        }
        free(x);
        forget(&r);
        release(&c);
    }
}

/* Many chunks: threads, packing and the lists' order change no bit. */
static void threads_order_and_packing_change_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        test_random random = {(uint64_t)i + 3};
        loss_shape h = usual_shape(i % 2 ? QUERN_BF16 : QUERN_F32, 900);
        h.shared = i < 2;
        loss_case c = make(&h, &random);
        quern_context *one = test_context(QUERN_CPU_LEVEL_AUTO, 1),
                      *three = test_context(QUERN_CPU_LEVEL_AUTO, 3);
        test_tensor before[TENSORS];
        run(&c, one);
        for (int o = LOSS; o < TENSORS; o++) before[o] = test_tensor_copy(&c.t[o]);
        for (int round = 0; round < 2; round++) {
            int32_t *x = test_tensor_get_i32(&c.t[IDX]);
            for (int64_t e = 0; round && e < test_tensor_count(&c.t[IDX]); e += h.length) {
                const int32_t first = x[e];
                x[e] = x[e + 2];
                x[e + 2] = first;
            }
            test_tensor_set_i32(&c.t[IDX], x);
            run(&c, three);
            for (int o = LOSS; o < TENSORS; o++) assert_true(test_tensor_same_bits(&before[o], &c.t[o]));
            free(x);
        }
        loss_shape packed = h;
        packed.varlen = true;
        loss_case p = make(&packed, &random);
        for (int x = 0; x <= IDX; x++) {
            if (x == IDX) continue;
            double *values = test_tensor_get(&c.t[x]);
            test_tensor_set(&p.t[x], values);
            free(values);
        }
        int32_t *lists = test_tensor_get_i32(&c.t[IDX]), *rows = test_tensor_get_i32(&p.t[IDX]);
        for (int64_t j = 0; j < h.lists; j++)
            memcpy(rows + j * p.list_rows * h.length, lists + j * c.list_rows * h.length,
                   (size_t)(c.list_rows * h.length) * sizeof *rows);
        test_tensor_set_i32(&p.t[IDX], rows);
        run(&p, three);
        for (int o = D_Q; o < TENSORS; o++) {
            double *a = test_tensor_get(&before[o]), *b = test_tensor_get(&p.t[o]);
            assert_memory_equal(a, b, (size_t)test_tensor_count(&p.t[o]) * sizeof *a);
            free(a), free(b);
        }
        free(lists), free(rows);
        for (int o = LOSS; o < TENSORS; o++) test_tensor_free(&before[o]);
        quern_context_destroy(one), quern_context_destroy(three);
        release(&p);
        release(&c);
    }
}

/* The last rows alone, on all keys or at an offset, have the row losses of the whole. */
static void chunks_change_no_bit(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        enum { N = 400, FIRST = 333, LENGTH = 4, LISTS = 2 };
        test_random random = {(uint64_t)i + 3};
        loss_shape h = usual_shape(i ? QUERN_BF16 : QUERN_F32, N), last = h;
        loss_case c = make(&h, &random);
        last.n[0] = N - FIRST;
        last.params.query_offset = i ? FIRST : -1;
        loss_case part = make(&last, &random);
        for (int x = 0; x <= K; x++) {
            const bool keys = x == K_I || x == K;
            const int64_t row = test_tensor_count(&c.t[x]) / N;
            double *values = test_tensor_get(&c.t[x]);
            test_tensor_set(&part.t[x], values + (keys ? 0 : FIRST * row));
            free(values);
        }
        int32_t *all = test_tensor_get_i32(&c.t[IDX]), *few = test_tensor_get_i32(&part.t[IDX]);
        for (int64_t j = 0; j < LISTS; j++)
            memcpy(few + j * last.n[0] * LENGTH, all + (j * N + FIRST) * LENGTH,
                   (size_t)(last.n[0] * LENGTH) * sizeof *few);
        test_tensor_set_i32(&part.t[IDX], few);
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, 2);
            run(&c, ctx), run(&part, ctx);
            double *whole = test_tensor_get(&c.t[ROW_LOSS]), *own = test_tensor_get(&part.t[ROW_LOSS]);
            for (int64_t j = 0; j < LISTS; j++)
                assert_memory_equal(own + j * last.n[0], whole + j * N + FIRST,
                                    (size_t)last.n[0] * sizeof *own);
            free(whole), free(own);
            quern_context_destroy(ctx);
        }
        free(all), free(few);
        release(&part);
        release(&c);
    }
}

static void bad_calls_are_refused(void **state)
{
    static const char *const sentences[] = {"select_block is 0: 1 to 2147483647",
                                            "lambda is",
                                            "k.shape[2] is 1: 2 is accepted",
                                            "q.shape[1] is 39: 40 is accepted",
                                            "block_idx is NULL: a tensor is needed",
                                            "block_idx.shape[1] is 1: 2 is accepted",
                                            "cu_seqlens_kv is given without cu_seqlens_q",
                                            "lse_slc: dtype",
                                            "d_k_index.shape[1] is 39: 40 is accepted"};
    (void)state;
    test_random random = {5};
    loss_shape h = usual_shape(QUERN_F32, 40);
    h.lse = true;
    loss_case c = make(&h, &random);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    for (int i = 0; i < 9; i++) {
        quern_nsa_index_loss_params p = h.params;
        quern_nsa_index_loss_tensors t = QUERN_NSA_INDEX_LOSS_TENSORS_INIT;
        quern_tensor k = c.t[K].view, q = c.t[Q].view, lists = c.t[IDX].view, lse = c.t[LSE].view,
                     d_k = c.t[D_K].view;
        char memory[64];
        op_case_bind("nsa-index-loss", c.t, TENSORS, OP_CASE_ALL, &t);
        t.k = &k, t.q = &q, t.block_idx = &lists, t.lse_slc = &lse, t.d_k_index = &d_k;
        if (i == 0) p.select_block = 0;
        if (i == 1) p.lambda = INFINITY;
        if (i == 2) k.shape[2] = 1;
        if (i == 3) q.shape[1] = 39;
        if (i == 4) t.block_idx = NULL;
        if (i == 5) lists.shape[1] = 1;
        if (i == 6) t.cu_seqlens_kv = &lists;
        if (i == 7) lse.dtype = QUERN_BF16;
        if (i == 8) d_k.shape[1] = 39;
        assert_int_equal(quern_nsa_index_loss(ctx, NULL, &p, &t, memory, sizeof memory),
                         QUERN_ERR_INVALID_ARGUMENT);
        if (strstr(quern_last_error(ctx), sentences[i]) == NULL)
            fail_msg("'%s' does not say '%s'", quern_last_error(ctx), sentences[i]);
        for (int o = LOSS; o < TENSORS; o++)
            test_tensor_check_unchanged(&c.t[o], "a result of a refused call");
    }
    quern_context_destroy(ctx);
    release(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(random_calls_match_the_oracle),
                                       cmocka_unit_test(the_golden_vector),
                                       cmocka_unit_test(later_tokens_change_no_bit),
                                       cmocka_unit_test(nonfinite_elements_reach_what_sees_them),
                                       cmocka_unit_test(threads_order_and_packing_change_no_bit),
                                       cmocka_unit_test(chunks_change_no_bit),
                                       cmocka_unit_test(bad_calls_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
