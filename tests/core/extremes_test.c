/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * extremes_test.c - calls that an operation accepts, in which one number is the least or greatest of its
 * type: every field of the parameters, and of every tensor's view. They end with a sentence or compute; under
 * the sanitizers nothing overflows on the way. Then the numbers that stand alone: operations, passes, places
 * in lists, fields of caches.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "op_trial.h"

#include "core/op_entry.h"

#include <quern/cache.h>
#include <quern/dsv4_layer.h>
#include <quern/moe.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const int64_t wide[] = {INT64_MIN, INT64_MIN + 1, -1, INT64_MAX - 1, INT64_MAX};
static const int32_t narrow[] = {INT32_MIN, INT32_MIN + 1, -1, 31, 32, 33, INT32_MAX - 1, INT32_MAX};
static const float numbers[] = {-INFINITY, -FLT_MAX, -0.0f, 1e-45f, FLT_MAX, INFINITY, NAN};
#define COUNT(list) (sizeof(list) / sizeof *(list))

/* ---- operations ---- */

/* Extremes are of numbers, not of work: accepted calls have small tensors. */
enum { ACCEPTED = 4, MOST_TRIALS = 2000, MOST_WORKSPACE = 1 << 24, MOST_TENSORS = 1 << 20 };

/* Whatever a call does with the trial, it says why or computes. `what` was changed. */
static void probe(op_trial *t, const quern_exec *exec, const char *what)
{
    const op_subject *s = t->s;
    const quern_operation operation = t->pass == QUERN_OP_FORWARD ? s->info.forward : s->info.backward;
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    quern_plan *plan = NULL;
    size_t bytes = 0;
    int64_t extent;
    char text[400];
    (void)quern_op_roles(s->op, t->pass, &t->params, &t->tensors, roles);
    (void)quern_op_expect(s->op, t->pass, &t->params, &t->tensors, NULL, expected);
    (void)quern_op_extent(s->op, &t->params, &t->tensors, "N", &extent);
    const quern_status status = quern_op_workspace(ctx, s->op, t->pass, &t->params, &t->tensors, &bytes);
    if (status != QUERN_OK && strlen(quern_last_error(ctx)) < 10)
        fail_msg("%s, %s: no sentence", s->info.name, what);
    if (quern_plan_create(ctx, operation, &t->params, &t->tensors, &plan) == QUERN_OK)
        (void)quern_plan_describe(plan, text, sizeof text);
    quern_plan_destroy(plan);
    if (bytes > MOST_WORKSPACE) return;
    void *workspace = malloc(bytes + 1);
    assert_non_null(workspace);
    (void)quern_op_run(ctx, exec, s->op, t->pass, &t->params, &t->tensors, workspace, bytes);
    free(workspace);
}

/* Sets one field of the parameters to each extreme of its type. */
static void change_param(op_trial *t, const op_param *p)
{
    const op_any_params before = t->params;
    const int64_t least = p->least, most = p->most;
    unsigned char *at = t->params.bytes + p->offset;
    const int64_t ends[] = {least, most, most < INT64_MAX ? most + 1 : most,
                            least > INT64_MIN ? least - 1 : least};
    for (size_t i = 0; i < COUNT(wide) + COUNT(ends); i++) {
        const int64_t value = i < COUNT(wide) ? wide[i] : ends[i - COUNT(wide)];
        const int32_t choice = (int32_t)(i < COUNT(wide) ? value >> 32 : value);
        const bool is_number =
            p->kind == OP_ROOT || p->kind == OP_POSITIVE || p->kind == OP_LIMIT || p->kind == OP_NUMBER;
        if (p->kind == OP_INTEGER) memcpy(at, &value, sizeof value);
        else if (p->kind == OP_FLAG) *at = (unsigned char)(255 - i);
        else if (is_number) memcpy(at, &numbers[i % COUNT(numbers)], sizeof(float));
        else memcpy(at, &choice, sizeof choice);
        probe(t, NULL, p->field);
    }
    t->params = before;
}

/* Sets each number of a view that a call of the trial reads to each extreme of its type. */
static void change_view(op_trial *t, quern_tensor *v, const quern_exec *exec, const char *what)
{
    const quern_tensor before = *v;
    for (size_t i = 0; i < COUNT(narrow); i++) {
        v->dtype = (quern_dtype)narrow[i], probe(t, exec, what), *v = before;
        v->device = (quern_device)narrow[i], probe(t, exec, what), *v = before;
        v->device_id = narrow[i], probe(t, exec, what), *v = before;
        v->ndim = narrow[i], probe(t, exec, what), *v = before;
    }
    for (int32_t dim = 0; dim < before.ndim; dim++)
        for (size_t i = 0; i < COUNT(wide); i++) {
            v->shape[dim] = wide[i], probe(t, exec, what), *v = before;
            if (wide[i] == -1) continue; /* inputs may have this stride, in memory that there is not */
            v->strides[dim] = wide[i], probe(t, exec, what), *v = before;
        }
}

static void change_each(op_trial *t, const op_family *family)
{
    int32_t word = 0;
    const int64_t one = 1;
    quern_tensor status = quern_tensor_contiguous(&word, QUERN_I32, 1, &one);
    quern_exec exec = QUERN_EXEC_INIT;
    exec.status = &status;
    for (int32_t i = 0; i < family->param_count; i++) change_param(t, &family->params[i]);
    for (int32_t i = 0; i < t->s->info.tensor_count; i++)
        if (t->tensors.t[i] != NULL) change_view(t, &t->view[i], NULL, t->s->tensors[i].field);
    change_view(t, &status, &exec, "exec.status");
}

static bool is_small(const op_trial *t)
{
    size_t bytes = 0;
    for (int32_t i = 0; i < t->s->info.tensor_count; i++)
        if (t->tensors.t[i] != NULL) bytes += op_trial_bytes(&t->view[i]);
    return bytes <= MOST_TENSORS;
}

static void numbers_at_the_ends_of_their_types(void **state)
{
    static op_subject s;
    const int wanted = test_trials(ACCEPTED);
    const uint64_t seed = test_seed("numbers_at_the_ends_of_their_types", 34);
    (void)state;
    for (size_t i = 0; op_subject_read(i, &s); i++) {
        int accepted[2] = {0, 0};
        alarm(300); /* a spin ends the test */
        for (int n = 0; n < MOST_TRIALS; n++) {
            test_random random;
            op_trial t = {.s = &s, .random = &random, .tame = true};
            size_t bytes;
            t.pass = s.info.backward != 0 && n % 2 == 1 ? QUERN_OP_BACKWARD : QUERN_OP_FORWARD;
            if (accepted[t.pass] == wanted || !test_trial(seed + i, n, &random)) continue;
            op_trial_choose(&t);
            if (quern_op_workspace(ctx, s.op, t.pass, &t.params, &t.tensors, &bytes) != QUERN_OK ||
                !t.contiguous || bytes > MOST_WORKSPACE || !is_small(&t))
                continue;
            if (op_trial_give_memory(&t)) {
                accepted[t.pass]++;
                change_each(&t, op_family_of(s.op));
            }
            for (int32_t k = 0; k < s.info.tensor_count; k++) free(t.view[k].data);
        }
        if (getenv("QUERN_TEST_TRIAL") == NULL &&
            (accepted[0] == 0 || (s.info.backward != 0 && accepted[1] == 0)))
            fail_msg("%s: no call is accepted", s.info.name);
    }
}

/* ---- numbers that stand alone ---- */

static void numbers_of_lists(void **state)
{
    const quern_op *op = quern_op_named("nsa");
    op_any_params params;
    op_any_tensors none = {sizeof none, {NULL}};
    char text[64];
    (void)state;
    assert_non_null(op);
    assert_int_equal(quern_op_defaults(op, &params), QUERN_OK);
    none.size = sizeof none.size;
    assert_null(quern_op_at(SIZE_MAX));
    for (size_t i = 0; i < COUNT(narrow); i++) {
        const int32_t x = narrow[i];
        const quern_op_pass pass = (quern_op_pass)x;
        quern_op_role roles[QUERN_OP_TENSORS_MAX];
        quern_plan *plan = NULL;
        size_t bytes;
        int32_t data[1] = {0};
        (void)quern_op_roles(op, pass, &params, &none, roles);
        assert_int_not_equal(quern_op_workspace(ctx, op, pass, &params, &none, &bytes), QUERN_OK);
        if (x != QUERN_OP_NSA_LIST_CONVERT && x != QUERN_OP_NSA_INDEX && x != QUERN_OP_NSA_INDEX_LOSS)
            assert_int_equal(quern_plan_create(ctx, (quern_operation)x, &params, &none, &plan),
                             QUERN_ERR_INVALID_ARGUMENT);
        assert_int_not_equal(quern_op_complete(op, &params, &none, x, data), QUERN_OK);
        if (x < 0 || x >= QUERN_OP_TENSORS_MAX) {
            assert_int_not_equal(quern_op_text(op, &params, x, text, sizeof text), QUERN_OK);
            assert_null(quern_op_tensor_name(op, &params, x));
        }
        assert_int_equal(quern_dtype_size((quern_dtype)x), 0);
        assert_string_equal(quern_dtype_name((quern_dtype)x), "?");
        assert_string_equal(quern_status_name((quern_status)x), "?");
        assert_string_equal(quern_cpu_level_name((quern_cpu_level)x), "?");
    }
}

static void numbers_of_contexts(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(narrow); i++) {
        quern_context_params p = QUERN_CONTEXT_PARAMS_INIT;
        quern_context *other = NULL;
        p.threads = narrow[i];
        if (quern_context_create(&p, &other) == QUERN_OK) quern_context_destroy(other);
        p.threads = 1;
        p.cpu_level = (quern_cpu_level)narrow[i];
        assert_int_not_equal(quern_context_create(&p, &other), QUERN_OK);
    }
}

/* A field of a params struct that holds an integer. */
typedef struct field {
    size_t offset, bytes;
} field;

#define WIDE(type, member)                                                                                   \
    {                                                                                                        \
        offsetof(type, member), sizeof(int64_t)                                                              \
    }
#define NARROW(type, member)                                                                                 \
    {                                                                                                        \
        offsetof(type, member), sizeof(int32_t)                                                              \
    }

/* Calls `use` with each extreme in each field of the struct. */
static void change_fields(void *params, const field *fields, size_t count, void (*use)(const void *params))
{
    for (size_t f = 0; f < count; f++)
        for (size_t i = 0; i < COUNT(wide); i++) {
            char *at = (char *)params + fields[f].offset;
            int64_t before = 0;
            const int32_t low = i == 2 ? -1 : (int32_t)(wide[i] >> 32);
            memcpy(&before, at, fields[f].bytes);
            memcpy(at, fields[f].bytes == sizeof low ? (const void *)&low : &wide[i], fields[f].bytes);
            use(params);
            memcpy(at, &before, fields[f].bytes);
        }
}

static void use_cache(const void *params)
{
    size_t memory, rows;
    quern_ledger_params l = QUERN_LEDGER_PARAMS_INIT;
    int64_t pages;
    if (quern_cache_ledger_params(params, &l) == QUERN_OK)
        for (size_t i = 0; i < COUNT(wide); i++)
            for (int pool = 0; pool <= QUERN_LEDGER_STATES; pool++)
                (void)quern_ledger_pages(&l, pool, wide[i], &pages, NULL);
    if (quern_cache_size(params, &memory, &rows) == QUERN_OK) assert_true(memory > 0);
}

static void use_layer_cache(const void *params)
{
    size_t memory, rows;
    if (quern_dsv4_layer_cache_size(params, &memory, &rows) == QUERN_OK) assert_true(memory > 0);
}

static void numbers_of_caches(void **state)
{
    typedef quern_cache_params cp;
    typedef quern_dsv4_layer_cache_params lp;
    static const field of_cache[] = {NARROW(cp, dtype), WIDE(cp, sequences),   WIDE(cp, kv_heads),
                                     WIDE(cp, dim),     WIDE(cp, dim_v),       WIDE(cp, capacity),
                                     WIDE(cp, page),    WIDE(cp, pages),       WIDE(cp, block_size),
                                     WIDE(cp, stride),  NARROW(cp, compress),  WIDE(cp, window),
                                     WIDE(cp, step),    WIDE(cp, index_heads), WIDE(cp, index_dim)};
    static const field of_layer[] = {NARROW(lp, kind),   NARROW(lp, dtype),      WIDE(lp, sequences),
                                     WIDE(lp, capacity), WIDE(lp, dim),          WIDE(lp, window),
                                     WIDE(lp, ratio),    WIDE(lp, index_dim),    WIDE(lp, ring),
                                     NARROW(lp, format), NARROW(lp, key_format), WIDE(lp, page),
                                     WIDE(lp, pages)};
    (void)state;
    for (int paged = 0; paged < 2; paged++) {
        cp c = QUERN_CACHE_PARAMS_INIT;
        c.sequences = c.kv_heads = 2, c.dim = c.dim_v = 8, c.capacity = 100;
        c.page = paged ? 64 : 0, c.pages = paged ? 9 : 0;
        c.block_size = 8, c.separate_win = c.separate_slc = true, c.window = 16, c.step = 8;
        c.index_heads = 2, c.index_dim = 8;
        use_cache(&c);
        change_fields(&c, of_cache, COUNT(of_cache), use_cache);
        lp l = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
        l.kind = QUERN_DSV4_LAYER_CSA, l.sequences = 2, l.capacity = 100, l.dim = 8, l.window = 4;
        l.ratio = 4, l.index_dim = 8, l.ring = 4, l.page = paged ? 4 : 0, l.pages = paged ? 9 : 0;
        use_layer_cache(&l);
        change_fields(&l, of_layer, COUNT(of_layer), use_layer_cache);
    }
}

/* Sequences, counts and rows to take back. */
static void numbers_of_calls_on_caches(void **state)
{
    static char memory[1 << 15], rows[1 << 16];
    quern_cache_params p = QUERN_CACHE_PARAMS_INIT;
    quern_dsv4_layer_cache_params lp = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_cache *cache = NULL;
    quern_dsv4_layer_cache *layer = NULL;
    size_t bytes = 0;
    int64_t repacked = 0;
    (void)state;
    p.sequences = 2, p.kv_heads = 1, p.dim = p.dim_v = 8, p.capacity = 8;
    lp.kind = QUERN_DSV4_LAYER_SWA, lp.sequences = 2, lp.capacity = 8, lp.dim = 8, lp.window = 4;
    assert_int_equal(quern_cache_create(&p, memory, sizeof memory / 2, rows, sizeof rows / 2, &cache),
                     QUERN_OK);
    assert_int_equal(quern_dsv4_layer_cache_create(&lp, memory + sizeof memory / 2, sizeof memory / 2,
                                                   rows + sizeof rows / 2, sizeof rows / 2, &layer),
                     QUERN_OK);
    for (size_t i = 0; i < COUNT(wide); i++) {
        const int64_t x = wide[i], one = 1, counts[] = {x, x};
        const int32_t id = (int32_t)(x >> 32), zero = 0;
        const quern_cache_tensors none = QUERN_CACHE_TENSORS_INIT;
        const quern_cache_batch batches[] = {{sizeof *batches, x, &zero, &one},
                                             {sizeof *batches, 1, &zero, counts},
                                             {sizeof *batches, 1, &id, &one}};
        for (size_t b = 0; b < COUNT(batches); b++)
            assert_int_equal(quern_cache_append_workspace(ctx, cache, &batches[b], &none, &bytes),
                             QUERN_ERR_INVALID_ARGUMENT);
        assert_int_not_equal(quern_cache_rollback(cache, 0, x), QUERN_OK);
        assert_int_not_equal(quern_cache_reset(cache, x), QUERN_OK);
        assert_int_not_equal(quern_cache_fork(cache, 0, x), QUERN_OK);
        assert_int_not_equal(quern_cache_save(ctx, cache, x, NULL, &bytes), QUERN_OK);
        assert_int_not_equal(quern_dsv4_layer_cache_rollback(layer, 0, x), QUERN_OK);
        assert_int_not_equal(quern_dsv4_layer_cache_reset(layer, x), QUERN_OK);
        assert_int_not_equal(quern_dsv4_layer_cache_fork(layer, 0, x), QUERN_OK);
        assert_int_not_equal(quern_dsv4_layer_cache_save(ctx, layer, x, NULL, &bytes), QUERN_OK);
        assert_int_not_equal(quern_dsv4_layer_cache_pages(layer, x, NULL, NULL), QUERN_OK);
        for (int n = 0; n < 2; n++)
            assert_int_equal(
                quern_nvfp4_repacked_bytes(ctx, QUERN_CPU, 0, n > 0 ? x : 16, n > 0 ? 16 : x, &repacked),
                QUERN_ERR_INVALID_ARGUMENT);
    }
}

/* Damaged bytes of a saved sequence: any of its numbers may be anything. */
static void numbers_of_saved_sequences(void **state)
{
    quern_dsv4_layer_cache_params p = QUERN_DSV4_LAYER_CACHE_PARAMS_INIT;
    quern_dsv4_layer_cache *c = NULL;
    size_t memory_bytes, rows_bytes, bytes = 0;
    (void)state;
    p.kind = QUERN_DSV4_LAYER_SWA, p.sequences = 1, p.capacity = 8, p.dim = 8, p.window = 4;
    assert_int_equal(quern_dsv4_layer_cache_size(&p, &memory_bytes, &rows_bytes), QUERN_OK);
    void *memory = malloc(memory_bytes), *rows = malloc(rows_bytes + 1);
    assert_int_equal(quern_dsv4_layer_cache_create(&p, memory, memory_bytes, rows, rows_bytes, &c), QUERN_OK);
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, c, 0, NULL, &bytes), QUERN_OK);
    char *saved = malloc(bytes);
    assert_int_equal(quern_dsv4_layer_cache_save(ctx, c, 0, saved, &bytes), QUERN_OK);
    for (size_t at = 0; at + sizeof(int64_t) <= bytes; at += sizeof(int32_t))
        for (size_t i = 0; i < COUNT(wide); i++) {
            char before[sizeof(int64_t)];
            memcpy(before, saved + at, sizeof before);
            memcpy(saved + at, &wide[i], sizeof before);
            assert_int_equal(quern_dsv4_layer_cache_restore(ctx, c, 0, saved, bytes), QUERN_ERR_FORMAT);
            memcpy(saved + at, before, sizeof before);
        }
    assert_int_equal(quern_dsv4_layer_cache_restore(ctx, c, 0, saved, bytes), QUERN_OK);
    free(saved), free(memory), free(rows);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_at_the_ends_of_their_types),
        cmocka_unit_test(numbers_of_lists),
        cmocka_unit_test(numbers_of_contexts),
        cmocka_unit_test(numbers_of_caches),
        cmocka_unit_test(numbers_of_saved_sequences),
        cmocka_unit_test(numbers_of_calls_on_caches),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
