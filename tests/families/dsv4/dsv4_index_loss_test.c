/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_index_loss_test.c - the indexer's loss: random calls against float64 at every CPU level, dense and by
 * lists, the oracle's gradients against differences, the same bits on any number of threads, and what is
 * refused. */
#include "cmocka_c11.h"
#include "compare.h"
#include "op_case.h"
#include "oracle/indexer_loss.h"

#include <quern/cuda.h>
#include <quern/dsv4.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* In the order of the struct. */
enum { Q_I, K_I, W, Q, KV_CMP, LSE_WIN, SINK, IDX, LOSS, ROW_LOSS, D_Q_I, D_K_I, D_W, TENSORS };
static const char *const op = "v4-index-loss";

typedef struct loss_case {
    quern_dsv4_index_loss_params params;
    oracle_indexer_loss oracle;
    quern_dtype dtype;
    test_tensor t[TENSORS];
    double *value[TENSORS], *size[TENSORS];
    int32_t *idx;
} loss_case;

static int32_t shape_of(const oracle_indexer_loss *o, int tensor, int64_t shape[4])
{
    const int64_t shapes[TENSORS][4] = {[Q_I] = {o->batch, o->queries, o->index_heads, o->width},
                                        [K_I] = {o->batch, o->entries, o->width},
                                        [W] = {o->batch, o->queries, o->index_heads},
                                        [Q] = {o->batch, o->queries, o->heads, o->dim},
                                        [KV_CMP] = {o->batch, o->entries, o->dim},
                                        [LSE_WIN] = {o->batch, o->heads, o->queries},
                                        [SINK] = {o->heads},
                                        [IDX] = {o->batch, o->queries, o->listed},
                                        [LOSS] = {0},
                                        [ROW_LOSS] = {o->batch, o->queries},
                                        [D_Q_I] = {o->batch, o->queries, o->index_heads, o->width},
                                        [D_K_I] = {o->batch, o->entries, o->width},
                                        [D_W] = {o->batch, o->queries, o->index_heads}};
    static const int32_t dims[TENSORS] = {4, 3, 3, 4, 3, 3, 1, 3, 0, 2, 4, 3, 3};
    memcpy(shape, shapes[tensor], sizeof shapes[0]);
    return dims[tensor];
}

static quern_dtype dtype_of(const loss_case *c, int tensor, bool wide)
{
    if (tensor == IDX) return QUERN_I32;
    if (tensor == LSE_WIN || tensor == SINK || tensor == LOSS || tensor == ROW_LOSS) return QUERN_F32;
    return (tensor == W || tensor == D_W) && wide ? QUERN_F32 : c->dtype;
}

/* Entries in any order, some twice, some of -1, of what is not seen, or out of range. */
static void choose(loss_case *c, test_random *random)
{
    const oracle_indexer_loss *o = &c->oracle;
    const int64_t n = o->batch * o->queries * o->listed;
    c->idx = malloc((size_t)(n + 1) * sizeof *c->idx);
    for (int64_t i = 0; i < n; i++) c->idx[i] = (int32_t)test_random_int(random, -1, o->entries);
    test_tensor_set_i32(&c->t[IDX], c->idx);
}

/* Some of the entries in order, each once, and -1 behind them: as an indexer lists them. */
static void choose_in_order(loss_case *c, test_random *random)
{
    const oracle_indexer_loss *o = &c->oracle;
    int32_t entry = -1;
    for (int64_t i = 0; i < o->batch * o->queries * o->listed; i++) {
        if (i % o->listed == 0) entry = -1;
        entry += (int32_t)test_random_int(random, 1, 3);
        c->idx[i] = entry < o->entries ? entry : -1;
    }
    test_tensor_set_i32(&c->t[IDX], c->idx);
}

static loss_case make(test_random *random, const oracle_indexer_loss *extents, quern_dtype dtype, bool lists,
                      bool sinks, test_layout layout)
{
    loss_case c = {.params = QUERN_DSV4_INDEX_LOSS_PARAMS_INIT, .oracle = *extents, .dtype = dtype};
    oracle_indexer_loss *o = &c.oracle;
    const bool wide = test_random_one_in(random, 2);
    c.params.ratio = o->ratio;
    c.params.start_abs_pos = o->start;
    c.params.lambda = (float)o->lambda;
    o->lambda = (double)c.params.lambda;
    for (int i = 0; i < TENSORS; i++) {
        int64_t shape[4];
        if ((i == IDX && !lists) || (i == SINK && !sinks)) continue;
        const int32_t ndim = shape_of(o, i, shape);
        c.t[i] = test_tensor_make(random, dtype_of(&c, i, wide), ndim, shape, layout);
        if (i == IDX) continue;
        if (i < LOSS) test_tensor_normal(&c.t[i], random, i == LSE_WIN ? 3 : 1);
        c.value[i] = i < LOSS ? test_tensor_get(&c.t[i]) : test_doubles(test_tensor_count(&c.t[i]) + 1);
        c.size[i] = i < LOSS ? NULL : test_doubles(test_tensor_count(&c.t[i]) + 1);
    }
    if (lists) choose(&c, random);
    if (lists && test_random_one_in(random, 2)) choose_in_order(&c, random);
    o->q_index = c.value[Q_I], o->k_index = c.value[K_I], o->w = c.value[W], o->q = c.value[Q];
    o->kv_cmp = c.value[KV_CMP], o->lse_win = c.value[LSE_WIN], o->sink = c.value[SINK], o->idx = c.idx;
    c.value[LOSS][0] =
        oracle_indexer_loss_of(o, c.value[ROW_LOSS], c.value[D_Q_I], c.value[D_K_I], c.value[D_W]);
    o->sizes = 1;
    c.size[LOSS][0] = oracle_indexer_loss_of(o, c.size[ROW_LOSS], c.size[D_Q_I], c.size[D_K_I], c.size[D_W]);
    o->sizes = 0;
    return c;
}

static void release(loss_case *c)
{
    for (int i = 0; i < TENSORS; i++) {
        if (c->t[i].buffer != NULL) test_tensor_free(&c->t[i]);
        free(c->value[i]), free(c->size[i]);
    }
    free(c->idx);
}

static oracle_indexer_loss random_extents(test_random *random)
{
    oracle_indexer_loss o = {.batch = test_random_int(random, 0, 3),
                             .queries = test_random_int(random, 0, test_random_one_in(random, 5) ? 150 : 20),
                             .index_heads = test_random_int(random, 1, 9),
                             .width = 8 * test_random_int(random, 1, 9),
                             .entries = test_random_int(random, 0, 60),
                             .heads = test_random_int(random, 1, 9),
                             .dim = 8 * test_random_int(random, 1, 9),
                             .listed = test_random_int(random, 0, 40),
                             .ratio = test_random_int(random, 1, 5),
                             .lambda = 0.3};
    if (test_random_one_in(random, 4)) o.queries = 3, o.entries = test_random_int(random, 100, 400);
    o.start = test_random_one_in(random, 3) ? 0 : test_random_int(random, 0, o.entries * o.ratio);
    return o;
}

/* Relative L2. The losses, sums that cancel, are measured against their terms; of the gradients a tenth of
 * the terms counts as the size, for P - T of few entries is rounding alone. */
static void compare(const loss_case *c, int tensor, double bound)
{
    double *out = test_tensor_get(&c->t[tensor]), error = 0, size = 0, terms = 0;
    for (int64_t i = 0; i < test_tensor_count(&c->t[tensor]); i++) {
        error += pow(out[i] - c->value[tensor][i], 2);
        size += pow(c->value[tensor][i], 2);
        terms += pow(c->size[tensor][i], 2);
    }
    if (!(sqrt(error) <= bound * fmax(sqrt(size), (tensor <= ROW_LOSS ? 1 : 0.1) * sqrt(terms))))
        fail_msg("%s: error %.3g of %.3g, terms %.3g", op_case_field(op, tensor), sqrt(error), sqrt(size),
                 sqrt(terms));
    free(out);
}

static void check(loss_case *c, quern_context *ctx)
{
    quern_dsv4_index_loss_tensors views = QUERN_DSV4_INDEX_LOSS_TENSORS_INIT;
    for (int i = LOSS; i < TENSORS; i++) test_tensor_reset(&c->t[i]);
    op_case_bind(op, c->t, TENSORS, OP_CASE_ALL, &views);
    op_case_run(ctx, op, QUERN_OP_FORWARD, &c->params, &views, c->t, TENSORS);
    for (int i = LOSS; i < TENSORS; i++)
        compare(c, i, i <= ROW_LOSS ? test_forward_bound(c->dtype) : test_gradient_bound(c->dtype));
}

static void calls_against_float64(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_BF16, QUERN_F16};
    const uint64_t seed = test_seed("the indexer's loss", 51);
    (void)state;
    for (int trial = 0; trial < test_trials(60); trial++) {
        test_random random;
        if (!test_trial(seed, trial, &random)) continue;
        const oracle_indexer_loss extents = random_extents(&random);
        loss_case c =
            make(&random, &extents, dtypes[test_random_int(&random, 0, 2)], test_random_one_in(&random, 2),
                 test_random_one_in(&random, 2), (test_layout)test_random_int(&random, 0, TEST_LAYOUTS - 1));
        for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) {
            quern_context *ctx = test_context(level, (int32_t)test_random_int(&random, 1, 3));
            check(&c, ctx);
            quern_context_destroy(ctx);
        }
        release(&c);
    }
}

/* As many heads and channels as models have, over several tiles of a GPU's kernels. */
static void wide_calls_against_float64(void **state)
{
    static const struct {
        int64_t dim, entries, listed;
    } shapes[] = {{128, 290, 150}, {128, 590, 500}, {264, 290, 150}};
    (void)state;
    for (int trial = 0; trial < 6; trial++) {
        test_random random = {test_seed("the indexer's loss of models", 55 + (uint64_t)trial)};
        const oracle_indexer_loss extents = {.batch = 1,
                                             .queries = 7,
                                             .index_heads = 64,
                                             .width = 128,
                                             .entries = shapes[trial / 2].entries,
                                             .heads = 64,
                                             .dim = shapes[trial / 2].dim,
                                             .listed = shapes[trial / 2].listed,
                                             .ratio = 1,
                                             .start = shapes[trial / 2].entries - 40,
                                             .lambda = 1};
        loss_case c = make(&random, &extents, QUERN_BF16, trial % 2 == 0, true, TEST_CONTIGUOUS);
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
        check(&c, ctx);
        quern_context_destroy(ctx);
        release(&c);
    }
}

/* Lists of more queries than a GPU's kernels sum at once. */
static void many_queries_against_float64(void **state)
{
    test_random random = {test_seed("the indexer's loss of many", 62)};
    const oracle_indexer_loss extents = {.batch = 1,
                                         .queries = 1100,
                                         .index_heads = 3,
                                         .width = 24,
                                         .entries = 300,
                                         .heads = 4,
                                         .dim = 32,
                                         .listed = 12,
                                         .ratio = 1,
                                         .start = 280,
                                         .lambda = 1};
    (void)state;
    loss_case c = make(&random, &extents, QUERN_BF16, true, false, TEST_CONTIGUOUS);
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    check(&c, ctx);
    quern_context_destroy(ctx);
    release(&c);
}

static void gradients_are_differences(void **state)
{
    static const int inputs[] = {Q_I, K_I, W}, gradients[] = {D_Q_I, D_K_I, D_W};
    const oracle_indexer_loss extents = {.batch = 2,
                                         .queries = 4,
                                         .index_heads = 2,
                                         .width = 8,
                                         .entries = 5,
                                         .heads = 2,
                                         .dim = 8,
                                         .listed = 4,
                                         .ratio = 1,
                                         .start = 1,
                                         .lambda = 0.7};
    test_random random = {test_seed("the indexer's loss' differences", 52)};
    (void)state;
    for (int lists = 0; lists < 2; lists++) {
        loss_case c = make(&random, &extents, QUERN_F32, lists, true, TEST_CONTIGUOUS);
        for (int i = 0; i < 3; i++)
            for (int64_t k = 0; k < test_tensor_count(&c.t[inputs[i]]); k++) {
                double *at = &c.value[inputs[i]][k], loss[2];
                const double saved = *at;
                for (int side = 0; side < 2; side++) {
                    *at = saved + (side == 0 ? -1e-6 : 1e-6);
                    loss[side] = oracle_indexer_loss_of(&c.oracle, NULL, NULL, NULL, NULL);
                }
                *at = saved;
                assert_true(fabs((loss[1] - loss[0]) / 2e-6 - c.value[gradients[i]][k]) < 1e-7);
            }
        release(&c);
    }
}

static void threads_give_the_same_bits(void **state)
{
    const oracle_indexer_loss extents = {.batch = 2,
                                         .queries = 70,
                                         .index_heads = 4,
                                         .width = 16,
                                         .entries = 60,
                                         .heads = 3,
                                         .dim = 24,
                                         .listed = 9,
                                         .ratio = 2,
                                         .start = 20,
                                         .lambda = 1};
    test_random random = {test_seed("the indexer's loss' threads", 53)};
    test_tensor kept[TENSORS] = {{.buffer = NULL}};
    (void)state;
    loss_case c = make(&random, &extents, QUERN_BF16, false, true, TEST_CONTIGUOUS);
    for (int32_t threads = 1; threads <= 3; threads++) {
        quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, threads);
        check(&c, ctx);
        for (int i = LOSS; i < TENSORS; i++) {
            if (threads == 1) kept[i] = test_tensor_copy(&c.t[i]);
            else assert_true(test_tensor_same_bits(&kept[i], &c.t[i]));
        }
        quern_context_destroy(ctx);
    }
    for (int i = LOSS; i < TENSORS; i++) test_tensor_free(&kept[i]);
    release(&c);
}

/* Without teacher mass there is neither a loss nor a gradient: the window or the sink takes it all. */
static void a_window_may_take_all(void **state)
{
    const oracle_indexer_loss extents = {.batch = 1,
                                         .queries = 5,
                                         .index_heads = 2,
                                         .width = 8,
                                         .entries = 9,
                                         .heads = 2,
                                         .dim = 8,
                                         .ratio = 1,
                                         .lambda = 1};
    test_random random = {test_seed("the indexer's loss without mass", 54)};
    (void)state;
    loss_case c = make(&random, &extents, QUERN_F32, false, true, TEST_CONTIGUOUS);
    for (int i = 0; i < 10; i++) c.value[LSE_WIN][i] = 1000;
    test_tensor_set(&c.t[LSE_WIN], c.value[LSE_WIN]);
    for (int i = LOSS; i < TENSORS; i++) {
        memset(c.value[i], 0, sizeof(double) * (size_t)test_tensor_count(&c.t[i]));
        memset(c.size[i], 0, sizeof(double) * (size_t)test_tensor_count(&c.t[i]));
    }
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    check(&c, ctx);
    quern_context_destroy(ctx);
    release(&c);
}

static void bad_calls(void **state)
{
    static const char *const words[] = {"lse_win is NULL: a tensor is needed", "q_index has 12 channels",
                                        "q has 520 channels: a multiple of 8 up to 512", "ratio is -1",
                                        "kv_cmp.shape[1] is 8: 9 is accepted"};
    const oracle_indexer_loss extents = {.batch = 1,
                                         .queries = 3,
                                         .index_heads = 2,
                                         .width = 16,
                                         .entries = 9,
                                         .heads = 2,
                                         .dim = 8,
                                         .ratio = 1,
                                         .lambda = 1};
    static char room[1 << 20];
    test_random random = {5};
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    (void)state;
    for (int i = 0; i < 5; i++) {
        loss_case c = make(&random, &extents, QUERN_F32, false, true, TEST_CONTIGUOUS);
        quern_dsv4_index_loss_tensors views = QUERN_DSV4_INDEX_LOSS_TENSORS_INIT;
        if (i == 1) c.t[Q_I].view.shape[3] = 12;
        if (i == 2) c.t[Q].view.shape[3] = 520;
        if (i == 3) c.params.ratio = -1;
        if (i == 4) c.t[KV_CMP].view.shape[1] = 8;
        op_case_bind(op, c.t, TENSORS, i == 0 ? ~((uint64_t)1 << LSE_WIN) : OP_CASE_ALL, &views);
        if (quern_op_run(ctx, NULL, quern_op_named(op), QUERN_OP_FORWARD, &c.params, &views, room,
                         sizeof room) != QUERN_ERR_INVALID_ARGUMENT)
            fail_msg("\"%s\" is not refused", words[i]);
        if (strstr(quern_last_error(ctx), words[i]) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", quern_last_error(ctx), words[i]);
        for (int k = LOSS; k < TENSORS; k++) test_tensor_check_unchanged(&c.t[k], words[i]);
        release(&c);
    }
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_differences),
        cmocka_unit_test(calls_against_float64),
        cmocka_unit_test(wide_calls_against_float64),
        cmocka_unit_test(many_queries_against_float64),
        cmocka_unit_test(threads_give_the_same_bits),
        cmocka_unit_test(a_window_may_take_all),
        cmocka_unit_test(bad_calls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
