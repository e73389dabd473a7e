/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * every_operation_test.c - what holds for every operation that quern/op.h lists: arguments that are missing
 * are named, structs have any size, and no parameters, shapes, strides or index lists make a call crash, spin
 * or write outputs that it refuses to compute; among them are calls of each that it accepts, whose plans
 * refuse other addresses and give the call's bits, as does
 * the call when it is made again. Meant to run under the sanitizers, too.
 */
#include "cmocka_c11.h"
#include "context.h"
#include "tensor.h"
#include "op_trial.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool has_pass(const op_subject *s, int pass)
{
    return pass == QUERN_OP_FORWARD || s->info.backward != 0;
}

/* Parameters with which a call is refused for its tensors alone. */
static void set_defaults(const op_subject *s, op_any_params *params)
{
    assert_int_equal(quern_op_defaults(s->op, params), QUERN_OK);
    if (strcmp(s->info.name, "nsa-list-convert") != 0) return;
    assert_int_equal(quern_op_set(s->op, params, "from", "64"), QUERN_OK);
    assert_int_equal(quern_op_set(s->op, params, "to", "64"), QUERN_OK);
}

static void expect_error(const op_subject *s, quern_status status, const char *words)
{
    if (status != QUERN_ERR_INVALID_ARGUMENT || strstr(quern_last_error(NULL), words) == NULL)
        fail_msg("%s: status %d without \"%s\": %s", s->info.name, (int)status, words,
                 quern_last_error(NULL));
}

static void missing_arguments_are_named(void **state)
{
    static op_subject s;
    (void)state;
    for (size_t i = 0; op_subject_read(i, &s); i++)
        for (int pass = 0; pass < 2; pass++) {
            const quern_operation operation = pass == 0 ? s.info.forward : s.info.backward;
            op_any_params params;
            op_any_tensors none = {s.info.tensors_size, {NULL}};
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
static bool size_is_refused(const op_subject *s, int pass, const void *params, const void *tensors,
                            const char *name)
{
    char words[32];
    size_t bytes;
    snprintf(words, sizeof words, "%s.size", name);
    const quern_status status = quern_op_workspace(ctx, s->op, (quern_op_pass)pass, params, tensors, &bytes);
    assert_int_not_equal(status, QUERN_OK); /* there is no tensor */
    return strstr(quern_last_error(ctx), words) != NULL;
}

static void check_sizes(const op_subject *s, int pass, bool of_params)
{
    enum { TAIL = 24 };
    op_any_params params;
    op_any_tensors none = {s->info.tensors_size, {NULL}};
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
    static op_subject s;
    (void)state;
    for (size_t i = 0; op_subject_read(i, &s); i++)
        for (int pass = 0; pass < 2; pass++)
            for (int of_params = 0; of_params < 2 && has_pass(&s, pass); of_params++)
                check_sizes(&s, pass, of_params != 0);
}

/* ---- random calls ---- */

enum { PLANS = 30, REPEATS = 6, MOST_WORKSPACE = 1 << 26 };

static void check_outputs_are_as_before(const op_trial *t)
{
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) {
        const quern_tensor *v = &t->view[i];
        const size_t bytes = v->data != NULL && t->s->tensors[i].result[t->pass] ? op_trial_bytes(v) : 0;
        for (size_t k = 0; k < bytes; k++)
            if (((unsigned char *)v->data)[k] != OP_TRIAL_PATTERN)
                fail_msg("%s wrote %s and says: %s", t->s->info.name, t->s->tensors[i].name,
                         quern_last_error(ctx));
    }
}

static void reset_outputs(const op_trial *t)
{
    for (int32_t i = 0; i < t->s->info.tensor_count; i++)
        if (t->view[i].data != NULL && t->s->tensors[i].result[t->pass])
            memset(t->view[i].data, OP_TRIAL_PATTERN, op_trial_bytes(&t->view[i]));
}

/* FNV-1a of all outputs. */
static uint64_t hash_of_outputs(const op_trial *t)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) {
        const quern_tensor *v = &t->view[i];
        const size_t bytes = v->data != NULL && t->s->tensors[i].result[t->pass] ? op_trial_bytes(v) : 0;
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
static void check_run(const op_trial *t, const plan_case *p, void *workspace, size_t bytes, const char *words)
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
static void check_plan(const op_trial *t, plan_case *p)
{
    const op_subject *s = t->s;
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

static quern_status run_on(const op_trial *t, const plan_case *p, quern_context *on)
{
    return quern_op_run(on, NULL, t->s->op, t->pass, &t->params, &t->tensors, p->workspace, p->bytes);
}

/* With another address of a tensor: what a context says that sees the call for the first time, `on` says. */
static void check_address(op_trial *t, const plan_case *p, quern_context *on, int32_t tensor, void *address)
{
    char sentence[512];
    void *const right = t->view[tensor].data;
    quern_context *first = test_context(quern_context_cpu_level(ctx), quern_context_threads(ctx));
    reset_outputs(t);
    t->view[tensor].data = address;
    const quern_status expected = run_on(t, p, first);
    snprintf(sentence, sizeof sentence, "%s", quern_last_error(first));
    t->view[tensor].data = right;
    const uint64_t outputs = hash_of_outputs(t);
    reset_outputs(t);
    t->view[tensor].data = address;
    const quern_status status = run_on(t, p, on);
    t->view[tensor].data = right;
    if (status != expected || hash_of_outputs(t) != outputs ||
        (expected != QUERN_OK && strcmp(sentence, quern_last_error(on)) != 0))
        fail_msg("%s with %s at %p: status %d, %s; at first sight %d, %s", t->s->info.name,
                 t->s->tensors[tensor].name, address, (int)status, quern_last_error(on), (int)expected,
                 sentence);
    quern_context_destroy(first);
}

/* A call that is made again and again, at addresses that change, too. */
static void check_again(op_trial *t, const plan_case *p)
{
    quern_context *on = test_context(quern_context_cpu_level(ctx), quern_context_threads(ctx));
    for (int i = 0; i < 4; i++) {
        reset_outputs(t);
        if (run_on(t, p, on) != p->status || hash_of_outputs(t) != p->outputs)
            fail_msg("%s, made again (%d): not status %d, or other bits", t->s->info.name, i, (int)p->status);
    }
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) {
        if (t->view[i].data == NULL || t->tensors.t[i] == NULL) continue;
        check_address(t, p, on, i, NULL);
        if (quern_dtype_size(t->view[i].dtype) > 1) check_address(t, p, on, i, (char *)t->view[i].data + 1);
    }
    quern_context_destroy(on);
}

/* Returns whether the call computed. `before`: how many have. */
static bool run_trial(op_trial *t, size_t bytes, int before)
{
    bool computed = false;
    if (op_trial_give_memory(t)) {
        plan_case p = {.workspace = malloc(bytes + 1), .bytes = bytes};
        assert_non_null(p.workspace);
        p.status = quern_op_run(ctx, NULL, t->s->op, t->pass, &t->params, &t->tensors, p.workspace, bytes);
        computed = p.status == QUERN_OK;
        if (!computed) check_outputs_are_as_before(t);
        p.outputs = hash_of_outputs(t);
        if (before < PLANS) check_plan(t, &p);
        if (before < REPEATS) check_again(t, &p);
        free(p.workspace);
    }
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) free(t->view[i].data);
    return computed;
}

static void check_sentence(const op_trial *t)
{
    const char *sentence = quern_last_error(ctx);
    if (strchr(sentence, '\n') != NULL || strlen(sentence) < 10)
        fail_msg("%s: no sentence: \"%s\"", t->s->info.name, sentence);
}

/* Of a call that is accepted: a tensor whose dtype and shape are wrong is refused for its dtype. */
static void check_dtype_comes_before_shape(op_trial *t)
{
    for (int32_t i = 0; i < t->s->info.tensor_count; i++) {
        quern_tensor *v = &t->view[i];
        const quern_tensor right = *v;
        char words[64];
        size_t bytes;
        if (t->tensors.t[i] != v || v->ndim == 0) continue;
        v->dtype = (quern_dtype)77;
        v->shape[v->ndim - 1]++;
        const quern_status status =
            quern_op_workspace(ctx, t->s->op, t->pass, &t->params, &t->tensors, &bytes);
        *v = right;
        snprintf(words, sizeof words, "%s: dtype", t->s->tensors[i].field);
        if (status != QUERN_OK && strncmp(quern_last_error(ctx), words, strlen(words)) != 0)
            fail_msg("%s: \"%s\" is expected: %s", t->s->info.name, words, quern_last_error(ctx));
    }
}

static void no_arguments_do_harm(void **state)
{
    static op_subject s;
    const uint64_t seed = test_seed("no_arguments_do_harm", 32);
    const bool all = getenv("QUERN_TEST_TRIAL") == NULL && test_trials(1200) >= 1200;
    (void)state;
    for (size_t i = 0; op_subject_read(i, &s); i++) {
        int accepted = 0, computed = 0;
        alarm(60); /* a spin ends the test */
        for (int n = 0; n < test_trials(1200); n++) {
            test_random random;
            op_trial t = {.s = &s, .random = &random};
            size_t bytes = 0;
            quern_plan *plan = NULL;
            if (!test_trial(seed + i, n, &random)) continue;
            t.pass = s.info.backward != 0 && n % 2 == 1 ? QUERN_OP_BACKWARD : QUERN_OP_FORWARD;
            t.tame = n % 4 < 2;
            t.hollow = n % 8 < 2;
            op_trial_choose(&t);
            const quern_status status = quern_op_workspace(ctx, s.op, t.pass, &t.params, &t.tensors, &bytes);
            const quern_status planned =
                quern_plan_create(ctx, t.pass == QUERN_OP_FORWARD ? s.info.forward : s.info.backward,
                                  &t.params, &t.tensors, &plan);
            quern_plan_destroy(plan);
            assert_int_equal(planned, status);
            if (status != QUERN_ERR_DEVICE) assert_in_range(status, QUERN_OK, QUERN_ERR_UNSUPPORTED);
            if (status != QUERN_OK) check_sentence(&t);
            else if (accepted++ < REPEATS) check_dtype_comes_before_shape(&t);
            if (status == QUERN_OK && t.contiguous && bytes < MOST_WORKSPACE)
                computed += run_trial(&t, bytes, computed);
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
