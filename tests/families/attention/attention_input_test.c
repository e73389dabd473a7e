/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attention_input_test.c - bad input to dense attention: each mistake gets its status and a sentence that
 * names the argument, what was given and what is accepted, from the call and (where shapes show it) from its
 * workspace query; no output byte changes.
 */
#include "attention_case.h"
#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A call about to be spoilt. */
typedef struct bad_call {
    attention_case c;
    quern_context *ctx;
    void *workspace;
    size_t bytes;
} bad_call;

enum { FORWARD = 1, BACKWARD = 2, BOTH = 3 };

typedef struct mistake {
    const char *name;
    void (*make)(bad_call *);
    int calls;   /* which calls refuse it */
    bool shapes; /* the workspace query refuses it too */
    bool varlen;
    quern_status status;
    const char *words[3]; /* what the sentence must hold */
} mistake;

static void no_q(bad_call *b)
{
    b->c.tensors.q = NULL;
}
static void no_k(bad_call *b)
{
    b->c.tensors.k = NULL;
}
static void no_v(bad_call *b)
{
    b->c.tensors.v = NULL;
}
static void no_o(bad_call *b)
{
    b->c.tensors.o = NULL;
}
static void no_lse(bad_call *b)
{
    b->c.tensors.lse = NULL;
}
static void no_d_o(bad_call *b)
{
    b->c.tensors.d_o = NULL;
}
static void no_d_q(bad_call *b)
{
    b->c.tensors.d_q = NULL;
}
static void no_d_k(bad_call *b)
{
    b->c.tensors.d_k = NULL;
}
static void no_d_v(bad_call *b)
{
    b->c.tensors.d_v = NULL;
}
static void null_data(bad_call *b)
{
    b->c.k.view.data = NULL;
}
static void null_output_data(bad_call *b)
{
    b->c.o.view.data = NULL;
}
static void params_size(bad_call *b)
{
    b->c.params.size = 4;
}
static void tensors_size(bad_call *b)
{
    b->c.tensors.size = 12;
}
static void heads_before_tokens(bad_call *b)
{
    quern_tensor *q = &b->c.q.view;
    const int64_t tokens = q->shape[1];
    q->shape[1] = q->shape[2];
    q->shape[2] = tokens;
}
static void negative_window(bad_call *b)
{
    b->c.params.window = -3;
}
static void negative_scale(bad_call *b)
{
    b->c.params.scale = -0.5f;
}
static void nan_scale(bad_call *b)
{
    b->c.params.scale = NAN;
}
static void infinite_scale(bad_call *b)
{
    b->c.params.scale = INFINITY;
}
static void huge_scale(bad_call *b)
{
    b->c.params.scale = 1e30f;
}
static void low_offset(bad_call *b)
{
    b->c.params.query_offset = -2;
}
static void high_offset(bad_call *b)
{
    b->c.params.query_offset = INT64_MAX;
}
static void q_dtype(bad_call *b)
{
    b->c.q.view.dtype = QUERN_I32;
}
static void unknown_dtype(bad_call *b)
{
    b->c.q.view.dtype = (quern_dtype)77;
}
static void k_dtype(bad_call *b)
{
    b->c.k.view.dtype = QUERN_F16;
}
static void o_dtype(bad_call *b)
{
    b->c.o.view.dtype = QUERN_BF16;
}
static void lse_dtype(bad_call *b)
{
    b->c.lse.view.dtype = QUERN_BF16;
}
static void d_q_dtype(bad_call *b)
{
    b->c.d_q.view.dtype = QUERN_I64;
}
static void cu_dtype(bad_call *b)
{
    b->c.cu_q.view.dtype = QUERN_I64;
}
static void q_ndim(bad_call *b)
{
    b->c.q.view.ndim = 3;
}
static void q_many_dims(bad_call *b)
{
    b->c.q.view.ndim = 100;
}
static void lse_ndim(bad_call *b)
{
    b->c.lse.view.ndim = 4;
}
static void cu_ndim(bad_call *b)
{
    b->c.cu_q.view.ndim = 2;
}
static void k_batch(bad_call *b)
{
    b->c.k.view.shape[0] = 1;
}
static void v_length(bad_call *b)
{
    b->c.v.view.shape[1] = 8;
}
static void o_length(bad_call *b)
{
    b->c.o.view.shape[1] = 6;
}
static void lse_heads(bad_call *b)
{
    b->c.lse.view.shape[1] = 2;
}
static void d_k_dim(bad_call *b)
{
    b->c.d_k.view.shape[3] = 8;
}
static void k_dim(bad_call *b)
{
    b->c.k.view.shape[3] = 8;
}
static void head_dim_odd(bad_call *b)
{
    b->c.q.view.shape[3] = b->c.k.view.shape[3] = 12;
}
static void head_dim_zero(bad_call *b)
{
    b->c.q.view.shape[3] = b->c.k.view.shape[3] = 0;
}
static void head_dim_large(bad_call *b)
{
    b->c.v.view.shape[3] = b->c.o.view.shape[3] = 520;
}
static void kv_heads(bad_call *b)
{
    b->c.k.view.shape[2] = b->c.v.view.shape[2] = 3;
}
static void no_kv_heads(bad_call *b)
{
    b->c.k.view.shape[2] = b->c.v.view.shape[2] = 0;
}
static void no_heads(bad_call *b)
{
    b->c.q.view.shape[2] = 0;
}
static void negative_batch(bad_call *b)
{
    b->c.q.view.shape[0] = -1;
}
static void negative_length(bad_call *b)
{
    b->c.k.view.shape[1] = INT64_MIN;
}
static void huge_shape(bad_call *b)
{
    b->c.q.view.shape[0] = INT64_MAX / 2;
}
static void huge_stride(bad_call *b)
{
    b->c.q.view.strides[0] = INT64_MAX / 2;
}
static void huge_negative_stride(bad_call *b)
{
    b->c.v.view.strides[1] = INT64_MIN;
}
static void below_zero(bad_call *b)
{
    b->c.q.view.strides[0] = -((int64_t)1 << 60);
}
static void past_the_top(bad_call *b)
{
    b->c.q.view.strides[0] = (int64_t)1 << 60;
    b->c.q.view.data = (void *)(UINTPTR_MAX - 4095);
}
static void inner_stride(bad_call *b)
{
    b->c.v.view.strides[3] = 2;
}
static void output_stride_zero(bad_call *b)
{
    b->c.o.view.strides[1] = 0;
}
static void output_rows_overlap(bad_call *b)
{
    b->c.d_v.view.strides[1] = 8;
}
static void o_is_q(bad_call *b)
{
    b->c.o.view.data = b->c.q.view.data;
}
static void d_k_is_d_v(bad_call *b)
{
    b->c.d_k.view.data = (float *)b->c.d_v.view.data + 16;
}
static void d_q_is_d_o(bad_call *b)
{
    b->c.d_q.view.data = b->c.d_o.view.data;
}
static void lse_in_o(bad_call *b)
{
    b->c.lse.view.data = b->c.o.view.data;
}
static void unaligned(bad_call *b)
{
    b->c.k.view.data = (char *)b->c.k.view.data + 2;
}
static void small_workspace(bad_call *b)
{
    b->bytes--;
}
static void no_workspace(bad_call *b)
{
    b->workspace = NULL;
}
static void bad_device(bad_call *b)
{
    b->c.q.view.device = (quern_device)9;
}
static void other_device(bad_call *b)
{
    b->c.k.view.device = QUERN_CUDA;
}
static void all_on_cuda(bad_call *b)
{
    test_tensor *all[] = {&b->c.q,   &b->c.k,   &b->c.v,   &b->c.o,  &b->c.lse,
                          &b->c.d_o, &b->c.d_q, &b->c.d_k, &b->c.d_v};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) all[i]->view.device = QUERN_CUDA;
}
static void cu_kv_alone(bad_call *b)
{
    b->c.tensors.cu_seqlens_kv = b->c.tensors.cu_seqlens_q;
    b->c.tensors.cu_seqlens_q = NULL;
}
static void cu_empty(bad_call *b)
{
    b->c.cu_q.view.shape[0] = 0;
}
static void cu_lengths_differ(bad_call *b)
{
    b->c.cu_kv.view.shape[0] = 2;
}
static void cu_start(bad_call *b)
{
    ((int32_t *)b->c.cu_q.view.data)[0] = 1;
}
static void cu_falls(bad_call *b)
{
    ((int32_t *)b->c.cu_q.view.data)[1] = 6;
}
static void cu_past_the_end(bad_call *b)
{
    ((int32_t *)b->c.cu_kv.view.data)[2] = 10;
}
static void cu_negative(bad_call *b)
{
    ((int32_t *)b->c.cu_q.view.data)[1] = -1;
}

/* A sequence's numbers, and a place for d_sink. */
static int32_t ends[2];
static float four[4];
static quern_tensor pair = {ends, QUERN_I32, QUERN_CPU, 0, 1, {2}, {1}},
                    of_heads = {four, QUERN_F32, QUERN_CPU, 0, 1, {4}, {1}};

static const quern_tensor *pair_of(int32_t first, int32_t second)
{
    ends[0] = first;
    ends[1] = second;
    return &pair;
}
static void count_past_the_keys(bad_call *b)
{
    b->c.tensors.kv_count = pair_of(9, 10);
}
static void count_negative(bad_call *b)
{
    b->c.tensors.kv_count = pair_of(-1, 9);
}
static void first_past_the_keys(bad_call *b)
{
    b->c.tensors.kv_first = pair_of(9, 10);
}
static void first_negative(bad_call *b)
{
    b->c.tensors.kv_first = pair_of(0, -2);
}
static void first_past_the_count(bad_call *b)
{
    static int32_t counts[] = {9, 3};
    static const quern_tensor count = {counts, QUERN_I32, QUERN_CPU, 0, 1, {2}, {1}};
    b->c.tensors.kv_first = pair_of(0, 4);
    b->c.tensors.kv_count = &count;
}
static void count_of_offsets(bad_call *b)
{
    b->c.tensors.kv_count = pair_of(0, 0);
}
static void first_dtype(bad_call *b)
{
    static quern_tensor floats;
    floats = *pair_of(0, 0);
    floats.dtype = QUERN_F32;
    b->c.tensors.kv_first = &floats;
}
static void sink_length(bad_call *b)
{
    static quern_tensor two;
    two = of_heads;
    two.shape[0] = 2;
    b->c.tensors.sink = &two;
}
static void sink_dtype(bad_call *b)
{
    static quern_tensor halves;
    halves = of_heads;
    halves.dtype = QUERN_BF16;
    b->c.tensors.sink = &halves;
}
static void d_sink_alone(bad_call *b)
{
    b->c.tensors.d_sink = &of_heads;
}

#define BAD(name, make, calls, shapes, varlen, ...)                                                          \
    {                                                                                                        \
        name, make, calls, shapes, varlen, QUERN_ERR_INVALID_ARGUMENT,                                       \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
/* What a call and its query refuse, or the call alone; of fixed lengths or varlen. */
#define SHAPES(name, make, calls, ...) BAD(name, make, calls, true, false, __VA_ARGS__)
#define CALL(name, make, calls, ...) BAD(name, make, calls, false, false, __VA_ARGS__)
#define VARLEN_SHAPES(name, make, calls, ...) BAD(name, make, calls, true, true, __VA_ARGS__)
#define VARLEN_CALL(name, make, calls, ...) BAD(name, make, calls, false, true, __VA_ARGS__)

static const mistake mistakes[] = {
    SHAPES("no q", no_q, BOTH, "q is NULL", "needed"),
    SHAPES("no k", no_k, BOTH, "k is NULL", "needed"),
    SHAPES("no v", no_v, BOTH, "v is NULL", "needed"),
    SHAPES("no o", no_o, BOTH, "o is NULL", "needed"),
    SHAPES("no lse", no_lse, BACKWARD, "lse is NULL", "needed"),
    SHAPES("no d_o", no_d_o, BACKWARD, "d_o is NULL", "needed"),
    SHAPES("no d_q", no_d_q, BACKWARD, "d_q is NULL", "needed"),
    SHAPES("no d_k", no_d_k, BACKWARD, "d_k is NULL", "needed"),
    SHAPES("no d_v", no_d_v, BACKWARD, "d_v is NULL", "needed"),
    CALL("k without memory", null_data, BOTH, "k.data is NULL", "memory"),
    CALL("o without memory", null_output_data, BOTH, "o.data is NULL", "memory"),
    SHAPES("size of params", params_size, BOTH, "params.size is 4", "accepted"),
    SHAPES("size of tensors", tensors_size, BOTH, "tensors.size is 12", "accepted"),
    SHAPES("window below 0", negative_window, BOTH, "window", "-3", "0"),
    SHAPES("scale below 0", negative_scale, BOTH, "scale", "-0.5", "positive"),
    SHAPES("scale NaN", nan_scale, BOTH, "scale", "nan", "finite"),
    SHAPES("scale infinite", infinite_scale, BOTH, "scale", "inf", "finite"),
    SHAPES("scale of no gradient", huge_scale, BACKWARD, "scale", "1e+30", "65536"),
    SHAPES("query_offset -2", low_offset, BOTH, "query_offset", "-2", "-1"),
    SHAPES("query_offset huge", high_offset, BOTH, "query_offset", "9223372036854775807", "accepted"),
    SHAPES("q of i32", q_dtype, BOTH, "q", "i32", "f32 or f16 or bf16"),
    SHAPES("q of no dtype", unknown_dtype, BOTH, "q", "?", "f32 or f16 or bf16"),
    SHAPES("k of f16", k_dtype, BOTH, "k", "f16", "f32"),
    SHAPES("o of bf16", o_dtype, BOTH, "o", "bf16", "f32"),
    SHAPES("lse of bf16", lse_dtype, BOTH, "lse", "bf16", "f32"),
    SHAPES("d_q of i64", d_q_dtype, BACKWARD, "d_q", "i64", "f32"),
    VARLEN_SHAPES("cu_seqlens_q of i64", cu_dtype, BOTH, "cu_seqlens_q", "i64", "i32"),
    SHAPES("q of 3 dimensions", q_ndim, BOTH, "q", "3", "4"),
    SHAPES("q of 100 dimensions", q_many_dims, BOTH, "q", "100", "4"),
    SHAPES("lse of 4 dimensions", lse_ndim, BOTH, "lse", "4", "3"),
    VARLEN_SHAPES("cu_seqlens_q of 2 dimensions", cu_ndim, BOTH, "cu_seqlens_q", "2", "1"),
    SHAPES("batch of k", k_batch, BOTH, "k.shape[0]", "1", "2"),
    SHAPES("length of v", v_length, BOTH, "v.shape[1]", "8", "9"),
    SHAPES("length of o", o_length, BOTH, "o.shape[1]", "6", "7"),
    SHAPES("q of [B, H, N, D]", heads_before_tokens, BOTH, "q has 4 x 7 tokens and heads, o 7 x 4",
           "[B, N, H, D]", "q (or o) seems to be in [B, H, N, D]"),
    SHAPES("heads of lse", lse_heads, BOTH, "lse.shape[1]", "2", "4"),
    SHAPES("dim of k", k_dim, BOTH, "k.shape[3]", "8", "16"),
    SHAPES("dim of d_k", d_k_dim, BACKWARD, "d_k.shape[3]", "8", "16"),
    SHAPES("head dim 12", head_dim_odd, BOTH, "q", "12", "multiple of 8 from 8 to 512"),
    SHAPES("head dim 0", head_dim_zero, BOTH, "q", "0", "multiple of 8 from 8 to 512"),
    SHAPES("head dim 520", head_dim_large, BOTH, "v", "520", "multiple of 8 from 8 to 512"),
    SHAPES("3 kv heads", kv_heads, BOTH, "4 heads", "multiple", "3"),
    SHAPES("no kv heads", no_kv_heads, BOTH, "4 heads", "multiple", "0"),
    SHAPES("no heads", no_heads, BOTH, "q has 0 heads", "positive multiple", "2"),
    SHAPES("batch -1", negative_batch, BOTH, "q.shape[0]", "-1", "0 or more"),
    SHAPES("length -2^63", negative_length, BOTH, "k.shape[1]", "-9223372036854775808", "0 or more"),
    SHAPES("shape overflows", huge_shape, BOTH, "q", "overflow"),
    SHAPES("stride overflows", huge_stride, BOTH, "q", "overflow"),
    SHAPES("stride -2^63", huge_negative_stride, BOTH, "v", "overflow"),
    SHAPES("last dimension strided", inner_stride, BOTH, "v.strides[3]", "2", "1"),
    SHAPES("o of stride 0", output_stride_zero, FORWARD, "o", "share memory"),
    SHAPES("rows of d_v overlap", output_rows_overlap, BACKWARD, "d_v", "share memory"),
    CALL("o is q", o_is_q, FORWARD, "o shares memory with q"),
    CALL("d_k meets d_v", d_k_is_d_v, BACKWARD, "d_", "shares memory with d_"),
    CALL("d_q is d_o", d_q_is_d_o, BACKWARD, "d_q shares memory with d_o"),
    CALL("lse inside o", lse_in_o, FORWARD, "lse", "shares memory"),
    CALL("q reaches below address 0", below_zero, BOTH, "q: its strides reach past the address space"),
    CALL("q reaches past the top", past_the_top, BOTH, "q: its strides reach past the address space"),
    CALL("unaligned elements", unaligned, BOTH, "k.data", "multiple", "4"),
    {"workspace a byte too small",
     small_workspace,
     BOTH,
     false,
     false,
     QUERN_ERR_WORKSPACE,
     {"workspace_bytes", "at least"}},
    CALL("no workspace", no_workspace, BOTH, "workspace is NULL", "needed"),
    SHAPES("device 9", bad_device, BOTH, "q", "9", "cuda"),
    SHAPES("k elsewhere", other_device, BOTH, "k", "device", "share"),
    {"cuda", all_on_cuda, BOTH, true, false, QUERN_ERR_DEVICE, {"cuda", "device"}},
    CALL("kv_count past the keys", count_past_the_keys, BOTH, "kv_count[1]", "10", "0 ... 9"),
    CALL("kv_count below 0", count_negative, BOTH, "kv_count[0]", "-1", "0 ... 9"),
    CALL("kv_first past the keys", first_past_the_keys, BOTH, "kv_first[1]", "10", "0 ... 9"),
    CALL("kv_first below 0", first_negative, BOTH, "kv_first[1]", "-2", "0 ... 9"),
    CALL("kv_first past kv_count", first_past_the_count, BOTH, "kv_first[1]", "4", "0 ... 3"),
    VARLEN_SHAPES("kv_count of a varlen batch", count_of_offsets, BOTH,
                  "kv_count is given with cu_seqlens_q"),
    SHAPES("kv_first of f32", first_dtype, BOTH, "kv_first", "f32", "i32"),
    SHAPES("sink of 2 heads", sink_length, BOTH, "sink.shape[0]", "2", "4"),
    SHAPES("sink of bf16", sink_dtype, BOTH, "sink", "bf16", "f32"),
    SHAPES("d_sink without sink", d_sink_alone, BACKWARD, "d_sink", "sink"),
    VARLEN_SHAPES("cu_seqlens_kv alone", cu_kv_alone, BOTH, "cu_seqlens_kv", "without cu_seqlens_q"),
    VARLEN_SHAPES("cu_seqlens_q empty", cu_empty, BOTH, "cu_seqlens", "0"),
    VARLEN_SHAPES("cu_seqlens of two lengths", cu_lengths_differ, BOTH, "cu_seqlens_kv.shape[0]", "2", "3"),
    VARLEN_CALL("cu_seqlens_q from 1", cu_start, BOTH, "cu_seqlens_q[0]", "1", "0"),
    VARLEN_CALL("cu_seqlens_q falls", cu_falls, BOTH, "cu_seqlens_q[2]", "5", "6"),
    VARLEN_CALL("cu_seqlens_q below 0", cu_negative, BOTH, "cu_seqlens_q[1]", "-1"),
    VARLEN_CALL("cu_seqlens_kv past the rows", cu_past_the_end, BOTH, "cu_seqlens_kv", "10", "9"),
};

static const int32_t cu_q[] = {0, 3, 5}, cu_kv[] = {0, 4, 9};
static const oracle_dense fixed = {2, 7, 9, 4, 2, 16, 16, true, 0, -1, 0, NULL, NULL};
static const oracle_dense varlen = {2, 7, 9, 4, 2, 16, 16, true, 0, -1, 0, cu_q, cu_kv};

static void expect(const mistake *m, const char *call, quern_status status)
{
    if (status != m->status)
        fail_msg("%s, %s: status %s, expected %s (%s)", m->name, call, quern_status_name(status),
                 quern_status_name(m->status), quern_last_error(NULL));
    for (int i = 0; i < 3 && m->words[i] != NULL; i++)
        if (strstr(quern_last_error(NULL), m->words[i]) == NULL)
            fail_msg("%s, %s: \"%s\" does not say \"%s\"", m->name, call, quern_last_error(NULL),
                     m->words[i]);
}

static void try(const mistake *m, bool backward)
{
    test_random random = {1};
    bad_call b = {.ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1)};
    size_t bytes = 4242;
    quern_status status;
    attention_case_make(&b.c, m->varlen ? &varlen : &fixed, QUERN_F32, TEST_CONTIGUOUS, &random);
    const quern_attention_params *params = &b.c.params;
    const quern_attention_tensors *tensors = &b.c.tensors;
    status = backward ? quern_attention_backward_workspace(b.ctx, params, tensors, &b.bytes)
                      : quern_attention_forward_workspace(b.ctx, params, tensors, &b.bytes);
    assert_int_equal(status, QUERN_OK);
    void *workspace = b.workspace = malloc(b.bytes);
    m->make(&b);
    status = backward ? quern_attention_backward(b.ctx, NULL, params, tensors, b.workspace, b.bytes)
                      : quern_attention_forward(b.ctx, NULL, params, tensors, b.workspace, b.bytes);
    expect(m, backward ? "backward" : "forward", status);
    status = backward ? quern_attention_backward_workspace(b.ctx, params, tensors, &bytes)
                      : quern_attention_forward_workspace(b.ctx, params, tensors, &bytes);
    if (m->shapes) {
        expect(m, "workspace", status);
        assert_int_equal(bytes, 4242);
    } else if (status != QUERN_OK) {
        fail_msg("%s: the workspace query looks at more than shapes: %s", m->name, quern_last_error(NULL));
    }
    test_tensor_check_unchanged(&b.c.o, "o");
    test_tensor_check_unchanged(&b.c.lse, "lse");
    test_tensor_check_unchanged(&b.c.d_q, "d_q");
    test_tensor_check_unchanged(&b.c.d_k, "d_k");
    test_tensor_check_unchanged(&b.c.d_v, "d_v");
    free(workspace);
    attention_case_free(&b.c);
    quern_context_destroy(b.ctx);
}

static void every_mistake_is_named_and_writes_nothing(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        if (mistakes[i].calls & FORWARD) try(&mistakes[i], false);
        if (mistakes[i].calls & BACKWARD) try(&mistakes[i], true);
    }
}

static void null_arguments(void **state)
{
    test_random random = {1};
    attention_case c;
    size_t bytes;
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 1);
    (void)state;
    attention_case_make(&c, &fixed, QUERN_F32, TEST_CONTIGUOUS, &random);
    assert_int_equal(quern_attention_forward(NULL, NULL, &c.params, &c.tensors, NULL, 0),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "ctx is NULL"));
    assert_int_equal(quern_attention_backward(ctx, NULL, NULL, &c.tensors, NULL, 0),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "params is NULL"));
    assert_int_equal(quern_attention_forward(ctx, NULL, &c.params, NULL, NULL, 0),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "tensors is NULL"));
    assert_int_equal(quern_attention_forward_workspace(ctx, &c.params, &c.tensors, NULL),
                     QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "bytes is NULL"));
    assert_int_equal(quern_attention_backward_workspace(ctx, &c.params, NULL, &bytes),
                     QUERN_ERR_INVALID_ARGUMENT);
    test_tensor_check_unchanged(&c.o, "o");
    attention_case_free(&c);
    quern_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mistake_is_named_and_writes_nothing),
        cmocka_unit_test(null_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
