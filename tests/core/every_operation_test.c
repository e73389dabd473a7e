/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * every_operation_test.c - what holds for every operation that quern/op.h lists: arguments that are missing
 * are named, structs have any size, and no parameters, shapes, strides or index lists make a call crash, spin
 * or write outputs that it refuses to compute; among them are calls of each that it accepts, whose plans
 * refuse other addresses and give the call's bits. Meant to run under the sanitizers, too.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "random.h"
#include "tensor.h"

#include <quern/op.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct any_tensors {
    size_t size;
    const quern_tensor *t[QUERN_OP_TENSORS_MAX];
} any_tensors;

typedef union any_params {
    size_t size;
    unsigned char bytes[QUERN_OP_PARAMS_BYTES];
} any_params;

/* An operation with its tensors and parameters. */
typedef struct subject {
    const quern_op *op;
    quern_op_info info;
    quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
    quern_op_param params[QUERN_OP_PARAMS_MAX];
} subject;

/* False past the last operation. */
static bool read_subject(size_t i, subject *s)
{
    s->op = quern_op_at(i);
    if (s->op == NULL) return false;
    assert_int_equal(quern_op_get(s->op, &s->info), QUERN_OK);
    assert_int_equal(quern_op_get_tensors(s->op, s->tensors), QUERN_OK);
    assert_int_equal(quern_op_get_params(s->op, s->params), QUERN_OK);
    return true;
}

static bool has_pass(const subject *s, int pass)
{
    return pass == QUERN_OP_FORWARD || s->info.backward != 0;
}

/* Parameters with which a call is refused for its tensors alone. */
static void set_defaults(const subject *s, any_params *params)
{
    assert_int_equal(quern_op_defaults(s->op, params), QUERN_OK);
    if (strcmp(s->info.name, "nsa-list-convert") != 0) return;
    assert_int_equal(quern_op_set(s->op, params, "from", "64"), QUERN_OK);
    assert_int_equal(quern_op_set(s->op, params, "to", "64"), QUERN_OK);
}

static void expect_error(const subject *s, quern_status status, const char *words)
{
    if (status != QUERN_ERR_INVALID_ARGUMENT || strstr(quern_last_error(NULL), words) == NULL)
        fail_msg("%s: status %d without \"%s\": %s", s->info.name, (int)status, words,
                 quern_last_error(NULL));
}

static void missing_arguments_are_named(void **state)
{
    static subject s;
    (void)state;
    for (size_t i = 0; read_subject(i, &s); i++)
        for (int pass = 0; pass < 2; pass++) {
            const quern_operation operation = pass == 0 ? s.info.forward : s.info.backward;
            any_params params;
            any_tensors none = {s.info.tensors_size, {NULL}};
            quern_plan *plan = NULL;
            size_t bytes;
            if (!has_pass(&s, pass)) continue;
            set_defaults(&s, &params);
            const quern_op_pass p = (quern_op_pass)pass;
            expect_error(&s, quern_op_workspace(NULL, s.op, p, &params, &none, &bytes), "ctx is NULL");
            expect_error(&s, quern_op_workspace(ctx, s.op, p, NULL, &none, &bytes), "params is NULL");
            expect_error(&s, quern_op_workspace(ctx, s.op, p, &params, NULL, &bytes), "tensors is NULL");
            expect_error(&s, quern_op_workspace(ctx, s.op, p, &params, &none, &bytes), "NULL");
            expect_error(&s, quern_op_run(ctx, NULL, s.op, p, &params, &none, NULL, 0), "NULL");
            expect_error(&s, quern_plan_create(ctx, operation, &params, &none, NULL), "plan is NULL");
            expect_error(&s, quern_plan_create(ctx, operation, NULL, &none, &plan), "params is NULL");
            expect_error(&s, quern_plan_create(ctx, operation, &params, &none, &plan), "NULL");
            assert_null(plan);
        }
}

/* ---- sizes of structs ---- */

/* A copy of `bytes` at the end of a block of its own, so that a sanitizer sees a read past it. */
static void *resized(const void *from, size_t known, size_t bytes)
{
    unsigned char *p = calloc(1, bytes);
    assert_non_null(p);
    memcpy(p, from, bytes < known ? bytes : known);
    memcpy(p, &bytes, sizeof bytes);
    return p;
}

/* Whether the sentence of a call with these structs is about the size of `name`. */
static bool size_is_refused(const subject *s, int pass, const void *params, const void *tensors,
                            const char *name)
{
    char words[32];
    size_t bytes;
    snprintf(words, sizeof words, "%s.size", name);
    const quern_status status = quern_op_workspace(ctx, s->op, (quern_op_pass)pass, params, tensors, &bytes);
    assert_int_not_equal(status, QUERN_OK); /* there is no tensor */
    return strstr(quern_last_error(ctx), words) != NULL;
}

static void check_sizes(const subject *s, int pass, bool of_params)
{
    enum { TAIL = 24 };
    any_params params;
    any_tensors none = {s->info.tensors_size, {NULL}};
    set_defaults(s, &params);
    const void *from = of_params ? (const void *)&params : &none;
    const size_t known = of_params ? s->info.params_size : s->info.tensors_size;
    const char *name = of_params ? "params" : "tensors";
    for (size_t bytes = 8; bytes <= known + TAIL; bytes += 8) {
        unsigned char *other = resized(from, known, bytes);
        const void *p = of_params ? (void *)other : &params, *t = of_params ? (const void *)&none : other;
        if (size_is_refused(s, pass, p, t, name))
            fail_msg("%s refuses %zu bytes of %s: %s", s->info.name, bytes, name, quern_last_error(ctx));
        for (size_t at = known; at < bytes; at++) {
            other[at] = 1;
            if (!size_is_refused(s, pass, p, t, name))
                fail_msg("%s takes byte %zu of %s", s->info.name, at, name);
            other[at] = 0;
        }
        free(other);
    }
}

static void structs_may_be_older_or_newer(void **state)
{
    static subject s;
    (void)state;
    for (size_t i = 0; read_subject(i, &s); i++)
        for (int pass = 0; pass < 2; pass++)
            for (int of_params = 0; of_params < 2 && has_pass(&s, pass); of_params++)
                check_sizes(&s, pass, of_params != 0);
}

/* ---- random calls ---- */

/* Uniform in 0 ... n - 1. */
static int64_t below(test_random *random, int64_t n)
{
    return test_random_int(random, 0, n - 1);
}

static int64_t one_of(test_random *random, const int64_t *list, size_t count)
{
    return list[below(random, (int64_t)count)];
}
#define ONE_OF(random, list) one_of(random, list, sizeof(list) / sizeof *(list))

static const int64_t extreme[] = {-1,
                                  0,
                                  (int64_t)1 << 31,
                                  ((int64_t)1 << 31) - 1,
                                  (int64_t)1 << 32,
                                  (int64_t)1 << 40,
                                  (int64_t)1 << 55,
                                  (int64_t)1 << 62,
                                  INT64_MAX,
                                  INT64_MAX - 63,
                                  INT64_MIN};
static const int64_t hollow[] = {0, 0, 16, 16, (int64_t)1 << 40, ((int64_t)1 << 31) - 64};
static const int64_t usual[] = {0, 1, 1, 2, 2, 3, 4, 8, 16, 16, 32, 64, 64, 128};

/* A call under construction. */
typedef struct trial {
    const subject *s;
    test_random *random;
    quern_op_pass pass;
    any_params params;
    any_tensors tensors;
    quern_tensor view[QUERN_OP_TENSORS_MAX];
    bool tame;   /* most of it is what an operation accepts */
    bool hollow; /* extents are 0, or huge: what is accepted has no elements */
    bool contiguous;
    int64_t symbol[64]; /* the extents of names in shapes, by a hash of the name */
} trial;

static void choose_params(trial *t)
{
    const subject *s = t->s;
    assert_int_equal(quern_op_defaults(s->op, &t->params), QUERN_OK);
    for (int32_t i = 0; i < s->info.param_count; i++) {
        const quern_op_param *p = &s->params[i];
        char text[64];
        if (below(t->random, t->tame ? 12 : 3) > 0) continue;
        if (strcmp(p->value, "INT") == 0) {
            const int64_t value =
                below(t->random, 6) == 0 ? ONE_OF(t->random, extreme) : ONE_OF(t->random, usual);
            snprintf(text, sizeof text, "%lld", (long long)value);
        } else if (strcmp(p->value, "NUMBER") == 0) {
            static const char *const numbers[] = {"0", "1", "-1", "0.125", "1e30", "-3e38", "1e-45"};
            snprintf(text, sizeof text, "%s", numbers[below(t->random, 7)]);
        } else {
            const char *word = p->value;
            for (int64_t skip = below(t->random, 6); skip > 0; skip--) {
                const char *next = strpbrk(word, "|,");
                word = next != NULL ? next + 1 : p->value;
            }
            snprintf(text, sizeof text, "%.*s", (int)strcspn(word, "|,"), word);
        }
        (void)quern_op_set(s->op, &t->params, p->field, text); /* what it refuses stays at its default */
    }
}

static int64_t extent_named(trial *t, const char *name, size_t length)
{
    uint32_t hash = 5;
    for (size_t i = 0; i < length; i++) hash = hash * 33 + (unsigned char)name[i];
    return t->symbol[hash % 64];
}

/* The extents of a shape as it is described. `|` stands between whole shapes or between the words of one
 * extent, and `...` for one extent or more: each is tried. */
static int32_t choose_extents(trial *t, const char *shape, int64_t extents[QUERN_MAX_DIMS])
{
    const bool words = below(t->random, 2) == 0;
    int32_t ndim = 0;
    for (const char *at = shape; *at != '\0' && *at != '|' && ndim < QUERN_MAX_DIMS; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " |"), name = strcspn(at, " |/");
        const int64_t divisor = at[name] == '/' ? strtoll(at + name + 1, NULL, 10) : 1;
        if (strncmp(at, "... ", 4) == 0 && below(t->random, 2) == 0)
            extents[ndim++] = extent_named(t, "B", 1);
        if (ndim < QUERN_MAX_DIMS) extents[ndim++] = extent_named(t, at, name) / (divisor > 0 ? divisor : 1);
        at += words ? strcspn(at, " ") : length;
    }
    return ndim;
}

/* The shape that a tensor's description asks for. */
static void choose_view(trial *t, int32_t i, bool varlen)
{
    static const quern_dtype floats[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    const quern_op_tensor *d = &t->s->tensors[i];
    int64_t extents[QUERN_MAX_DIMS];
    const int32_t ndim = choose_extents(t, varlen && d->varlen[0] != '\0' ? d->varlen : d->fixed, extents);
    quern_dtype dtype = floats[t->symbol[0] % 3];
    if (strcmp(d->dtype, "f32") == 0) dtype = QUERN_F32;
    if (strcmp(d->dtype, "i32") == 0) dtype = QUERN_I32;
    if (strcmp(d->dtype, "i64") == 0) dtype = QUERN_I64;
    if (strcmp(d->dtype, "u8") == 0 || strcmp(d->dtype, "scale") == 0 || strcmp(d->dtype, "exponent") == 0)
        dtype = QUERN_U8;
    t->view[i] = quern_tensor_contiguous(NULL, dtype, ndim, extents);
}

/* Spoils a view in one place. */
static void spoil(trial *t, quern_tensor *v)
{
    const int32_t dim = (int32_t)below(t->random, QUERN_MAX_DIMS);
    switch (below(t->random, 8)) {
    case 0: v->dtype = (quern_dtype)below(t->random, 20); break;
    case 1: v->ndim = (int32_t)below(t->random, 8); break;
    case 2: v->ndim = below(t->random, 2) == 0 ? 100000 : INT32_MIN; break;
    case 3: v->shape[dim] = ONE_OF(t->random, extreme); break;
    case 4: v->shape[dim] = ONE_OF(t->random, usual); break;
    case 5: v->strides[dim] = ONE_OF(t->random, extreme); break;
    case 6: v->strides[dim] = ONE_OF(t->random, usual) - 2; break;
    default: v->device = (quern_device)(below(t->random, 4) - 1); break;
    }
    t->contiguous = false;
}

/* Which tensors are there, by their roles; now and then one too many or too few. */
static void choose_presence(trial *t)
{
    const subject *s = t->s;
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    const int64_t odd = t->tame ? 40 : 8;
    for (int32_t i = 0; i < s->info.tensor_count; i++) {
        const quern_op_tensor *d = &s->tensors[i];
        const bool wanted = d->needed || d->result[t->pass] || (t->pass != QUERN_OP_FORWARD && d->trigger);
        t->tensors.t[i] = wanted || below(t->random, 3) == 0 ? &t->view[i] : NULL;
    }
    for (int round = 0; round < 3; round++) {
        (void)quern_op_follow(s->op, &t->params, &t->tensors);
        if (quern_op_roles(s->op, t->pass, &t->params, &t->tensors, roles) != QUERN_OK) break;
        for (int32_t i = 0; i < s->info.tensor_count; i++) {
            if (below(t->random, odd) == 0) continue;
            if (roles[i] == QUERN_OP_NEEDED || roles[i] == QUERN_OP_RESULT) t->tensors.t[i] = &t->view[i];
            if (roles[i] == QUERN_OP_REFUSED || roles[i] == QUERN_OP_SOURCE_MISSING) t->tensors.t[i] = NULL;
        }
    }
}

static void choose_tensors(trial *t)
{
    const subject *s = t->s;
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    const int64_t wide = below(t->random, 4) == 0 ? below(t->random, 64) : -1;
    const int64_t side = (int64_t)16 << below(t->random, 3);
    for (int i = 0; i < 64; i++) {
        t->symbol[i] = i == wide ? ONE_OF(t->random, extreme) & INT64_MAX : ONE_OF(t->random, usual);
        if (t->tame && below(t->random, 40) > 0) t->symbol[i] = side;
        if (t->hollow) t->symbol[i] = ONE_OF(t->random, hollow);
    }
    const bool varlen = s->info.varlen_by >= 0 && below(t->random, 3) == 0;
    t->tensors = (any_tensors){s->info.tensors_size, {NULL}};
    t->contiguous = true;
    for (int32_t i = 0; i < s->info.tensor_count; i++) choose_view(t, i, varlen);
    choose_presence(t);
    if (s->info.varlen_by >= 0) t->tensors.t[s->info.varlen_by] = varlen ? &t->view[s->info.varlen_by] : NULL;
    (void)quern_op_follow(s->op, &t->params, &t->tensors);
    if (quern_op_expect(s->op, t->pass, &t->params, &t->tensors, NULL, expected) == QUERN_OK)
        for (int32_t i = 0; i < s->info.tensor_count; i++)
            if (t->tensors.t[i] != NULL && expected[i].ndim > 0) t->view[i] = expected[i];
    for (int64_t n = below(t->random, t->tame ? 2 : 4) - !t->tame; n > 0; n--)
        spoil(t, &t->view[below(t->random, s->info.tensor_count)]);
}

enum { PLANS = 30, MOST_BYTES = 1 << 20, MOST_WORKSPACE = 1 << 26, PATTERN = 0x5a };

/* The bytes of a contiguous view; 0: it has no elements or too many to run. */
static size_t bytes_of(const quern_tensor *v)
{
    size_t bytes = quern_dtype_size(v->dtype);
    for (int32_t i = 0; i < v->ndim; i++) {
        if (v->shape[i] <= 0 || v->shape[i] > MOST_BYTES) return 0;
        bytes *= (size_t)v->shape[i];
        if (bytes > MOST_BYTES) return 0;
    }
    return bytes;
}

static bool has_elements(const quern_tensor *v)
{
    for (int32_t i = 0; i < v->ndim; i++)
        if (v->shape[i] == 0) return false;
    return true;
}

/* Gives every tensor a block of its own: random values, index lists with entries that are out of range, the
 * results a pattern. False where that is too large. */
static bool give_memory(trial *t)
{
    const subject *s = t->s;
    for (int32_t i = 0; i < s->info.tensor_count; i++)
        if (t->tensors.t[i] != NULL && has_elements(&t->view[i]) && bytes_of(&t->view[i]) == 0) return false;
    for (int32_t i = 0; i < s->info.tensor_count; i++) {
        quern_tensor *v = &t->view[i];
        const size_t bytes = t->tensors.t[i] != NULL ? bytes_of(v) : 0;
        v->data = bytes > 0 ? malloc(bytes) : NULL;
        if (v->data == NULL) continue;
        memset(v->data, PATTERN, bytes);
        if (s->tensors[i].result[t->pass]) continue;
        int32_t rising = 0;
        const bool valid = below(t->random, 2) == 0;
        for (size_t k = 0; k < bytes; k++)
            if (v->dtype == QUERN_U8) ((uint8_t *)v->data)[k] = (uint8_t)below(t->random, valid ? 120 : 256);
        for (size_t k = 0; k < bytes / 4 && v->dtype == QUERN_I32; k++) {
            ((int32_t *)v->data)[k] = valid ? rising : (int32_t)ONE_OF(t->random, extreme);
            rising += (int32_t)below(t->random, 2);
        }
        for (size_t k = 0; k < bytes / 4 && v->dtype == QUERN_F32; k++)
            ((float *)v->data)[k] = (float)below(t->random, 1000) / 250 - 2;
    }
    return true;
}

static void check_outputs_are_as_before(const trial *t)
{
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) {
        const quern_tensor *v = &t->view[i];
        const size_t bytes = v->data != NULL && t->s->tensors[i].result[t->pass] ? bytes_of(v) : 0;
        for (size_t k = 0; k < bytes; k++)
            if (((unsigned char *)v->data)[k] != PATTERN)
                fail_msg("%s wrote %s and says: %s", t->s->info.name, t->s->tensors[i].name,
                         quern_last_error(ctx));
    }
}

static void reset_outputs(const trial *t)
{
    for (int32_t i = 0; i < t->s->info.tensor_count; i++)
        if (t->view[i].data != NULL && t->s->tensors[i].result[t->pass])
            memset(t->view[i].data, PATTERN, bytes_of(&t->view[i]));
}

/* FNV-1a of all outputs. */
static uint64_t hash_of_outputs(const trial *t)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) {
        const quern_tensor *v = &t->view[i];
        const size_t bytes = v->data != NULL && t->s->tensors[i].result[t->pass] ? bytes_of(v) : 0;
        for (size_t k = 0; k < bytes; k++) hash = (hash ^ ((unsigned char *)v->data)[k]) * 0x100000001b3u;
    }
    return hash;
}

/* What the call gave, for runs of its plan. */
typedef struct planned {
    quern_plan *plan;
    void *data[QUERN_OP_TENSORS_MAX], *workspace;
    size_t bytes;
    quern_status status;
    uint64_t outputs;
} plan_case;

/* A run gives what the call gave, or, where `words` are named, is refused with these. */
static void check_run(const trial *t, const plan_case *p, void *workspace, size_t bytes, const char *words)
{
    reset_outputs(t);
    const quern_status status = quern_plan_run(p->plan, NULL, p->data, workspace, bytes);
    const bool refused = status != QUERN_OK && words != NULL && strstr(quern_last_error(ctx), words) != NULL;
    if (status != QUERN_OK) check_outputs_are_as_before(t);
    if (!refused && (status != p->status || hash_of_outputs(t) != p->outputs))
        fail_msg("%s by plan: status %d instead of %d, or other bits; \"%s\" is expected: %s",
                 t->s->info.name, (int)status, (int)p->status, words != NULL ? words : "",
                 quern_last_error(ctx));
}

/* Addresses that are missing or not aligned as they were, and a workspace that is too small, are refused
 * unless the call does not use them. */
static void check_plan(const trial *t, plan_case *p)
{
    const subject *s = t->s;
    char words[64];
    assert_int_equal(quern_plan_create(ctx, t->pass == QUERN_OP_FORWARD ? s->info.forward : s->info.backward,
                                       &t->params, &t->tensors, &p->plan),
                     QUERN_OK);
    for (int32_t i = 0; i < s->info.tensor_count; i++)
        p->data[i] = t->tensors.t[i] != NULL ? t->view[i].data : NULL;
    for (int32_t i = 0; i < s->info.tensor_count; i++) {
        void *const right = p->data[i];
        if (right == NULL) continue;
        p->data[i] = NULL;
        snprintf(words, sizeof words, "data[%d] is NULL", i);
        check_run(t, p, p->workspace, p->bytes, words);
        p->data[i] = (char *)right + 1;
        snprintf(words, sizeof words, "data[%d] (%s)", i, s->tensors[i].field);
        check_run(t, p, p->workspace, p->bytes, words);
        p->data[i] = right;
    }
    if (p->bytes > 0) {
        check_run(t, p, p->workspace, p->bytes - 1, "workspace_bytes");
        check_run(t, p, NULL, p->bytes, "workspace is NULL");
    }
    check_run(t, p, p->workspace, p->bytes, NULL);
    quern_plan_destroy(p->plan);
}

/* Returns whether the call computed. */
static bool run_trial(trial *t, size_t bytes, bool by_plan)
{
    bool computed = false;
    if (give_memory(t)) {
        plan_case p = {.workspace = malloc(bytes + 1), .bytes = bytes};
        assert_non_null(p.workspace);
        p.status = quern_op_run(ctx, NULL, t->s->op, t->pass, &t->params, &t->tensors, p.workspace, bytes);
        computed = p.status == QUERN_OK;
        if (!computed) check_outputs_are_as_before(t);
        p.outputs = hash_of_outputs(t);
        if (by_plan) check_plan(t, &p);
        free(p.workspace);
    }
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) free(t->view[i].data);
    return computed;
}

static void check_sentence(const trial *t)
{
    const char *sentence = quern_last_error(ctx);
    if (strchr(sentence, '\n') != NULL || strlen(sentence) < 10)
        fail_msg("%s: no sentence: \"%s\"", t->s->info.name, sentence);
}

static void no_arguments_do_harm(void **state)
{
    static subject s;
    const uint64_t seed = test_seed("no_arguments_do_harm", 32);
    const bool all = getenv("QUERN_TEST_TRIAL") == NULL && test_trials(1200) >= 1200;
    (void)state;
    for (size_t i = 0; read_subject(i, &s); i++) {
        int accepted = 0, computed = 0;
        alarm(60); /* a spin ends the test */
        for (int n = 0; n < test_trials(1200); n++) {
            test_random random;
            trial t = {.s = &s, .random = &random};
            size_t bytes = 0;
            quern_plan *plan = NULL;
            if (!test_trial(seed + i, n, &random)) continue;
            t.pass = s.info.backward != 0 && n % 2 == 1 ? QUERN_OP_BACKWARD : QUERN_OP_FORWARD;
            t.tame = n % 4 < 2;
            t.hollow = n % 8 < 2;
            choose_params(&t);
            choose_tensors(&t);
            const quern_status status = quern_op_workspace(ctx, s.op, t.pass, &t.params, &t.tensors, &bytes);
            const quern_status planned =
                quern_plan_create(ctx, t.pass == QUERN_OP_FORWARD ? s.info.forward : s.info.backward,
                                  &t.params, &t.tensors, &plan);
            quern_plan_destroy(plan);
            assert_int_equal(planned, status);
            if (status != QUERN_ERR_DEVICE) assert_in_range(status, QUERN_OK, QUERN_ERR_UNSUPPORTED);
            if (status != QUERN_OK) check_sentence(&t);
            else accepted++;
            if (status == QUERN_OK && t.contiguous && bytes < MOST_WORKSPACE)
                computed += run_trial(&t, bytes, computed < PLANS);
        }
        if (getenv("QUERN_TEST_VERBOSE") != NULL)
            printf("%-22s accepted %d, computed %d\n", s.info.name, accepted, computed);
        if (all && (accepted == 0 || computed == 0))
            fail_msg("%s: %d calls accepted, %d computed", s.info.name, accepted, computed);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_arguments_are_named),
        cmocka_unit_test(structs_may_be_older_or_newer),
        cmocka_unit_test(no_arguments_do_harm),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
