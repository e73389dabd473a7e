/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * nsa_input_test.c - bad input to every NSA operation: each row of nsa.h's table of illegal combinations gets
 * its status and a sentence that names the argument, what was given and what is accepted.
 */
#include "cmocka_c11.h"
#include "nsa_mistake.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define P(field) offsetof(quern_nsa_params, field)
#define BAD QUERN_ERR_INVALID_ARGUMENT
#define NUMBER(base, ops, field, value, ...)                                                                 \
    {                                                                                                        \
#field " " #value, base, ops, PARAM, NSA_Q, P(field), value, BAD,                                    \
        {                                                                                                    \
#field, __VA_ARGS__                                                                              \
        }                                                                                                    \
    }
#define CHOICE(base, ops, field, value, ...)                                                                 \
    {                                                                                                        \
#field " " #value, base, ops, PARAM4, NSA_Q, P(field), value, BAD,                                   \
        {                                                                                                    \
#field, __VA_ARGS__                                                                              \
        }                                                                                                    \
    }
#define FORCED(field, value, ...)                                                                            \
    {                                                                                                        \
#field " " #value, PLAIN, FWD | SEL, PARAM, NSA_Q, P(field), value, BAD,                             \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
#define MISSING(base, ops, slot, text)                                                                       \
    {                                                                                                        \
        "no " text, base, ops, ABSENT, slot, 0, 0, BAD,                                                      \
        {                                                                                                    \
            text " is NULL", "needed"                                                                        \
        }                                                                                                    \
    }
#define UNUSED(base, ops, slot, text, ...)                                                                   \
    {                                                                                                        \
        text " out of place", base, ops, OTHER_TENSOR, slot, NSA_Q, 0, BAD,                                  \
        {                                                                                                    \
            text, __VA_ARGS__                                                                                \
        }                                                                                                    \
    }

#define ENTRIES(at, value, ...)                                                                              \
    {                                                                                                        \
        "entries " #at " " #value, VARLEN, BWD | CMP_BWD | SEL | ATTEND, CU_SEQLEN, NSA_CU_SEQLENS_CMP, at,  \
            value, BAD,                                                                                      \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }

static const nsa_mistake mistakes[] = {
    /* The structs. */
    {"no params", PLAIN, ALL, NO_PARAMS, NSA_Q, 0, 0, BAD, {"params is NULL", "QUERN_NSA_PARAMS_INIT"}},
    {"no tensors", PLAIN, ALL, NO_TENSORS, NSA_Q, 0, 0, BAD, {"tensors is NULL", "QUERN_NSA_TENSORS_INIT"}},
    {"size of params", PLAIN, ALL, PARAMS_SIZE, NSA_Q, 0, 4, BAD, {"params.size is 4", "accepted"}},
    {"size 0 of params", PLAIN, ALL, PARAMS_SIZE, NSA_Q, 0, 0, BAD, {"params.size is 0", "accepted"}},
    {"uncounted params",
     PLAIN,
     ALL,
     PARAMS_SIZE,
     NSA_Q,
     0,
     INT64_MAX - 7,
     BAD,
     {"params.size is 92233720368547758", "accepted"}},
    {"newer params",
     PLAIN,
     ALL,
     PARAMS_SIZE,
     NSA_Q,
     0,
     sizeof(quern_nsa_params) + 8,
     BAD,
     {"params.size is 136 and its byte 128 is set", "accepted"}},
    {"size of tensors", PLAIN, ALL, TENSORS_SIZE, NSA_Q, 0, 12, BAD, {"tensors.size is 12", "accepted"}},
    {"size 0 of tensors", PLAIN, ALL, TENSORS_SIZE, NSA_Q, 0, 0, BAD, {"tensors.size is 0", "accepted"}},
    {"newer tensors",
     PLAIN,
     ALL,
     TENSORS_SIZE,
     NSA_Q,
     0,
     sizeof(quern_nsa_tensors) + 8,
     BAD,
     {"tensors.size is 400 and its byte 399 is set", "accepted"}},
    /* One parameter. */
    NUMBER(PLAIN, ALL, block_size, 0, "is 0", "1 to 2147483647"),
    NUMBER(PLAIN, ALL, block_size, -8, "is -8", "1 to"),
    NUMBER(PLAIN, ALL, block_size, INT64_MAX, "is 9223372036854775807", "to 2147483647"),
    NUMBER(PLAIN, ALL, stride, -1, "is -1", "1 to 8"),
    NUMBER(PLAIN, ALL, stride, 16, "is 16", "1 to 8"),
    NUMBER(PLAIN, ALL, select_block, -1, "is -1", "1 to"),
    NUMBER(PLAIN, ALL, num_selected, 0, "is 0", "1 to"),
    NUMBER(PLAIN, ALL, num_selected, -5, "is -5", "1 to"),
    NUMBER(PLAIN, ALL, num_selected, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, tile, 0, "is 0", "1 to 256"),
    NUMBER(PLAIN, ALL, tile, 257, "is 257", "1 to 256"),
    NUMBER(PLAIN, ALL, window, 0, "is 0", "1 to"),
    NUMBER(PLAIN, ALL, window, -1, "is -1", "1 to"),
    NUMBER(PLAIN, ALL, forced_first, -1, "is -1", "0 to"),
    NUMBER(PLAIN, ALL, forced_local, -1, "is -1", "0 to"),
    NUMBER(PLAIN, ALL, max_compressed_groups, -1, "is -1", "0 to"),
    NUMBER(PLAIN, ALL, select_block, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, forced_first, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, forced_local, 1ll << 31, "is 2147483648", "to 2147483647"),
    NUMBER(PLAIN, ALL, max_compressed_groups, 1ll << 31, "is 2147483648", "to 2147483647"),
    CHOICE(PLAIN, ALL, compress, 3, "is 3", "0 to 2"),
    CHOICE(PLAIN, ALL, scope, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, metric, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, compressed_visibility, 2, "is 2", "0 to 1"),
    CHOICE(PLAIN, ALL, branches, 0, "is 0", "1 to 7"),
    CHOICE(PLAIN, ALL, branches, 8, "is 8", "1 to 7"),
    CHOICE(PLAIN, ALL, gate, 3, "is 3", "0 to 2"),
    CHOICE(PLAIN, ALL, selection, 3, "is 3", "0 to 2"),
    CHOICE(PLAIN, ALL, groups, 2, "is 2", "0 to 1"),
    {"scale NaN", PLAIN, ALL, SCALE, NSA_Q, 0, 0, BAD, {"scale", "nan", "finite"}},
    {"scale infinite", PLAIN, ALL, SCALE, NSA_Q, 0, 1, BAD, {"scale", "inf", "finite"}},
    {"scale below 0", PLAIN, ALL, SCALE, NSA_Q, 0, 2, BAD, {"scale", "-0.5", "positive"}},
    {"scale of no gradient", PLAIN, BWD | ATT_BWD, SCALE, NSA_Q, 0, 3, BAD, {"scale", "1e+30", "65536"}},
    /* Two parameters. */
    NUMBER(PLAIN, ALL, stride, 3, "is 3", "divisor of block_size 8"),
    NUMBER(PLAIN, ALL, select_block, 12, "is 12", "multiple of stride 8"),
    NUMBER(LINEAR, ALL & ~GATES, select_block, 6, "is 6", "multiple of stride 4"),
    NUMBER(PLAIN, FWD | SEL, num_selected, 2, "is 2", "at least the 3 forced"),
    FORCED(tile, 64, "num_selected is 5", "at least the 10 forced"),
    FORCED(forced_first, 4, "num_selected is 5", "at least the 6 forced"),
    FORCED(forced_local, 5, "num_selected is 5", "at least the 6 forced"),
    {"non-causal forced_first 6",
     UNGATED,
     FWD | SEL,
     PARAM,
     NSA_Q,
     P(forced_first),
     6,
     BAD,
     {"num_selected is 5", "at least the 6 forced"}},
    CHOICE(LINEAR, FWD | SEL, metric, 1, "mean-logit", "three equal"),
    NUMBER(PLAIN, GROUPED, max_compressed_groups, 2, "with metric softmax", "mean-logit is accepted"),
    NUMBER(GROUPS, FWD | SEL, stride, 4, "mean-logit", "three equal"),
    NUMBER(GROUPS, GROUPED, max_compressed_groups, 1, "is 1", "2 to"),
    CHOICE(PLAIN, GROUPED, groups, 1, "max_compressed_groups 0", "1 or more"),
    CHOICE(PLAIN, COMPRESS, compress, 2, "compress is given", "mean or linear"),
    /* Tensors that the parameters need. */
    MISSING(PLAIN, WHOLE | SEL | ATTEND | GATES | GATE | GATE_BWD, NSA_Q, "q"),
    MISSING(PLAIN, WHOLE | COMPRESS | ATTEND, NSA_K, "k"),
    MISSING(PLAIN, WHOLE | COMPRESS | ATTEND, NSA_V, "v"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_K_SLC, "k_slc"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_V_SLC, "v_slc"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_K_WIN, "k_win"),
    MISSING(SEPARATE, WHOLE | ATTEND, NSA_V_WIN, "v_win"),
    MISSING(PLAIN, BWD | CMP | SEL | ATTEND, NSA_K_CMP, "k_cmp"),
    MISSING(PLAIN, BWD | CMP | ATTEND, NSA_V_CMP, "v_cmp"),
    MISSING(GIVEN, WHOLE | SEL | ATTEND, NSA_K_CMP, "k_cmp"),
    MISSING(GIVEN, WHOLE | ATTEND, NSA_V_CMP, "v_cmp"),
    MISSING(VARLEN, BWD | COMPRESS | SEL | ATTEND, NSA_CU_SEQLENS_CMP, "cu_seqlens_cmp"),
    MISSING(LINEAR, WHOLE | COMPRESS, NSA_W_K, "w_k"),
    MISSING(LINEAR, WHOLE | COMPRESS, NSA_W_V, "w_v"),
    MISSING(PLAIN, WHOLE | GATES | GATE | GATE_BWD, NSA_W_GATE, "w_gate"),
    MISSING(GIVEN, WHOLE | GATE | GATE_BWD, NSA_GATES, "gates"),
    MISSING(PLAIN, BWD | GATES | GATE_BWD, NSA_GATES, "gates"),
    MISSING(PLAIN, BWD | SEL | ATTEND, NSA_BLOCK_IDX, "block_idx"),
    MISSING(GIVEN, WHOLE | ATTEND, NSA_BLOCK_IDX, "block_idx"),
    MISSING(GROUPS, BWD | ATTEND, NSA_GROUP_IDX, "group_idx"),
    MISSING(GIVEN, WHOLE | ATTEND, NSA_GROUP_IDX, "group_idx"),
    MISSING(PLAIN, FWD | COMBINE | GATE, NSA_O, "o"),
    MISSING(PLAIN, ATTEND, NSA_O_SLC, "o_slc"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_LSE_CMP, "lse_cmp"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_LSE_SLC, "lse_slc"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_LSE_WIN, "lse_win"),
    MISSING(PLAIN, BWD | GATE_BWD, NSA_D_O, "d_o"),
    MISSING(PLAIN, ATT_BWD, NSA_D_O_WIN, "d_o_win"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_D_Q, "d_q"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_D_K, "d_k"),
    MISSING(PLAIN, BWD | ATT_BWD, NSA_D_V, "d_v"),
    MISSING(PLAIN, CMP_BWD | ATT_BWD, NSA_D_K_CMP, "d_k_cmp"),
    MISSING(GIVEN, BWD | ATT_BWD, NSA_D_V_CMP, "d_v_cmp"),
    MISSING(SEPARATE, BWD | ATT_BWD, NSA_D_K_SLC, "d_k_slc"),
    MISSING(SEPARATE, BWD | ATT_BWD, NSA_D_V_WIN, "d_v_win"),
    /* Tensors that the parameters leave unused. */
    UNUSED(PLAIN, WHOLE | COMPRESS, NSA_PE_K, "pe_k", "compress mean", "linear is accepted"),
    UNUSED(PLAIN, WHOLE | COMPRESS, NSA_PE_V, "pe_v", "compress mean", "linear is accepted"),
    UNUSED(GIVEN, WHOLE, NSA_W_K, "w_k", "compress given", "mean or linear is accepted"),
    UNUSED(GIVEN, WHOLE, NSA_W_V, "w_v", "compress given", "mean or linear is accepted"),
    UNUSED(GIVEN, WHOLE | GATE | GATE_BWD, NSA_W_GATE, "w_gate", "gate given", "weights is accepted"),
    UNUSED(UNGATED, WHOLE | GATE | GATE_BWD, NSA_W_GATE, "w_gate", "gate none", "weights is accepted"),
    UNUSED(UNGATED, BWD | GATE_BWD, NSA_D_W_GATE, "d_w_gate", "gate none", "weights is accepted"),
    UNUSED(PLAIN, BWD | GATE_BWD, NSA_D_GATES, "d_gates", "gate weights", "given or none is accepted"),
    UNUSED(PLAIN, BWD, NSA_D_K_CMP, "d_k_cmp", "compress mean", "given is accepted"),
    UNUSED(LINEAR, BWD, NSA_D_V_CMP, "d_v_cmp", "compress linear", "given is accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_W_K, "d_w_k", "w_k is NULL", "accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_W_V, "d_w_v", "w_v is NULL", "accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_PE_K, "d_pe_k", "pe_k is NULL", "accepted"),
    UNUSED(UNGATED, BWD | CMP_BWD, NSA_D_PE_V, "d_pe_v", "pe_v is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_K_SLC, "d_k_slc", "k_slc is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_V_SLC, "d_v_slc", "v_slc is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_K_WIN, "d_k_win", "k_win is NULL", "accepted"),
    UNUSED(PLAIN, BWD | ATT_BWD, NSA_D_V_WIN, "d_v_win", "v_win is NULL", "accepted"),
    /* Extents. */
    {"head dim 12", PLAIN, WHOLE | SEL | ATTEND | GATES, SHAPE, NSA_Q, 3, 12, BAD, {"12", "accepted"}},
    {"head dim 0", PLAIN, WHOLE | SEL | ATTEND | GATES, SHAPE, NSA_Q, 3, 0, BAD, {"0", "accepted"}},
    {"head dim 520",
     PLAIN,
     WHOLE | COMPRESS | ATTEND,
     SHAPE,
     NSA_V,
     3,
     520,
     BAD,
     {"v", "520", "multiple of 8 from 8 to 512"}},
    {"3 kv heads", PLAIN, WHOLE | ATTEND, SHAPE, NSA_K, 2, 3, BAD, {"4 heads", "multiple", "3"}},
    {"no kv heads", PLAIN, WHOLE | ATTEND, SHAPE, NSA_K, 2, 0, BAD, {"4 heads", "multiple", "0"}},
    {"no heads",
     PLAIN,
     WHOLE | SEL | ATTEND,
     SHAPE,
     NSA_Q,
     2,
     0,
     BAD,
     {"q has 0 heads", "positive multiple", "2"}},
    {"2^31 tokens",
     PLAIN,
     WHOLE | SEL | ATTEND | GATES,
     SHAPE,
     NSA_Q,
     1,
     1ll << 31,
     BAD,
     {"2147483648", "at most 2147483647"}},
    {"length -2^63",
     PLAIN,
     WHOLE | COMPRESS | ATTEND,
     SHAPE,
     NSA_K,
     1,
     INT64_MIN,
     BAD,
     {"k.shape[1]", "-9223372036854775808", "0 or more"}},
    {"shape overflows",
     PLAIN,
     WHOLE | SEL | ATTEND | GATES,
     SHAPE,
     NSA_Q,
     0,
     INT64_MAX / 2,
     BAD,
     {"q", "overflow"}},
    {"k for another list",
     PLAIN,
     BWD | SEL | ATTEND,
     SHAPE,
     NSA_BLOCK_IDX,
     3,
     4,
     BAD,
     {"block_idx.shape[3] is 4", "5 is accepted"}},
    {"lists for other heads",
     PLAIN,
     BWD | SEL | ATTEND,
     SHAPE,
     NSA_BLOCK_IDX,
     1,
     1,
     BAD,
     {"block_idx.shape[1] is 1", "2 is accepted"}},
    {"entries of another length",
     PLAIN,
     BWD | CMP | SEL | ATTEND,
     SHAPE,
     NSA_K_CMP,
     1,
     8,
     BAD,
     {"k_cmp.shape[1] is 8", "9 is accepted"}},
    {"weights of another block size",
     LINEAR,
     WHOLE | COMPRESS,
     SHAPE,
     NSA_W_K,
     1,
     16,
     BAD,
     {"w_k.shape[1] is 16", "128 is accepted"}},
    {"gates of two branches",
     GIVEN,
     WHOLE | COMBINE | GATE | GATE_BWD,
     SHAPE,
     NSA_GATES,
     3,
     2,
     BAD,
     {"gates.shape[3] is 2", "3 is accepted"}},
    /* cu_seqlens. */
    {"cu_seqlens empty", VARLEN, ALL, SHAPE, NSA_CU_SEQLENS, 0, 0, BAD, {"cu_seqlens", "0", "accepted"}},
    {"cu_seqlens of 2 dimensions",
     VARLEN,
     ALL,
     NDIM,
     NSA_CU_SEQLENS,
     0,
     2,
     BAD,
     {"cu_seqlens", "2 dimensions", "one"}},
    {"cu_seqlens huge",
     VARLEN,
     ALL,
     SHAPE,
     NSA_CU_SEQLENS,
     0,
     INT64_MAX,
     BAD,
     {"cu_seqlens.shape[0]", "9223372036854775807", "accepted"}},
    {"cu_seqlens of i64",
     VARLEN,
     ALL,
     DTYPE,
     NSA_CU_SEQLENS,
     0,
     QUERN_I64,
     BAD,
     {"cu_seqlens", "i64", "i32"}},
    {"cu_seqlens_cmp of another batch",
     VARLEN,
     BWD | COMPRESS | SEL | ATTEND,
     SHAPE,
     NSA_CU_SEQLENS_CMP,
     0,
     3,
     BAD,
     {"cu_seqlens_cmp.shape[0] is 3", "4"}},
    {"cu_seqlens from 1",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     0,
     1,
     BAD,
     {"cu_seqlens[0] is 1", "0 is accepted"}},
    {"cu_seqlens falls",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     2,
     29,
     BAD,
     {"cu_seqlens[2] is 29", "after 30"}},
    {"cu_seqlens below 0",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     1,
     -1,
     BAD,
     {"cu_seqlens[1] is -1", "after 0"}},
    {"cu_seqlens past the rows",
     VARLEN,
     ALL,
     CU_SEQLEN,
     NSA_CU_SEQLENS,
     3,
     78,
     BAD,
     {"cu_seqlens ends at 78", "77"}},
    ENTRIES(0, 1, "cu_seqlens_cmp[0] is 1", "0 is accepted"),
    ENTRIES(2, 2, "cu_seqlens_cmp[2] is 2", "after 3"),
    ENTRIES(3, 10, "cu_seqlens_cmp ends at 10", "9"),
    ENTRIES(1, 2, "cu_seqlens_cmp[1] is 2 after 0", "3 entries", "30 tokens"),
    ENTRIES(3, 9, "cu_seqlens_cmp[3] is 9 after 3", "5 entries", "45 tokens"),
    /* Workspace and device. */
    {"workspace a byte too small",
     PLAIN,
     TAKE_WORKSPACE,
     SHORT_WORKSPACE,
     NSA_Q,
     0,
     0,
     QUERN_ERR_WORKSPACE,
     {"workspace_bytes", "at least"}},
    {"no workspace", PLAIN, TAKE_WORKSPACE, NO_WORKSPACE, NSA_Q, 0, 0, BAD, {"workspace is NULL", "needed"}},
    {"v elsewhere",
     PLAIN,
     WHOLE | COMPRESS | ATTEND,
     DEVICE,
     NSA_V,
     0,
     QUERN_CUDA,
     BAD,
     {"v is on device 1", "share one device"}},
    {"o_slc elsewhere",
     PLAIN,
     COMBINE | GATE | GATE_BWD,
     DEVICE,
     NSA_O_SLC,
     0,
     QUERN_CUDA,
     BAD,
     {"o_slc is on device 1", "share one device"}},
    {"cuda", PLAIN, ALL, ALL_CUDA, NSA_Q, 0, 0, QUERN_ERR_DEVICE, {"device cuda", "libquern_cuda"}},
};

static void every_illegal_combination_is_named_and_writes_nothing(void **state)
{
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    (void)state;
    nsa_failures = 0;
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++)
        for (int op = 0; op < NSA_OPS; op++)
            if (mistakes[i].ops & 1 << op) nsa_try_mistake(ctx, &mistakes[i], op);
    assert_int_equal(nsa_failures, 0);
    quern_context_destroy(ctx);
}

static void a_query_with_heads_before_tokens_is_named(void **state)
{
    const int64_t of_q[] = {1, 4, 64, 16}, of_k[] = {1, 64, 2, 16}, of_o[] = {1, 64, 4, 16};
    const quern_tensor q = quern_tensor_contiguous(NULL, QUERN_F32, 4, of_q),
                       k = quern_tensor_contiguous(NULL, QUERN_F32, 4, of_k),
                       o = quern_tensor_contiguous(NULL, QUERN_F32, 4, of_o);
    quern_context *ctx = NULL;
    quern_nsa_params p = QUERN_NSA_PARAMS_INIT;
    quern_nsa_tensors t = QUERN_NSA_TENSORS_INIT;
    size_t bytes;
    (void)state;
    assert_int_equal(quern_context_create(NULL, &ctx), QUERN_OK);
    t.q = &q, t.k = t.v = &k, t.o = &o;
    assert_int_equal(quern_nsa_forward_workspace(ctx, &p, &t, &bytes), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(ctx), "q has 4 x 64 tokens and heads, o 64 x 4"));
    quern_context_destroy(ctx);
}

int main(void)
{
    setenv("QUERN_CUDA_LIBRARY", "/nowhere/libquern_cuda.so.0", 1); /* as on a machine without a GPU */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_illegal_combination_is_named_and_writes_nothing),
        cmocka_unit_test(a_query_with_heads_before_tokens_is_named),
    };
    return cmocka_run_group_tests(tests, nsa_make_bases, nsa_free_bases);
}
