/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* struct_test.c - the size rule: what callers compiled against an older or a newer header may hand in. */
#include "cmocka_c11.h"
#include "core/op.h"
#include "tensor.h"

#include <stdlib.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/nsa.h>

enum { TAIL = 16 };

/* A struct of `bytes` at the end of a block of its own, so that a sanitizer sees a read past it. */
static void *copy_of(const void *from, size_t known, size_t bytes)
{
    unsigned char *p = calloc(1, bytes);
    assert_non_null(p);
    memcpy(p, from, bytes < known ? bytes : known);
    memcpy(p, &bytes, sizeof bytes);
    return p;
}

typedef struct pair {
    size_t size;
    int64_t a, b;
} pair;

static void every_size_is_accepted_or_named(void **unused)
{
    (void)unused;
    const pair from = {sizeof from, 7, 9};
    for (size_t bytes = 8; bytes <= sizeof from + TAIL; bytes += 8) {
        pair known = {sizeof known, 1, 2};
        pair *given = copy_of(&from, sizeof from, bytes);
        assert_int_equal(op_struct(&known, given, "params", "PAIR_INIT"), QUERN_OK);
        assert_int_equal(known.size, sizeof known);
        assert_int_equal(known.a, bytes > 8 ? 7 : 1);
        assert_int_equal(known.b, bytes > 16 ? 9 : 2);
        op_struct_give(given, &from);
        assert_int_equal(given->size, bytes);
        free(given);
    }
    for (size_t at = sizeof from; at < sizeof from + TAIL; at++) {
        pair known = {sizeof known, 1, 2};
        unsigned char *given = copy_of(&from, sizeof from, sizeof from + TAIL);
        given[at] = 1;
        assert_int_equal(op_struct(&known, given, "params", "PAIR_INIT"), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "params.size is 40 and its byte "));
        free(given);
    }
    static const size_t wrong[] = {0, 1, 7, 9, 23, 25, 1 << 20, SIZE_MAX, SIZE_MAX - 7};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        pair known = {sizeof known, 1, 2}, given = {wrong[i], 7, 9};
        assert_int_equal(op_struct(&known, &given, "params", "PAIR_INIT"), QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "PAIR_INIT"));
    }
    pair known = {sizeof known, 1, 2};
    assert_int_equal(op_struct(&known, NULL, "params", "PAIR_INIT"), QUERN_ERR_INVALID_ARGUMENT);
}

/* Dense attention of one key, whose result is the value, by structs of other sizes. */
typedef struct problem {
    float q[8], k[8], v[8], o[8];
    quern_tensor views[4];
    quern_attention_params params;
    quern_attention_tensors tensors;
} problem;

static void problem_make(problem *p)
{
    const int64_t shape[] = {1, 1, 1, 8};
    memset(p, 0, sizeof *p);
    float *const data[] = {p->q, p->k, p->v, p->o};
    for (int i = 0; i < 4; i++) p->views[i] = quern_tensor_contiguous(data[i], QUERN_F32, 4, shape);
    for (int i = 0; i < 8; i++) p->v[i] = (float)(i + 1);
    p->params = (quern_attention_params)QUERN_ATTENTION_PARAMS_INIT;
    p->tensors = (quern_attention_tensors)QUERN_ATTENTION_TENSORS_INIT;
    p->tensors.q = &p->views[0];
    p->tensors.k = &p->views[1];
    p->tensors.v = &p->views[2];
    p->tensors.o = &p->views[3];
}

static quern_status attend(quern_context *ctx, problem *p, const quern_exec *exec, const void *params,
                           const void *tensors)
{
    size_t bytes = 0;
    memset(p->o, 0, sizeof p->o);
    quern_status status = quern_attention_forward_workspace(ctx, params, tensors, &bytes);
    if (status != QUERN_OK) return status;
    void *workspace = malloc(bytes + 1);
    assert_non_null(workspace);
    status = quern_attention_forward(ctx, exec, params, tensors, workspace, bytes);
    free(workspace);
    if (status == QUERN_OK) assert_memory_equal(p->o, p->v, sizeof p->v);
    return status;
}

static void older_and_newer_callers_compute(void **unused)
{
    (void)unused;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    problem p;
    problem_make(&p);
    static const size_t params_sizes[] = {8, 16, 24, 32, 40, 48, 56},
                        tensors_sizes[] = {56, 64, 72, 80, 88, 96, 104, 112};
    for (size_t i = 0; i < sizeof params_sizes / sizeof *params_sizes; i++) {
        void *params = copy_of(&p.params, sizeof p.params, params_sizes[i]);
        assert_int_equal(attend(ctx, &p, NULL, params, &p.tensors), QUERN_OK);
        free(params);
    }
    for (size_t i = 0; i < sizeof tensors_sizes / sizeof *tensors_sizes; i++) {
        void *tensors = copy_of(&p.tensors, sizeof p.tensors, tensors_sizes[i]);
        assert_int_equal(attend(ctx, &p, NULL, &p.params, tensors), QUERN_OK);
        free(tensors);
    }
    const quern_exec exec = QUERN_EXEC_INIT;
    for (size_t bytes = 8; bytes <= sizeof exec + TAIL; bytes += 8) {
        quern_exec *given = copy_of(&exec, sizeof exec, bytes);
        assert_int_equal(attend(ctx, &p, given, &p.params, &p.tensors), QUERN_OK);
        if (bytes > sizeof exec) {
            ((unsigned char *)given)[bytes - 1] = 1;
            assert_int_equal(attend(ctx, &p, given, &p.params, &p.tensors), QUERN_ERR_INVALID_ARGUMENT);
            assert_non_null(strstr(quern_last_error(ctx), "exec.size is"));
        }
        free(given);
    }
    quern_context_destroy(ctx);
}

/* NSA's structs, cut and extended, ask for the workspace of the whole ones. */
static void nsa_takes_other_sizes(void **unused)
{
    (void)unused;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    const int64_t shape[] = {1, 130, 1, 8};
    float data[4][130 * 8] = {{0}};
    quern_tensor views[4];
    for (int i = 0; i < 4; i++) views[i] = quern_tensor_contiguous(data[i], QUERN_F32, 4, shape);
    const quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    quern_nsa_tensors tensors = QUERN_NSA_TENSORS_INIT;
    tensors.q = &views[0];
    tensors.k = &views[1];
    tensors.v = &views[2];
    tensors.o = &views[3];
    size_t whole = 0, bytes = 0;
    assert_int_equal(quern_nsa_forward_workspace(ctx, &params, &tensors, &whole), QUERN_OK);
    for (size_t size = 8; size <= sizeof params + TAIL; size += 8) {
        void *given = copy_of(&params, sizeof params, size);
        assert_int_equal(quern_nsa_forward_workspace(ctx, given, &tensors, &bytes), QUERN_OK);
        assert_int_equal(bytes, whole);
        free(given);
    }
    for (size_t size = offsetof(quern_nsa_tensors, o_cmp); size <= sizeof tensors + TAIL; size += 8) {
        void *given = copy_of(&tensors, sizeof tensors, size);
        assert_int_equal(quern_nsa_forward_workspace(ctx, &params, given, &bytes), QUERN_OK);
        assert_int_equal(bytes, whole);
        free(given);
    }
    quern_nsa_params old = params; /* a preset writes only the fields that its caller has */
    old.size = offsetof(quern_nsa_params, causal);
    assert_int_equal(quern_nsa_params_preset(&old, "tile256"), QUERN_OK);
    assert_int_equal(old.tile, 256);
    assert_int_equal(old.size, offsetof(quern_nsa_params, causal));
    assert_int_equal(old.gate, QUERN_NSA_GATE_NONE);
    quern_context_destroy(ctx);
}

static void a_context_takes_other_sizes(void **unused)
{
    (void)unused;
    const quern_context_params params = {sizeof params, 3, QUERN_CPU_LEVEL_PORTABLE, NULL, NULL};
    for (size_t size = 8; size <= sizeof params + TAIL; size += 8) {
        void *given = copy_of(&params, sizeof params, size);
        quern_context *ctx = NULL;
        assert_int_equal(quern_context_create(given, &ctx), QUERN_OK);
        if (size > 8) assert_int_equal(quern_context_threads(ctx), 3);
        if (size > 8) assert_int_equal(quern_context_cpu_level(ctx), QUERN_CPU_LEVEL_PORTABLE);
        quern_context_destroy(ctx);
        free(given);
    }
}

static void dtypes_have_sizes_and_names(void **unused)
{
    (void)unused;
    static const struct {
        quern_dtype dtype;
        size_t size;
        const char *name;
    } all[] = {{QUERN_F32, 4, "f32"},
               {QUERN_F16, 2, "f16"},
               {QUERN_BF16, 2, "bf16"},
               {QUERN_I32, 4, "i32"},
               {QUERN_U8, 1, "u8"},
               {QUERN_I64, 8, "i64"},
               {QUERN_F64, 8, "f64"},
               {QUERN_E4M3, 1, "e4m3"},
               {QUERN_E5M2, 1, "e5m2"},
               {QUERN_E8M0, 1, "e8m0"},
               {QUERN_E2M1X2, 1, "e2m1x2"},
               {QUERN_I8, 1, "i8"},
               {QUERN_I16, 2, "i16"},
               {QUERN_U16, 2, "u16"},
               {QUERN_U32, 4, "u32"},
               {QUERN_U64, 8, "u64"},
               {QUERN_BOOL, 1, "bool"},
               {QUERN_C64, 8, "c64"},
               {QUERN_E4M3FNUZ, 1, "e4m3fnuz"},
               {QUERN_E5M2FNUZ, 1, "e5m2fnuz"}};
    const int count = sizeof all / sizeof *all;
    for (int i = 0; i < count; i++) {
        assert_int_equal(all[i].dtype, i);
        assert_int_equal(quern_dtype_size(all[i].dtype), all[i].size);
        assert_string_equal(quern_dtype_name(all[i].dtype), all[i].name);
    }
    assert_int_equal(quern_dtype_size((quern_dtype)count), 0);
    assert_string_equal(quern_dtype_name((quern_dtype)count), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_is_accepted_or_named), cmocka_unit_test(older_and_newer_callers_compute),
        cmocka_unit_test(nsa_takes_other_sizes),           cmocka_unit_test(a_context_takes_other_sizes),
        cmocka_unit_test(dtypes_have_sizes_and_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
