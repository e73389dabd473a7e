/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "op_trial.h"

#include "cmocka_c11.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool op_subject_read(size_t i, op_subject *s)
{
    s->op = quern_op_at(i);
    if (s->op == NULL) return false;
    assert_int_equal(quern_op_get(s->op, &s->info), QUERN_OK);
    assert_int_equal(quern_op_get_tensors(s->op, s->tensors), QUERN_OK);
    assert_int_equal(quern_op_get_params(s->op, s->params), QUERN_OK);
    return true;
}

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

static void choose_params(op_trial *t)
{
    const op_subject *s = t->s;
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

static int64_t extent_named(op_trial *t, const char *name, size_t length)
{
    uint32_t hash = 5;
    for (size_t i = 0; i < length; i++) hash = hash * 33 + (unsigned char)name[i];
    return t->symbol[hash % 64];
}

/* The extents of a shape as it is described. `|` stands between whole shapes or between the words of one
 * extent, and `...` for one extent or more: each is tried. */
static int32_t choose_extents(op_trial *t, const char *shape, int64_t extents[QUERN_MAX_DIMS])
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
static void choose_view(op_trial *t, int32_t i, bool varlen)
{
    static const quern_dtype floats[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    const quern_op_tensor *d = &t->s->tensors[i];
    int64_t extents[QUERN_MAX_DIMS];
    const int32_t ndim = choose_extents(t, varlen && d->varlen[0] != '\0' ? d->varlen : d->fixed, extents);
    quern_dtype dtype = floats[t->symbol[0] % 3];
    if (strcmp(d->dtype, "f32") == 0) dtype = QUERN_F32;
    if (strcmp(d->dtype, "i32") == 0) dtype = QUERN_I32;
    if (strcmp(d->dtype, "i64") == 0) dtype = QUERN_I64;
    if (strcmp(d->dtype, "u8") == 0 || strcmp(d->dtype, "codes") == 0 || strcmp(d->dtype, "scale") == 0 ||
        strcmp(d->dtype, "exponent") == 0)
        dtype = QUERN_U8;
    t->view[i] = quern_tensor_contiguous(NULL, dtype, ndim, extents);
}

/* Spoils a view in one place. */
static void spoil(op_trial *t, quern_tensor *v)
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
static void choose_presence(op_trial *t)
{
    const op_subject *s = t->s;
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    const int64_t odd = t->tame ? 40 : 8;
    for (int32_t i = 0; i < s->info.tensor_count; i++) {
        const quern_op_tensor *d = &s->tensors[i];
        const bool wanted = d->needed || d->result[t->pass] || (t->pass != QUERN_OP_FORWARD && d->trigger);
        t->tensors.t[i] = wanted || below(t->random, t->tame ? 9 : 3) == 0 ? &t->view[i] : NULL;
    }
    for (int round = 0; round < 3; round++) {
        (void)quern_op_follow(s->op, &t->params, &t->tensors);
        if (quern_op_roles(s->op, t->pass, &t->params, &t->tensors, roles) != QUERN_OK) break;
        for (int32_t i = 0; i < s->info.tensor_count; i++) {
            if (below(t->random, odd) == 0) continue;
            if (roles[i] == QUERN_OP_NEEDED || roles[i] == QUERN_OP_RESULT || roles[i] == QUERN_OP_UPDATED)
                t->tensors.t[i] = &t->view[i];
            if (roles[i] == QUERN_OP_REFUSED || roles[i] == QUERN_OP_SOURCE_MISSING) t->tensors.t[i] = NULL;
        }
    }
}

static void choose_tensors(op_trial *t)
{
    const op_subject *s = t->s;
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    const int64_t wide = below(t->random, 4) == 0 ? below(t->random, 64) : -1;
    const int64_t side = (int64_t)8 << below(t->random, 4); /* 8: a step's pools are small enough to run */
    for (int i = 0; i < 64; i++) {
        t->symbol[i] = i == wide ? ONE_OF(t->random, extreme) & INT64_MAX : ONE_OF(t->random, usual);
        if (t->tame && below(t->random, 40) > 0) t->symbol[i] = side;
        if (t->hollow) t->symbol[i] = ONE_OF(t->random, hollow);
    }
    const bool varlen = s->info.varlen_by >= 0 && below(t->random, 3) == 0;
    t->tensors = (op_any_tensors){s->info.tensors_size, {NULL}};
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

enum { MOST_BYTES = 1 << 20 };

size_t op_trial_bytes(const quern_tensor *v)
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

bool op_trial_give_memory(op_trial *t)
{
    const op_subject *s = t->s;
    for (int32_t i = 0; i < s->info.tensor_count; i++)
        if (t->tensors.t[i] != NULL && has_elements(&t->view[i]) && op_trial_bytes(&t->view[i]) == 0)
            return false;
    const bool all_valid = below(t->random, 2) == 0; /* a step has six tensors of numbers */
    for (int32_t i = 0; i < s->info.tensor_count; i++) {
        quern_tensor *v = &t->view[i];
        const size_t bytes = t->tensors.t[i] != NULL ? op_trial_bytes(v) : 0;
        v->data = bytes > 0 ? malloc(bytes) : NULL;
        if (v->data == NULL) continue;
        memset(v->data, OP_TRIAL_PATTERN, bytes);
        if (s->tensors[i].result[t->pass]) continue;
        int32_t rising = 0;
        const bool valid = all_valid || below(t->random, 2) == 0;
        for (size_t k = 0; k < bytes; k++)
            if (v->dtype == QUERN_U8) ((uint8_t *)v->data)[k] = (uint8_t)below(t->random, valid ? 120 : 256);
        for (size_t k = 0; k < bytes / 4 && v->dtype == QUERN_I32; k++) {
            ((int32_t *)v->data)[k] = valid ? rising : (int32_t)ONE_OF(t->random, extreme);
            rising += (int32_t)below(t->random, 2);
            if (strstr(s->tensors[i].field, "_table") != NULL && rising > 3) rising = 0; /* pages */
        }
        for (size_t k = 0; k < bytes / 4 && v->dtype == QUERN_F32; k++)
            ((float *)v->data)[k] = (float)below(t->random, 1000) / 250 - 2;
    }
    return true;
}

void op_trial_choose(op_trial *t)
{
    choose_params(t);
    choose_tensors(t);
}
