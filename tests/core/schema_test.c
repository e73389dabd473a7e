/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema_test.c - what a description of a family can say: every class of dtype, every kind of parameter,
 * shapes whose number of dimensions depends on the call. The test describes a family of its own. */
#include "cmocka_c11.h"
#include "context.h"
#include "core/op.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    T_X,
    T_ANY_FLOAT,
    T_WEIGHT,
    T_CODES,
    T_SCALES,
    T_EXPONENTS,
    T_COUNT,
    T_GLOBAL,
    T_STORED,
    T_ANY,
    T_OUT,
    T_D_WEIGHT,
    TENSORS
};
enum { S_D = 1, S_BLOCKS };
enum { L_ROWS = OP_LEAD, L_GLOBAL };

typedef struct toy_params {
    size_t size;
    int64_t whole;
    bool flag;
    float root, positive, number;
    int choice;
    uint32_t set;
} toy_params;

typedef struct toy_tensors {
    size_t size;
    const quern_tensor *t[TENSORS];
} toy_tensors;

typedef struct toy_call {
    op_call head;
    toy_params params;
    _Alignas(op_step) char program[sizeof(op_step)];
} toy_call;

static quern_tensor built_global; /* as a stage gets it */

static const op_tensor tensors[] = {
    {"x", "X", OP_ACTIVATION, OP_NONE, {L_ROWS, S_D}, {0}},
    {"bias", "bias", OP_FLOAT, OP_NONE, {S_D}, {0}},
    {"weight", "weight", OP_WEIGHT, OP_NONE, {S_D}, {0}},
    {"codes", "codes", OP_CODES, OP_NONE, {L_ROWS, S_BLOCKS}, {0}},
    {"scales", "scales", OP_SCALE, OP_NONE, {L_ROWS, S_BLOCKS}, {0}},
    {"exponents", "exponents", OP_EXPONENT, OP_NONE, {L_ROWS, S_BLOCKS}, {0}},
    {"count", "count", OP_I64, OP_NONE, {0}, {0}},
    {"global", "global", OP_F32, OP_NONE, {L_GLOBAL}, {0}},
    {"stored", "stored", OP_STORED, OP_NONE, {S_D}, {0}},
    {"any", "any", OP_ANY, OP_NONE, {S_D}, {0}},
    {"out", "out", OP_ACTIVATION, OP_NONE, {L_ROWS, S_D}, {0}},
    {"d_weight", "dweight", OP_SOURCE, T_WEIGHT, {S_D}, {0}},
};
_Static_assert(sizeof tensors / sizeof *tensors == TENSORS, "a row a tensor");

static const char *const choices[] = {"none", "expert", "pair", "row", NULL}, *const bits[] = {"a", "b",
                                                                                               NULL};
#define AT(member) offsetof(toy_params, member)
static const op_param params[] = {
    {"whole", AT(whole), OP_INTEGER, 1, 9, NULL, ""},
    {"flag", AT(flag), OP_FLAG, 0, 1, NULL, ""},
    {"root", AT(root), OP_ROOT, 0, 0, NULL, ""},
    {"positive", AT(positive), OP_POSITIVE, 0, 0, NULL, ""},
    {"number", AT(number), OP_NUMBER, 0, 0, NULL, ""},
    {"choice", AT(choice), OP_CHOICE, 0, 3, choices, ""},
    {"set", AT(set), OP_SET, 1, 3, bits, ""},
};
#undef AT
static const toy_params defaults = {sizeof(toy_params), 1, false, 0, 0, 0, 0, 1};
static const char *const operations[] = {"toy"};

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    (void)call, (void)tensor, (void)text;
    return "";
}

static void roles(op_call *call)
{
    for (int i = 0; i < TENSORS; i++) call->role[i] = OP_OPTIONAL;
    call->role[T_X] = OP_NEEDED;
    call->role[T_OUT] = call->role[T_D_WEIGHT] = OP_OPTIONAL_RESULT;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *x = call->given[T_X];
    op_extents *global = &call->lead[L_GLOBAL - OP_LEAD];
    call->like = *x;
    call->lead[0].count = x->ndim - 1;
    for (int i = 0; i + 1 < x->ndim; i++) call->lead[0].extent[i] = x->shape[i];
    call->symbol[S_D] = x->shape[x->ndim - 1];
    call->symbol[S_BLOCKS] = call->symbol[S_D] / 16;
    const int choice = ((const toy_call *)call)->params.choice;
    global->count = choice == 3 ? x->ndim - 1 : choice;
    global->extent[0] = choice == 3 ? x->shape[0] : 5;
    global->extent[1] = 2;
    return QUERN_OK;
}

static void build(op_build *b)
{
    built_global = op_view(b->call, T_GLOBAL, false);
}

static const op_family toy = {
    .operations = operations,
    .operation_count = 1,
    .tensors = tensors,
    .tensor_count = TENSORS,
    .params = params,
    .param_count = sizeof params / sizeof *params,
    .defaults = &defaults,
    .params_init = "TOY_PARAMS_INIT",
    .tensors_init = "TOY_TENSORS_INIT",
    .call_size = sizeof(toy_call),
    .params_at = offsetof(toy_call, params),
    .program_at = offsetof(toy_call, program),
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .build = build,
};

static char memory[4096] __attribute__((aligned(64)));

/* A call with x bf16 [3, 32] and one more tensor. */
static quern_status call_with(const toy_params *p, int32_t tensor, quern_dtype dtype, int32_t ndim,
                              const int64_t *shape)
{
    const int64_t x_shape[] = {3, 32}, w_shape[] = {32};
    const quern_tensor x = quern_tensor_contiguous(memory, QUERN_BF16, 2, x_shape),
                       weight = quern_tensor_contiguous(memory + 512, QUERN_F32, 1, w_shape),
                       other = quern_tensor_contiguous(memory + 1024, dtype, ndim, shape);
    toy_tensors t = {.size = sizeof t};
    t.t[T_X] = &x;
    if (tensor == T_D_WEIGHT) t.t[T_WEIGHT] = &weight;
    t.t[tensor] = &other;
    return op_run(&toy, 0, ctx, NULL, p, &t, NULL, 0);
}

static void every_class_takes_its_dtypes(void **state)
{
    enum { DTYPES = QUERN_E5M2FNUZ + 1 };
    static const struct {
        int32_t tensor, ndim;
        int64_t shape[2];
        const char *accepted;
    } cases[] = {
        {T_ANY_FLOAT, 1, {32}, "f32 f16 bf16"},
        {T_WEIGHT, 1, {32}, "f32 bf16"},
        {T_CODES, 2, {3, 2}, "u8 e2m1x2"},
        {T_SCALES, 2, {3, 2}, "u8 e4m3"},
        {T_EXPONENTS, 2, {3, 2}, "u8 e8m0"},
        {T_COUNT, 0, {0}, "i64"},
        {T_GLOBAL, 0, {0}, "f32"},
        {T_STORED, 1, {32}, "f32 f16 bf16 u8"},
        {T_ANY, 1, {32}, "f32 f16 bf16 u8 e4m3 e8m0 e2m1x2"},
        {T_OUT, 2, {3, 32}, "bf16"},
        {T_D_WEIGHT, 1, {32}, "f32"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int d = 0; d < DTYPES; d++) {
            const char *name = quern_dtype_name((quern_dtype)d), *at = cases[i].accepted;
            const size_t length = strlen(name);
            bool accepted = false;
            for (; (at = strstr(at, name)) != NULL; at += length)
                accepted = accepted || ((at == cases[i].accepted || at[-1] == ' ') &&
                                        (at[length] == ' ' || at[length] == '\0'));
            const quern_status status =
                call_with(&defaults, cases[i].tensor, (quern_dtype)d, cases[i].ndim, cases[i].shape);
            if ((status == QUERN_OK) != accepted)
                fail_msg("%s as %s: status %d: %s", tensors[cases[i].tensor].field, name, status,
                         quern_last_error(NULL));
        }
    }
}

static void a_global_has_the_dimensions_of_its_list(void **state)
{
    static const int64_t shapes[][2] = {{0}, {5}, {5, 2}, {3}};
    static const int32_t ndims[] = {0, 1, 2, 1};
    (void)state;
    for (int choice = 0; choice < 4; choice++) {
        toy_params p = defaults;
        p.choice = choice;
        for (int given = 0; given < 4; given++) {
            const quern_status status =
                call_with(&p, T_GLOBAL, QUERN_F32, ndims[given], shapes[given]);
            if ((status == QUERN_OK) != (given == choice))
                fail_msg("global %d where %d is accepted: status %d", given, choice, status);
            if (status != QUERN_OK) continue;
            assert_int_equal(built_global.ndim, ndims[given] > 0 ? ndims[given] : 1); /* present, though [] */
            assert_int_equal(built_global.shape[0], ndims[given] > 0 ? shapes[given][0] : 1);
        }
    }
}

static void expect_params(const toy_params *p, const char *sentence)
{
    const quern_status status = call_with(p, T_GLOBAL, QUERN_F32, 0, NULL);
    assert_int_equal(status, *sentence == '\0' ? QUERN_OK : QUERN_ERR_INVALID_ARGUMENT);
    if (*sentence != '\0') assert_string_equal(quern_last_error(NULL), sentence);
}

static void every_kind_of_parameter_has_its_range(void **state)
{
    toy_params p;
    (void)state;
    p = defaults;
    p.whole = 10;
    expect_params(&p, "whole is 10: 1 to 9 is accepted");
    p = defaults;
    p.root = -1;
    expect_params(&p, "root is -1: 0 (1/sqrt(D)) or a finite positive number is accepted");
    p = defaults;
    p.positive = INFINITY;
    expect_params(&p, "positive is inf: 0 (the default) or a finite positive number is accepted");
    p = defaults;
    p.number = -INFINITY;
    expect_params(&p, "number is -inf: a finite number is accepted");
    p = defaults;
    p.number = NAN;
    expect_params(&p, "number is nan: a finite number is accepted");
    p = defaults;
    p.number = -2.5f;
    expect_params(&p, "");
    p = defaults;
    p.choice = 4;
    expect_params(&p, "choice is 4: 0 to 3 is accepted");
    p = defaults;
    p.set = 0;
    expect_params(&p, "set is 0: 1 to 3 is accepted");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_class_takes_its_dtypes),
        cmocka_unit_test(a_global_has_the_dimensions_of_its_list),
        cmocka_unit_test(every_kind_of_parameter_has_its_range),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
