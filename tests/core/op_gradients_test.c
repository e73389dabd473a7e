/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op_gradients_test.c - every differentiable tensor of every operation in every dtype, as a command or a
 * binding gets its gradient: quern/op.h says which dtype and shape it has, and the call accepts that. Inputs
 * are eighths, which every dtype holds, so the gradients are those of f32 but for rounding.
 */
#include "cmocka_c11.h"
#include "compare.h"
#include "context.h"
#include "tensor.h"

#include <quern/op.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* `extents`: of the names in shapes as they stand there, "...=" none. `given`: fields of optional inputs. */
typedef struct gradient_case {
    const char *op, *params, *extents, *given;
} gradient_case;

#define NSA_EXTENTS "B=2 N=40 H=4 Hkv=2 D=16 Dv=8 l=8 l*D=128 l*Dv=64 Nc=5 Hs=2 tiles=40 k=3 c=0 3=3 "
#define COMPRESS_EXTENTS "...= r=4 C=16 2C=32 T=18 Dm=32 P=32 R=8 n=4 C_I=8 4C_I=32 2C_I=16 Dm/2=16 Dm/16=2 "

static const gradient_case cases[] = {
    {"attention", "", "B=2 Nq=12 Nkv=20 H=4 Hkv=2 D=16 Dv=8", ""},
    {"attention", "", "B=2 Nq=12 Nkv=20 H=4 Hkv=2 D=16 Dv=8", "sink"},
    {"nsa", "block_size=8 num_selected=3 window=8", NSA_EXTENTS "D|l*D=16 Dv|l*Dv=8",
     "k_slc v_slc k_win v_win w_k w_v w_gate"},
    {"nsa", "block_size=8 num_selected=3 window=8 compress=linear", NSA_EXTENTS "D|l*D=128 Dv|l*Dv=64",
     "w_k w_v pe_k pe_v gates"},
    {"nsa", "block_size=8 num_selected=3 window=8 compress=given", NSA_EXTENTS, ""},
    {"nsa-compress", "block_size=8", NSA_EXTENTS "D|l*D=16 Dv|l*Dv=8", "w_k w_v"},
    {"nsa-compress", "block_size=8 compress=linear", NSA_EXTENTS "D|l*D=128 Dv|l*Dv=64", "w_k w_v pe_k pe_v"},
    {"nsa-attend", "block_size=8 num_selected=3 window=8", NSA_EXTENTS,
     "k_slc v_slc k_win v_win d_o_cmp d_o_slc d_o_win"},
    {"nsa-attend", "block_size=8 num_selected=3 window=8", NSA_EXTENTS, "d_o_cmp d_o_slc d_o_win"},
    {"nsa-gate", "", NSA_EXTENTS, "q w_gate o_cmp o_slc o_win"},
    {"nsa-gate", "", NSA_EXTENTS, "gates o_cmp o_slc o_win"},
    {"csa-compress", "", COMPRESS_EXTENTS "4C|2C=64", "proj prev_b norm_weight cos_sin"},
    {"csa-compress", "", COMPRESS_EXTENTS "4C|2C=64",
     "proj prev_b norm_weight index_proj index_b_a index_prev_b index_norm_weight"},
    {"csa-compress", "", COMPRESS_EXTENTS "4C|2C=64",
     "x w prev_b norm_weight index_w index_b_a index_prev_b index_norm_weight"},
    {"hca-compress", "ratio=4", COMPRESS_EXTENTS "4C|2C=32", "x w norm_weight cos_sin"},
    {"hca-compress", "ratio=4", COMPRESS_EXTENTS "4C|2C=32", "proj"},
    {"v4-attention", "window=8", "...=2,20 B=2 T=20 N=20 H=3 D=16 D|bytes=16 P=32 R=8", "sink cos_sin"},
    {"v4-attention", "window=8", "...=2,20 B=2 T=20 N=20 H=3 D=16 D|bytes=16 S=5 k=2",
     "kv_cmp:2,5,16 idx sink"},
    {"v4-layer", "window=8 kind=swa",
     "B=2 T=12 Dm=32 P=16 R=8 H=4 q_lora=16 HD=64 D=16 G*o_lora=16 HD/G=32 G=2 o_lora=8", "sinks"},
    {"v4-layer", "window=8 kind=hca",
     "B=2 T=12 Dm=32 P=16 R=8 H=4 q_lora=16 HD=64 D=16 G*o_lora=16 HD/G=32 G=2 o_lora=8 r=4 2D|D=16", ""},
    {"v4-layer", "window=8 kind=csa top_k=2",
     "B=2 T=12 Dm=32 P=16 R=8 H=4 q_lora=16 HD=64 D=16 G*o_lora=16 HD/G=32 G=2 o_lora=8 r=4 2D|D=32 C_I=16 "
     "2C_I=32 Hi=2 Hi*C_I=32",
     ""},
    {"v4-hyper", "", "T=6 n=4 Dm=16 n*(n+2)|n=24 n*Dm=64 3|1=3",
     "fn base scale f pre_in d_h d_pre d_post d_comb d_new"},
    {"v4-hyper", "head=true", "T=6 n=4 Dm=16 n*(n+2)|n=4 n*Dm=64 3|1=1", "fn base scale d_h"},
    {"linear", "groups=2", "T=6 GN=24 K=32 GK=64", "bias"},
    {"rms-norm", "", "T=6 D=16", "weight"},
    {"rope", "", "T=6 H=3 D=16 P=8 R=8", ""},
    {"nvfp4-gemm", "", "T=6 K=32 N=24 E=2 K/2|N=16 N|K/2=24 N|N/2=24 K/2=16", "b_codes b_scales:2,2,24 bias"},
    {"moe-route", "top_k=2", "T=6 E=8 D=16 k=2", "hidden weight"},
    {"moe-route", "top_k=2", "T=6 E=8 D=16 k=2", "logits"},
    {"moe", "top_k=2", "...=6 D=32 E=4 2I=64 I=32 Is=16 D/2=16 D/16=2 I/2=16 I/16=2 k=2",
     "weight gate_up_codes gate_up_scales down_codes down_scales gate_up_bias down_bias shared_gate "
     "shared_up shared_down"},
    {"moe", "top_k=2", "...=6 D=32 E=4 2I=64 I=32 D/2=16 D/16=2 I/2=16 I/16=2 k=2",
     "logits gate_up_codes gate_up_scales down_codes down_scales"},
    {"moe", "top_k=2", "...=6 D=32 E=4 T=6 2I=64 I=32 D/2=16 D/16=2 I/2=16 I/16=2 k=2",
     "experts weights gate_up_codes gate_up_scales down_codes down_scales"},
    {"moe", "top_k=2", "...=6 D=32 E=4 2I=64 I=32 k=2", "logits gate_up down gate_up_bias down_bias"},
};

typedef struct any_tensors {
    size_t size;
    const quern_tensor *t[QUERN_OP_TENSORS_MAX];
} any_tensors;

typedef union any_params {
    size_t size;
    unsigned char bytes[QUERN_OP_PARAMS_BYTES];
} any_params;

typedef struct trial {
    const gradient_case *c;
    const quern_op *op;
    quern_op_info info;
    quern_op_tensor tensor[QUERN_OP_TENSORS_MAX];
    any_params params;
    any_tensors tensors;
    test_tensor t[QUERN_OP_TENSORS_MAX];
    quern_dtype activation, other; /* other: of weights, where an activation's dtype is not */
    int32_t only;                  /* the one weight that is in `other`; -1: all are */
    test_random random;
} trial;

/* Where `word` stands in a list, as a whole word; NULL: nowhere. `end`: characters that may follow it. */
static const char *find_word(const char *list, const char *word, size_t length, const char *end)
{
    for (const char *at = list; *at != '\0'; at += strcspn(at, " "), at += strspn(at, " "))
        if (strncmp(at, word, length) == 0 && (at[length] == '\0' || strchr(end, at[length]) != NULL))
            return at;
    return NULL;
}

static void read_numbers(const char *at, int64_t shape[QUERN_MAX_DIMS], int32_t *ndim)
{
    char *end = (char *)at;
    while (*at >= '0' && *at <= '9' && *ndim < QUERN_MAX_DIMS) {
        shape[(*ndim)++] = strtoll(at, &end, 10);
        at = *end == ',' ? end + 1 : end;
    }
}

/* The shape of an input: what the case gives beside its name, or the extents of its description. */
static int32_t shape_of(const trial *x, int32_t i, int64_t shape[QUERN_MAX_DIMS])
{
    const quern_op_tensor *d = &x->tensor[i];
    const char *given = find_word(x->c->given, d->field, strlen(d->field), ": ");
    int32_t ndim = 0;
    if (given != NULL && given[strlen(d->field)] == ':') {
        read_numbers(given + strlen(d->field) + 1, shape, &ndim);
        return ndim;
    }
    for (const char *at = d->fixed; *at != '\0'; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " ");
        const char *extent = find_word(x->c->extents, at, length, "=");
        if (extent == NULL) fail_msg("%s: the case has no extent for %s of %s", x->c->op, at, d->field);
        read_numbers(extent + length + 1, shape, &ndim);
        at += length;
    }
    return ndim;
}

static bool is(const quern_op_tensor *d, const char *dtype)
{
    return strcmp(d->dtype, dtype) == 0;
}

static quern_dtype dtype_of(const trial *x, int32_t i)
{
    const quern_op_tensor *d = &x->tensor[i];
    const bool other = x->only < 0 || x->only == i;
    if (is(d, "f32")) return QUERN_F32;
    if (is(d, "i32")) return QUERN_I32;
    if (is(d, "u8") || is(d, "codes") || is(d, "scale")) return QUERN_U8;
    if (is(d, "weight")) return other && x->other == QUERN_F32 ? QUERN_F32 : x->activation;
    if (is(d, "float")) return other ? x->other : x->activation;
    return x->activation;
}

static void fill(trial *x, int32_t i)
{
    const quern_op_tensor *d = &x->tensor[i];
    test_tensor *t = &x->t[i];
    const int64_t count = test_tensor_count(t),
                  columns = t->view.ndim > 0 ? t->view.shape[t->view.ndim - 1] : 1;
    if (t->view.dtype == QUERN_U8) {
        for (int64_t k = 0; k < count; k++)
            ((uint8_t *)t->view.data)[k] =
                (uint8_t)(is(d, "scale") ? 0x28 : test_random_int(&x->random, 0, 255));
        memcpy(t->snapshot, t->buffer, t->bytes);
    } else if (t->view.dtype == QUERN_I32) {
        int32_t *values = malloc((size_t)count * sizeof *values);
        assert_non_null(values);
        for (int64_t k = 0; k < count; k++) /* the last offset is T */
            values[k] = strcmp(d->field, "offsets") == 0 ? (int32_t)(x->t[0].view.shape[0] * (k + 1) / count)
                                                         : (int32_t)(k % columns);
        test_tensor_set_i32(t, values);
        free(values);
    } else {
        double *values = test_doubles(count);
        for (int64_t k = 0; k < count; k++) values[k] = (double)test_random_int(&x->random, -8, 8) / 8;
        test_tensor_set(t, values);
        free(values);
    }
}

/* An input of the case. Its values follow from its place alone, whatever its dtype. */
static void add(trial *x, int32_t i)
{
    int64_t shape[QUERN_MAX_DIMS];
    const int32_t ndim = shape_of(x, i, shape);
    x->random.state = (uint64_t)i + 1000;
    x->t[i] = test_tensor_make(&x->random, dtype_of(x, i), ndim, shape, TEST_CONTIGUOUS);
    fill(x, i);
    x->tensors.t[i] = &x->t[i].view;
}

static void roles_of(trial *x, quern_op_pass pass, quern_op_role *roles)
{
    if (quern_op_roles(x->op, pass, &x->params, &x->tensors, roles) != QUERN_OK)
        fail_msg("%s: %s", x->c->op, quern_last_error(NULL));
}

/* Adds the inputs that are needed beside those that are there. */
static void add_needed(trial *x, quern_op_pass pass)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    for (bool more = true; more;) {
        more = false;
        roles_of(x, pass, roles);
        for (int32_t i = 0; i < x->info.tensor_count && !more; i++) {
            if (roles[i] != QUERN_OP_NEEDED || x->tensors.t[i] != NULL) continue;
            add(x, i);
            more = true;
        }
    }
}

/* Runs a pass with every result that it can have, as quern_op_expect() describes it. */
static void run(trial *x, quern_op_pass pass)
{
    quern_op_role roles[QUERN_OP_TENSORS_MAX];
    quern_tensor expected[QUERN_OP_TENSORS_MAX];
    size_t bytes;
    add_needed(x, pass);
    roles_of(x, pass, roles);
    if (quern_op_expect(x->op, pass, &x->params, &x->tensors, NULL, expected) != QUERN_OK)
        fail_msg("%s, %s, others %s: %s", x->c->op, quern_dtype_name(x->activation),
                 quern_dtype_name(x->other), quern_last_error(NULL));
    for (int32_t i = 0; i < x->info.tensor_count; i++) {
        const bool result = roles[i] == QUERN_OP_RESULT || roles[i] == QUERN_OP_OPTIONAL_RESULT;
        if (!result || x->tensors.t[i] != NULL) continue;
        x->t[i] = test_tensor_make(&x->random, expected[i].dtype, expected[i].ndim, expected[i].shape,
                                   TEST_CONTIGUOUS);
        x->tensors.t[i] = &x->t[i].view;
    }
    const char *only = x->only >= 0 ? x->tensor[x->only].field : "all";
    if (quern_op_workspace(ctx, x->op, pass, &x->params, &x->tensors, &bytes) != QUERN_OK)
        fail_msg("%s, %s, %s weights %s: %s", x->c->op, quern_dtype_name(x->activation), only,
                 quern_dtype_name(x->other), quern_last_error(ctx));
    void *workspace = malloc(bytes + 1);
    assert_non_null(workspace);
    if (quern_op_run(ctx, NULL, x->op, pass, &x->params, &x->tensors, workspace, bytes) != QUERN_OK)
        fail_msg("%s: %s", x->c->op, quern_last_error(ctx));
    free(workspace);
}

static trial start(const gradient_case *c, quern_dtype activation, quern_dtype other, int32_t only)
{
    trial x = {.c = c, .op = quern_op_named(c->op), .activation = activation, .other = other, .only = only};
    if (x.op == NULL) fail_msg("no operation %s", c->op);
    assert_int_equal(quern_op_get(x.op, &x.info), QUERN_OK);
    assert_int_equal(quern_op_get_tensors(x.op, x.tensor), QUERN_OK);
    assert_int_equal(quern_op_defaults(x.op, &x.params), QUERN_OK);
    x.tensors.size = x.info.tensors_size;
    for (const char *at = c->params; *at != '\0'; at += strspn(at, " ")) {
        char name[40], value[40];
        int length = 0;
        assert_int_equal(sscanf(at, "%39[^=]=%39[^ ]%n", name, value, &length), 2);
        if (quern_op_set(x.op, &x.params, name, value) != QUERN_OK)
            fail_msg("%s: %s", c->op, quern_last_error(NULL));
        at += length;
    }
    return x;
}

/* Both passes with every gradient; in x when done. */
static void differentiate(trial *x)
{
    for (int32_t i = 0; i < x->info.tensor_count; i++)
        if (find_word(x->c->given, x->tensor[i].field, strlen(x->tensor[i].field), ": ") != NULL) add(x, i);
    if (quern_op_follow(x->op, &x->params, &x->tensors) != QUERN_OK)
        fail_msg("%s: %s", x->c->op, quern_last_error(NULL));
    run(x, QUERN_OP_FORWARD);
    run(x, QUERN_OP_BACKWARD);
}

static void finish(trial *x)
{
    for (int32_t i = 0; i < x->info.tensor_count; i++) test_tensor_free(&x->t[i]);
}

static bool is_gradient(const trial *x, int32_t i)
{
    return x->t[i].buffer != NULL && x->tensor[i].result[QUERN_OP_BACKWARD];
}

static void check(const gradient_case *c, quern_dtype activation, quern_dtype other, int32_t only,
                  const trial *exact)
{
    trial x = start(c, activation, other, only);
    differentiate(&x);
    for (int32_t i = 0; i < x.info.tensor_count; i++) {
        if (!is_gradient(&x, i)) continue;
        if (strcmp(c->op, "nsa") == 0 && strcmp(x.tensor[i].field, "d_pe_k") == 0) continue; /* vanishes */
        char name[120];
        double *got = test_tensor_get(&x.t[i]), *right = test_tensor_get(&exact->t[i]);
        snprintf(name, sizeof name, "%s, %s, weights %s: %s", c->op, quern_dtype_name(activation),
                 quern_dtype_name(other), x.tensor[i].field);
        test_check(name, got, right, test_tensor_count(&x.t[i]), 4 * test_gradient_bound(QUERN_BF16));
        free(got), free(right);
    }
    finish(&x);
}

static void every_gradient_comes_in_every_dtype(void **state)
{
    static const quern_dtype dtypes[] = {QUERN_F32, QUERN_F16, QUERN_BF16};
    static bool covered[64][QUERN_OP_TENSORS_MAX];
    (void)state;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        trial exact = start(&cases[n], QUERN_F32, QUERN_F32, -1);
        differentiate(&exact);
        size_t at = 0;
        while (quern_op_at(at) != exact.op) at++;
        for (int32_t i = 0; i < exact.info.tensor_count; i++) {
            covered[at][i] = covered[at][i] || is_gradient(&exact, i);
            const int32_t source = exact.tensor[i].gradient_of;
            if (!is_gradient(&exact, i) || source < 0) continue;
            for (int a = 1; a < 3; a++) check(&cases[n], dtypes[a], QUERN_F32, source, &exact);
        }
        for (int a = 0; a < 3; a++)
            for (int o = 0; o < 3; o++) check(&cases[n], dtypes[a], dtypes[o], -1, &exact);
        finish(&exact);
    }
    for (size_t at = 0; quern_op_at(at) != NULL; at++) {
        quern_op_info info;
        quern_op_tensor tensors[QUERN_OP_TENSORS_MAX];
        assert_int_equal(quern_op_get(quern_op_at(at), &info), QUERN_OK);
        assert_int_equal(quern_op_get_tensors(quern_op_at(at), tensors), QUERN_OK);
        for (int32_t i = 0; i < info.tensor_count; i++)
            if (tensors[i].result[QUERN_OP_BACKWARD] && !covered[at][i])
                fail_msg("no case has %s of %s", tensors[i].field, info.name);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_gradient_comes_in_every_dtype)};
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
