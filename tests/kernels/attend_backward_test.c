/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_backward_test.c - the attend_backward stage against the oracle, at every level: random shapes under
 * every mask, with lists in any order, gated gradients, outputs that are added to, and any number of threads.
 */
#include "cpu/cpu.h"
#include "cmocka_c11.h"
#include "compare.h"
#include "oracle/attention.h"
#include "tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SEQUENCES = 3, GROUP_ENTRIES = 128 };

typedef struct backward_case {
    attend_args args;
    int64_t sequences, views, h, hkv, d, dv, nq, nk; /* nq, nk: rows of the tensors */
    int64_t list_heads, list_rows, list_k;
    int32_t cu_q[MOST_SEQUENCES + 1], cu_kv[MOST_SEQUENCES + 1];
    bool varlen;
    test_tensor q, k, v, d_o, lse, delta, row_scale, d_q, d_k, d_v, list, cu_seqlens_q, cu_seqlens_kv;
} backward_case;

/* One sequence of a case, as the oracle's mask. */
typedef struct sequence {
    const backward_case *c;
    const int32_t *list; /* of the view; its first row is list_row */
    int64_t nq, nk, list_row;
} sequence;

static bool sees(const void *mask, int64_t head, int64_t t, int64_t j)
{
    const sequence *s = mask;
    const attend_args *a = &s->c->args;
    if (a->mask == ATTEND_RANGE) {
        const oracle_range range = {s->nq, s->nk, a->causal, a->window, a->query_offset};
        return oracle_range_sees(&range, head, t, j);
    }
    if (a->causal && a->mask == ATTEND_BLOCKS && j > t) return false;
    if (a->causal && a->mask == ATTEND_COMPRESSED) {
        const int64_t start = j * a->stride;
        if ((a->visibility == ENTRY_COMPLETE ? start + a->block_size - 1 : start) > t) return false;
    }
    if (s->list == NULL) return true;
    const int64_t unit = j / (a->mask == ATTEND_COMPRESSED ? GROUP_ENTRIES : a->block_size);
    const int64_t row = head / (s->c->h / s->c->list_heads) * s->c->list_rows + s->list_row + t / a->tile;
    for (int64_t e = 0; e < s->c->list_k; e++)
        if (s->list[row * s->c->list_k + e] == unit) return true;
    return false;
}

static int64_t pick(test_random *random, const int64_t *from, int64_t count)
{
    return from[test_random_int(random, 0, count - 1)];
}

static void choose_mask(backward_case *c, test_random *random)
{
    static const int64_t blocks[] = {64, 64, 16, 48, 1, 37, 80};
    attend_args *a = &c->args;
    a->mask = (attend_mask)test_random_int(random, ATTEND_RANGE, ATTEND_BLOCKS);
    a->causal = !test_random_one_in(random, 4);
    a->query_offset = -1;
    a->tile = 1;
    if (a->mask == ATTEND_RANGE) {
        if (test_random_one_in(random, 2)) a->window = test_random_int(random, 1, 250);
        if (test_random_one_in(random, 3)) a->query_offset = test_random_int(random, 0, 50);
        return;
    }
    const bool listed = a->mask == ATTEND_BLOCKS || test_random_one_in(random, 2);
    a->visibility = (entry_visibility)test_random_int(random, 0, 1);
    a->stride = listed ? 1 : test_random_int(random, 1, 16);
    a->block_size =
        a->mask == ATTEND_BLOCKS ? pick(random, blocks, 7) : a->stride * test_random_int(random, 1, 3);
    a->scope = (list_scope)test_random_int(random, 0, 1);
    if (!listed) return;
    if (test_random_one_in(random, 2)) a->tile = test_random_int(random, 2, 256);
    c->list_k = test_random_int(random, 1, 6);
}

/* Keys of a sequence with nq queries. */
static int64_t keys_for(const backward_case *c, int64_t nq, int64_t nk)
{
    const attend_args *a = &c->args;
    if (a->mask == ATTEND_RANGE) return nk;
    if (a->mask == ATTEND_BLOCKS) return nq;
    return nq >= a->block_size ? (nq - a->block_size) / a->stride + 1 : 0;
}

static void choose_sizes(backward_case *c, test_random *random)
{
    static const int64_t groups[] = {1, 1, 2, 3, 4, 16}, dims[] = {8, 16, 24, 40, 64, 72, 128, 136, 192, 256};
    const int64_t most = test_random_one_in(random, 8) ? 900 : 250, nq = test_random_int(random, 1, most);
    const int64_t nk = test_random_one_in(random, 2) ? nq : test_random_int(random, 1, most);
    c->hkv = test_random_int(random, 1, 2);
    c->h = c->hkv * pick(random, groups, 6);
    c->d = pick(random, dims, 10);
    c->dv = test_random_one_in(random, 2) ? c->d : pick(random, dims, 10);
    c->sequences = test_random_int(random, 1, MOST_SEQUENCES);
    c->varlen = test_random_one_in(random, 3);
    c->views = c->varlen ? 1 : c->sequences;
    c->nq = nq;
    c->nk = keys_for(c, nq, nk);
    if (!c->varlen) return;
    for (int64_t b = 0; b < c->sequences; b++) {
        const int64_t rows = test_random_int(random, 0, nq);
        c->cu_q[b + 1] = c->cu_q[b] + (int32_t)rows;
        c->cu_kv[b + 1] = c->cu_kv[b] + (int32_t)keys_for(c, rows, test_random_int(random, 0, nk));
    }
    c->nq = c->cu_q[c->sequences] + test_random_int(random, 0, 3);
    c->nk = c->cu_kv[c->sequences] + test_random_int(random, 0, 3);
}

static test_tensor make(test_random *random, quern_dtype dtype, int64_t b, int64_t n, int64_t h, int64_t d)
{
    const int64_t shape[] = {b, n, h, d};
    test_tensor t =
        test_tensor_make(random, dtype, 4, shape, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    test_tensor_normal(&t, random, 1);
    return t;
}

static test_tensor make_statistic(test_random *random, const backward_case *c)
{
    const int64_t shape[] = {c->views, c->h, c->nq};
    return test_tensor_make(random, QUERN_F32, 3, shape,
                            (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
}

static test_tensor make_cu_seqlens(test_random *random, const int32_t *cu, int64_t sequences)
{
    const int64_t shape[] = {sequences + 1};
    test_tensor t = test_tensor_make(random, QUERN_I32, 1, shape, TEST_CONTIGUOUS);
    test_tensor_set_i32(&t, cu);
    return t;
}

/* Entries of any order, repeated, padded with -1, and some past the sequence. */
static void make_list(backward_case *c, test_random *random)
{
    const attend_args *a = &c->args;
    c->list_heads = a->scope == LIST_BY_HEAD ? c->h : c->hkv;
    c->list_rows = c->varlen ? c->nq / a->tile + c->sequences : (c->nq + a->tile - 1) / a->tile;
    const int64_t shape[] = {c->views, c->list_heads, c->list_rows, c->list_k};
    const int64_t unit = a->mask == ATTEND_COMPRESSED ? GROUP_ENTRIES : a->block_size;
    c->list = test_tensor_make(random, QUERN_I32, 4, shape, TEST_CONTIGUOUS);
    const int64_t count = test_tensor_count(&c->list);
    int32_t *entries = malloc((size_t)(count + 1) * sizeof *entries);
    assert_non_null(entries);
    for (int64_t i = 0; i < count; i++) entries[i] = (int32_t)test_random_int(random, -1, c->nk / unit + 1);
    test_tensor_set_i32(&c->list, entries);
    free(entries);
}

static void case_make(backward_case *c, quern_dtype dtype, test_random *random)
{
    memset(c, 0, sizeof *c);
    do {
        memset(c, 0, sizeof *c);
        choose_mask(c, random);
        choose_sizes(c, random);
    } while (c->nk == 0 || c->nq == 0);
    attend_args *a = &c->args;
    const bool add = test_random_one_in(random, 2);
    const quern_dtype gradient = add || test_random_one_in(random, 2) ? QUERN_F32 : dtype;
    c->q = make(random, dtype, c->views, c->nq, c->h, c->d);
    c->k = make(random, dtype, c->views, c->nk, c->hkv, c->d);
    c->v = make(random, dtype, c->views, c->nk, c->hkv, c->dv);
    c->d_o = make(random, dtype, c->views, c->nq, c->h, c->dv);
    c->d_q = make(random, gradient, c->views, c->nq, c->h, c->d);
    c->d_k = make(random, gradient, c->views, c->nk, c->hkv, c->d);
    c->d_v = make(random, gradient, c->views, c->nk, c->hkv, c->dv);
    c->lse = make_statistic(random, c);
    c->delta = make_statistic(random, c);
    if (c->list_k > 0) make_list(c, random);
    if (c->varlen) {
        c->cu_seqlens_q = make_cu_seqlens(random, c->cu_q, c->sequences);
        c->cu_seqlens_kv = make_cu_seqlens(random, c->cu_kv, c->sequences);
    }
    if (test_random_one_in(random, 2)) {
        c->row_scale = make_statistic(random, c);
        test_tensor_normal(&c->row_scale, random, 1);
    }
    a->seqs = (stage_seqs){c->sequences, c->nq, c->nk, c->cu_seqlens_q.view, c->cu_seqlens_kv.view};
    a->scale = (float)(1 / sqrt((double)c->d));
    a->list = c->list.view;
    a->q = c->q.view;
    a->k = c->k.view;
    a->v = c->v.view;
    a->lse = c->lse.view;
    a->d_o = c->d_o.view;
    a->delta = c->delta.view;
    a->row_scale = c->row_scale.view;
    a->d_q = c->d_q.view;
    a->d_k = c->d_k.view;
    a->d_v = c->d_v.view;
    a->accumulate_q = a->accumulate_k = a->accumulate_v = add;
}

static void case_free(backward_case *c)
{
    test_tensor *all[] = {
        &c->q,   &c->k,   &c->v,   &c->d_o,  &c->lse,          &c->delta,        &c->row_scale,
        &c->d_q, &c->d_k, &c->d_v, &c->list, &c->cu_seqlens_q, &c->cu_seqlens_kv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->buffer != NULL) test_tensor_free(all[i]);
}

static double *zeros(int64_t count)
{
    double *p = calloc((size_t)count + 1, sizeof *p);
    assert_non_null(p);
    return p;
}

typedef struct gradients {
    double *d_q, *d_k, *d_v;
} gradients;

/* The oracle's gradients; sets lse and delta, which the stage is given. */
static gradients reference_of(backward_case *c)
{
    const int64_t rows = c->views * c->nq * c->h, key_rows = c->views * c->nk * c->hkv;
    double *q = test_tensor_get(&c->q), *k = test_tensor_get(&c->k), *v = test_tensor_get(&c->v),
           *d_o = test_tensor_get(&c->d_o);
    double *o = zeros(rows * c->dv), *lse = zeros(rows), *delta = zeros(rows);
    double *row_scale = c->row_scale.buffer != NULL ? test_tensor_get(&c->row_scale) : NULL;
    int32_t *list = c->list_k > 0 ? test_tensor_get_i32(&c->list) : NULL;
    const gradients g = {zeros(rows * c->d), zeros(key_rows * c->d), zeros(key_rows * c->dv)};
    for (int64_t r = 0; row_scale != NULL && r < rows; r++) { /* [view, n, h] against [view, h, n] */
        const int64_t view = r / (c->nq * c->h), n = r / c->h % c->nq, head = r % c->h;
        for (int64_t e = 0; e < c->dv; e++) d_o[r * c->dv + e] *= row_scale[(view * c->h + head) * c->nq + n];
    }
    int64_t list_row = 0;
    for (int64_t b = 0; b < c->sequences; b++) {
        const int64_t view = c->varlen ? 0 : b, q0 = view * c->nq + c->cu_q[b],
                      k0 = view * c->nk + c->cu_kv[b];
        const sequence s = {c, list != NULL ? list + view * c->list_heads * c->list_rows * c->list_k : NULL,
                            c->varlen ? c->cu_q[b + 1] - c->cu_q[b] : c->nq,
                            c->varlen ? c->cu_kv[b + 1] - c->cu_kv[b] : c->nk, list_row};
        const oracle_shape shape = {s.nq,  s.nk, c->h, c->hkv, c->d, c->dv, (double)c->args.scale,
                                    c->nq, NULL};
        const double *sq = q + q0 * c->h * c->d, *sk = k + k0 * c->hkv * c->d, *sv = v + k0 * c->hkv * c->dv,
                     *sdo = d_o + q0 * c->h * c->dv;
        const int64_t at = view * c->h * c->nq + c->cu_q[b];
        double *so = o + q0 * c->h * c->dv;
        oracle_attend(&shape, sees, &s, sq, sk, sv, so, lse + at);
        oracle_attend_backward(&shape, sees, &s, sq, sk, sv, sdo, g.d_q + q0 * c->h * c->d,
                               g.d_k + k0 * c->hkv * c->d, g.d_v + k0 * c->hkv * c->dv);
        for (int64_t t = 0; t < s.nq; t++)
            for (int64_t head = 0; head < c->h; head++)
                for (int64_t e = 0; e < c->dv; e++)
                    delta[at + head * c->nq + t] +=
                        sdo[(t * c->h + head) * c->dv + e] * so[(t * c->h + head) * c->dv + e];
        if (c->varlen) list_row += (s.nq + c->args.tile - 1) / c->args.tile;
    }
    test_tensor_set(&c->lse, lse);
    test_tensor_set(&c->delta, delta);
    free(q), free(k), free(v), free(d_o), free(o), free(lse), free(delta), free(row_scale), free(list);
    return g;
}

static void run(backward_case *c, quern_cpu_level level, int32_t threads)
{
    const stage_exec exec = {.device = QUERN_CPU, .threads = threads, .cpu_level = level};
    test_workspace workspace =
        test_workspace_make(quern_backend_cpu.attend_backward.workspace(&exec, &c->args));
    assert_int_equal(quern_backend_cpu.attend_backward.run(&exec, &c->args, workspace.data), QUERN_OK);
    test_workspace_close(&workspace);
    const test_tensor *inputs[] = {&c->q, &c->k, &c->v, &c->d_o, &c->lse, &c->delta};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++)
        test_tensor_check_unchanged(inputs[i], "an input");
    test_tensor_check_guards(&c->d_q, "d_q");
    test_tensor_check_guards(&c->d_k, "d_k");
    test_tensor_check_guards(&c->d_v, "d_v");
}

/* Compares an output with the reference. Where every row lists just one key, d_q and d_k are 0 except for
 * the rounding of dP - delta, whose terms are of size sqrt(Dv). The error is then relative to elements of
 * 0.05. */
static void check(const char *label, const char *name, const test_tensor *t, const double *before, bool add,
                  const double *reference, quern_dtype dtype)
{
    double *out = test_tensor_get(t), error = 0, size = 0;
    const int64_t count = test_tensor_count(t);
    for (int64_t i = 0; i < count; i++) {
        const double expected = reference[i] + (add ? before[i] : 0);
        error += (out[i] - expected) * (out[i] - expected);
        size += expected * expected;
    }
    if (!(sqrt(error) <= test_gradient_bound(dtype) * sqrt(size > 0 ? size : 0.0025 * (double)count)))
        fail_msg("%s: %s is off by %.3g of %.3g", label, name, sqrt(error), sqrt(size));
    free(out);
}

static void case_check(quern_dtype dtype, uint64_t seed, test_random *random)
{
    backward_case c;
    case_make(&c, dtype, random);
    gradients g = reference_of(&c);
    test_tensor *outputs[] = {&c.d_q, &c.d_k, &c.d_v};
    const double *references[] = {g.d_q, g.d_k, g.d_v};
    static const char *const names[] = {"d_q", "d_k", "d_v"};
    double *before[3], *first[3];
    for (int i = 0; i < 3; i++) before[i] = test_tensor_get(outputs[i]);
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
        char label[200];
        snprintf(label, sizeof label,
                 "seed %llu, %s, %s, mask %d, h %lld/%lld, d %lld/%lld, nq %lld, nk %lld, tile %lld",
                 (unsigned long long)seed, quern_cpu_level_name(level), quern_dtype_name(dtype),
                 (int)c.args.mask, (long long)c.h, (long long)c.hkv, (long long)c.d, (long long)c.dv,
                 (long long)c.nq, (long long)c.nk, (long long)c.args.tile);
        for (int i = 0; i < 3; i++) test_tensor_set(outputs[i], before[i]);
        run(&c, level, 1);
        for (int i = 0; i < 3; i++) {
            check(label, names[i], outputs[i], before[i], c.args.accumulate_q, references[i], dtype);
            first[i] = test_tensor_get(outputs[i]);
            test_tensor_set(outputs[i], before[i]);
        }
        run(&c, level, 3);
        for (int i = 0; i < 3; i++) {
            double *again = test_tensor_get(outputs[i]);
            if (memcmp(again, first[i], (size_t)test_tensor_count(outputs[i]) * sizeof *again) != 0)
                fail_msg("%s: %s differs between 1 and 3 threads", label, names[i]);
            free(again);
            free(first[i]);
        }
    }
    for (int i = 0; i < 3; i++) free(before[i]);
    free(g.d_q), free(g.d_k), free(g.d_v);
    case_free(&c);
}

static void gradients_of_every_mask(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    const uint64_t seed = test_seed("gradients_of_every_mask", 1);
    test_random random = {seed};
    (void)state;
    for (int i = 0; i < test_trials(48); i++) case_check(dtypes[i % 3], seed, &random);
}

/* A nonfinite value in a tile must not change the rows that do not see it. */
static void nonfinite_values_reach_only_rows_that_see_them(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    const uint64_t seed = test_seed("nonfinite_values_reach_only_rows_that_see_them", 2);
    test_random random = {seed};
    (void)state;
    for (int i = 0; i < test_trials(24); i++) {
        backward_case c;
        case_make(&c, dtypes[i % 3], &random);
        test_tensor *inputs[] = {&c.q, &c.k, &c.v, &c.d_o}, *outputs[] = {&c.d_q, &c.d_k, &c.d_v};
        test_tensor *hit = inputs[i / 3 % 4];
        double *values = test_tensor_get(hit);
        values[test_random_int(&random, 0, test_tensor_count(hit) - 1)] = i % 2 ? NAN : INFINITY;
        test_tensor_set(hit, values);
        free(values);
        c.args.accumulate_q = c.args.accumulate_k = c.args.accumulate_v = false;
        gradients g = reference_of(&c);
        const double *references[] = {g.d_q, g.d_k, g.d_v};
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            run(&c, level, 1);
            for (int o = 0; o < 3; o++) {
                double *out = test_tensor_get(outputs[o]);
                for (int64_t e = 0; e < test_tensor_count(outputs[o]); e++)
                    if (isfinite(references[o][e]) && !isfinite(out[e]))
                        fail_msg("seed %llu, case %d, %s: output %d holds %g at %lld, expected %g",
                                 (unsigned long long)seed, i, quern_cpu_level_name(level), o, out[e],
                                 (long long)e, references[o][e]);
                    else if (isnan(references[o][e]) && isfinite(out[e]))
                        fail_msg("seed %llu, case %d, %s: output %d hides a NaN at %lld",
                                 (unsigned long long)seed, i, quern_cpu_level_name(level), o, (long long)e);
                free(out);
            }
        }
        free(g.d_q), free(g.d_k), free(g.d_v);
        case_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_of_every_mask),
        cmocka_unit_test(nonfinite_values_reach_only_rows_that_see_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
