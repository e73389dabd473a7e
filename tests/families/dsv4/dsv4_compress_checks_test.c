/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dsv4_compress_checks_test.c - what the compressors refuse, and plans, which check again. */
#include "cmocka_c11.h"
#include "tensor.h"

#include <quern/dsv4.h>
#include <quern/plan.h>

#include <stdlib.h>
#include <string.h>

/* A call that is right, of which each test breaks one thing. */
typedef struct fixture {
    quern_context *ctx;
    quern_dsv4_compress_params p;
    quern_dsv4_compress_tensors t;
    float proj_data[20 * 32], b_data[2][4 * 8], prev_data[2 * 4 * 16], table_data[8 * 4], out_data[2][5 * 8],
        d_data[20 * 32];
    int32_t cu_data[3], i32_data[2];
    quern_tensor proj, b_a, b_b, prev_b, table, out, pooled, cu, i32, d_out, d_proj;
} fixture;

static fixture *right_call(void)
{
    fixture *f = calloc(1, sizeof *f);
    f->ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    f->p = (quern_dsv4_compress_params)QUERN_DSV4_COMPRESS_PARAMS_INIT;
    f->t = (quern_dsv4_compress_tensors)QUERN_DSV4_COMPRESS_TENSORS_INIT;
    f->cu_data[1] = 9;
    f->cu_data[2] = 20;
#define MAKE(name, data, dtype, n, ...)                                                                      \
    f->name = quern_tensor_contiguous(f->data, dtype, n, (const int64_t[]){__VA_ARGS__})
    MAKE(proj, proj_data, QUERN_F32, 2, 20, 32), MAKE(b_a, b_data[0], QUERN_F32, 2, 4, 8),
        MAKE(b_b, b_data[1], QUERN_F32, 2, 4, 8);
    MAKE(prev_b, prev_data, QUERN_F32, 3, 2, 4, 16), MAKE(table, table_data, QUERN_F32, 2, 8, 4),
        MAKE(out, out_data[0], QUERN_F32, 2, 5, 8);
    MAKE(pooled, out_data[1], QUERN_F32, 2, 5, 8), MAKE(cu, cu_data, QUERN_I32, 1, 3),
        MAKE(i32, i32_data, QUERN_I32, 1, 2);
    MAKE(d_out, out_data[1], QUERN_F32, 2, 5, 8), MAKE(d_proj, d_data, QUERN_F32, 2, 20, 32);
#undef MAKE
    f->t.proj = &f->proj;
    f->t.b_a = &f->b_a;
    f->t.b_b = &f->b_b;
    f->t.out = &f->out;
    f->t.cu_seqlens = &f->cu;
    return f;
}

static quern_status forward(fixture *f)
{
    static unsigned char workspace[1 << 20];
    return quern_dsv4_compress(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace);
}

/* The call is refused with a sentence that holds `word`, and out is as it was. */
static void refused(fixture *f, const char *word)
{
    memset(f->out_data, 0x5a, sizeof f->out_data);
    assert_int_equal(forward(f), QUERN_ERR_INVALID_ARGUMENT);
    if (strstr(quern_last_error(f->ctx), word) == NULL)
        fail_msg("'%s' lacks '%s'", quern_last_error(f->ctx), word);
    for (size_t i = 0; i < sizeof f->out_data; i++) assert_int_equal(((unsigned char *)f->out_data)[i], 0x5a);
    quern_context_destroy(f->ctx);
    free(f);
}

static void bad_parameters(void **state)
{
    (void)state;
#define REFUSED(word, ...)                                                                                   \
    do {                                                                                                     \
        fixture *f = right_call();                                                                           \
        assert_int_equal(forward(f), QUERN_OK);                                                              \
        __VA_ARGS__;                                                                                         \
        refused(f, word);                                                                                    \
    } while (0)
    REFUSED("kind is 2", f->p.kind = (quern_dsv4_kind)2);
    REFUSED("ratio is -1", f->p.ratio = -1);
    REFUSED("start_token is -1", f->p.start_token = -1);
    REFUSED("start_abs_pos is 6: multiples", f->p.start_abs_pos = 6);
    REFUSED("n_blocks is 2 with cu_seqlens", f->p.n_blocks = 2);
    REFUSED("eps is -1", f->p.eps = -1);
    REFUSED("format is 9", f->p.format = (quern_dsv4_format)9);
    REFUSED("out", f->p.format = QUERN_DSV4_FP8);
    REFUSED("8 channels: format fp4", f->p.format = QUERN_DSV4_FP4);
    REFUSED("8 channels, 0 of them rotated: format row584", f->p.format = QUERN_DSV4_ROW584);
    REFUSED("params.size", f->p.size = 3);
}

static void bad_tensors(void **state)
{
    (void)state;
    REFUSED("proj is NULL: proj, or x and w", f->t.proj = NULL);
    REFUSED("proj is given: proj alone", f->t.x = &f->proj);
    REFUSED("w is given: it stands beside x", f->t.w = &f->proj);
    REFUSED("w is NULL", f->t.x = &f->proj; f->t.proj = NULL);
    REFUSED("b_a is NULL", f->t.b_a = NULL);
    REFUSED("b_b is NULL", f->t.b_b = NULL);
    REFUSED("b_b is given: HCA", f->p.kind = QUERN_DSV4_HCA; f->p.ratio = 4);
    REFUSED("has_prev is given: it stands beside prev_b", f->t.has_prev = &f->i32);
    REFUSED("start_tokens is given: it stands beside cu_seqlens", f->t.cu_seqlens = NULL;
            f->t.start_tokens = &f->i32);
    REFUSED("start_token is 21", f->t.cu_seqlens = NULL; f->p.start_token = 21);
    REFUSED("n_blocks is 5: 0 (all) to the 4", f->t.cu_seqlens = NULL; f->p.start_token = 3;
            f->p.n_blocks = 5);
    REFUSED("b_b.shape[0] is 3", f->b_b.shape[0] = 3);
    REFUSED("proj.shape[1] is 31", f->proj.shape[1] = 31);
    REFUSED("out.shape[0] is 4", f->out.shape[0] = 4);
    REFUSED("prev_b.shape[0] is 1", f->prev_b.shape[0] = 1; f->t.prev_b = &f->prev_b);
    REFUSED("cos_sin has 3 columns", f->table.shape[1] = 3; f->t.cos_sin = &f->table);
    REFUSED("shares memory", f->pooled.data = f->out.data; f->t.pooled = &f->pooled);
    REFUSED("shares memory", f->out.data = f->proj.data);
    REFUSED("b_a", f->b_a.dtype = QUERN_BF16);
    REFUSED("out has dtype u8: f32", f->out.dtype = QUERN_U8);
    REFUSED("cu_seqlens", f->cu_data[1] = 21);
    REFUSED("cu_seqlens", f->cu_data[0] = 1);
    REFUSED("sequence 1 starts at token 12", f->i32_data[1] = 12; f->t.start_tokens = &f->i32);
    REFUSED("sequence 0 starts at position -4", f->i32_data[0] = -4; f->t.start_positions = &f->i32);
    REFUSED("sequence 1 starts at position 2", f->i32_data[1] = 2; f->t.start_positions = &f->i32);
    REFUSED("sequence 1 has block count 3", f->i32_data[1] = 3; f->t.block_counts = &f->i32);
    REFUSED("position 8: cos_sin has positions 0 to 7", f->i32_data[1] = 4; f->t.start_positions = &f->i32;
            f->t.cos_sin = &f->table);
#undef REFUSED
}

/* A plan on the same pointers writes the same bits; it checks positions again. */
static void plans(void **state)
{
    (void)state;
    fixture *f = right_call();
    static unsigned char workspace[1 << 20];
    quern_plan *plan;
    float kept[5 * 8];
    char text[200];
    f->t.start_positions = &f->i32;
    f->t.cos_sin = &f->table;
    for (int i = 0; i < 20 * 32; i++) f->proj_data[i] = (float)(i % 37) * 0.1f;
    assert_int_equal(forward(f), QUERN_OK);
    memcpy(kept, f->out_data[0], sizeof kept);
    memset(f->out_data, 0, sizeof f->out_data);
    assert_int_equal(quern_plan_create(f->ctx, QUERN_OP_DSV4_COMPRESS, &f->p, &f->t, &plan), QUERN_OK);
    void *data[24] = {NULL}; /* in the order of the struct */
    data[0] = f->proj_data;
    data[3] = f->b_data[0];
    data[4] = f->b_data[1];
    data[7] = f->table_data;
    data[8] = f->cu_data;
    data[10] = f->i32_data;
    data[15] = f->out_data[0];
    if (quern_plan_run(plan, NULL, data, workspace, sizeof workspace) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
    assert_memory_equal(kept, f->out_data[0], sizeof kept);
    assert_int_equal(quern_plan_describe(plan, text, sizeof text), QUERN_OK);
    assert_non_null(strstr(text, "dsv4_compress on cpu"));
    f->i32_data[1] = 4;
    assert_int_equal(quern_plan_run(plan, NULL, data, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f->ctx), "position 8"));
    quern_plan_destroy(plan);
    quern_context_destroy(f->ctx);
    free(f);
}

static void bad_backward(void **state)
{
    (void)state;
    fixture *f = right_call();
    static unsigned char workspace[1 << 20];
    f->t.d_out = &f->d_out;
    f->t.d_proj = &f->d_proj;
    size_t bytes;
    assert_int_equal(quern_dsv4_compress_backward_workspace(f->ctx, &f->p, &f->t, &bytes), QUERN_OK);
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, bytes - 1),
                     QUERN_ERR_WORKSPACE);
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_OK);
    f->t.d_x = &f->d_proj;
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f->ctx), "d_x is given and x is NULL"));
    f->t.d_x = NULL;
    f->t.d_out = NULL;
    assert_int_equal(quern_dsv4_compress_backward(f->ctx, NULL, &f->p, &f->t, workspace, sizeof workspace),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(f->ctx), "d_out is NULL"));
    quern_context_destroy(f->ctx);
    free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(bad_parameters), cmocka_unit_test(bad_tensors),
                                       cmocka_unit_test(bad_backward), cmocka_unit_test(plans)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
