/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema.c - the description of dense attention: its tensors, its parameters, and what follows from them. */
#include "attention/attention.h"

#include "core/error.h"
#include "core/view.h"

#include <stddef.h>

enum {
    B = ATTENTION_B,
    B1 = ATTENTION_B1,
    NQ = ATTENTION_NQ,
    NKV = ATTENTION_NKV,
    TQ = ATTENTION_TQ,
    TKV = ATTENTION_TKV
};
enum { H = ATTENTION_H, HKV = ATTENTION_HKV, D = ATTENTION_D, DV = ATTENTION_DV };

static const op_tensor tensors[] = {
    {"q", "Q", OP_ACTIVATION, OP_NONE, {B, NQ, H, D}, {TQ, H, D}},
    {"k", "K", OP_ACTIVATION, OP_NONE, {B, NKV, HKV, D}, {TKV, HKV, D}},
    {"v", "V", OP_ACTIVATION, OP_NONE, {B, NKV, HKV, DV}, {TKV, HKV, DV}},
    {"cu_seqlens_q", "cu_seqlens_q", OP_I32, OP_NONE, {B1}, {0}},
    {"cu_seqlens_kv", "cu_seqlens_kv", OP_I32, OP_NONE, {B1}, {0}},
    {"o", "O", OP_ACTIVATION, OP_NONE, {B, NQ, H, DV}, {TQ, H, DV}},
    {"lse", "lse", OP_F32, OP_NONE, {B, H, NQ}, {H, TQ}},
    {"d_o", "dO", OP_ACTIVATION, A(o), {B, NQ, H, DV}, {TQ, H, DV}},
    {"d_q", "dQ", OP_ACTIVATION, A(q), {B, NQ, H, D}, {TQ, H, D}},
    {"d_k", "dK", OP_ACTIVATION, A(k), {B, NKV, HKV, D}, {TKV, HKV, D}},
    {"d_v", "dV", OP_ACTIVATION, A(v), {B, NKV, HKV, DV}, {TKV, HKV, DV}},
    {"sink", "sink", OP_F32, OP_NONE, {H}, {0}},
    {"kv_first", "kv_first", OP_I32, OP_NONE, {B}, {0}},
    {"kv_count", "kv_count", OP_I32, OP_NONE, {B}, {0}},
    {"d_sink", "dsink", OP_F32, A(sink), {H}, {0}},
};

#define FIELD(member) OP_FIELD(quern_attention_params, member)
const op_param attention_param_rows[ATTENTION_PARAMS] = {
    {FIELD(causal), OP_FLAG, 0, 1, NULL, "a query sees keys up to its own position"},
    {FIELD(window), OP_INTEGER, 0, INT64_MAX, NULL, "keys seen, self included; 0: all"},
    {FIELD(scale), OP_ROOT, 0, 0, NULL, "of the scores; 0: 1/sqrt(D)"},
    {FIELD(query_offset), OP_INTEGER, -1, INT32_MAX, NULL, "position of query 0; -1: Nkv - Nq"},
};
static const char *const operations[] = {"attention_forward", "attention_backward"};

static const char symbols[] = "B B+1 Nq Nkv Tq Tkv H Hkv D Dv";
static const op_entry ops[] = {
    {.name = "attention",
     .help = "dense attention; with dO also its backward",
     .forward = ATTENTION_FORWARD,
     .backward = ATTENTION_BACKWARD},
};

static quern_status check_params(op_call *call)
{
    const float scale = ((const quern_attention_params *)op_params(call))->scale;
    return call->operation == ATTENTION_BACKWARD ? op_check_backward_scale(scale) : QUERN_OK;
}

static void roles(op_call *call)
{
    const bool backward = call->operation == ATTENTION_BACKWARD;
    uint8_t *r = call->role;
    r[A(q)] = OP_NEEDED;
    r[A(k)] = OP_NEEDED;
    r[A(v)] = OP_NEEDED;
    r[A(cu_seqlens_q)] = OP_OPTIONAL;
    op_allow(call, A(cu_seqlens_kv), call->varlen, OP_OPTIONAL,
             " without cu_seqlens_q: both or cu_seqlens_q alone are accepted");
    r[A(o)] = backward ? OP_NEEDED : OP_RESULT;
    r[A(lse)] = backward ? OP_NEEDED : OP_OPTIONAL_RESULT;
    r[A(d_o)] = backward ? OP_NEEDED : OP_UNUSED;
    for (int i = A(d_q); i <= A(d_v); i++) r[i] = backward ? OP_RESULT : OP_UNUSED;
    r[A(sink)] = OP_OPTIONAL;
    op_allow_all(call, A(kv_first), A(kv_count), !call->varlen, OP_OPTIONAL,
                 " with cu_seqlens_q: sequences of a fixed length are accepted");
    op_gradient_roles(call, A(d_sink), A(d_sink), backward);
}

static quern_status derive(op_call *call)
{
    const int32_t at = call->varlen ? 0 : 1;
    const quern_tensor *const *t = call->given;
    int64_t *s = call->symbol;
    quern_status status;
    const quern_tensor *q = t[A(q)], *k = t[A(k)], *v = t[A(v)];
    if ((status = view_check_head_dim("q", q->shape[at + 2])) != QUERN_OK ||
        (status = view_check_head_dim("v", v->shape[at + 2])) != QUERN_OK ||
        (status = view_check_order(q, t[A(o)])) != QUERN_OK ||
        (status = view_check_heads(q->shape[at + 1], k->shape[at + 1], q->shape[at])) != QUERN_OK)
        return status;
    if (q->shape[at] > INT32_MAX || k->shape[at] > INT32_MAX)
        return error_argument("%lld query and %lld key tokens: at most %d each are accepted",
                              (long long)q->shape[at], (long long)k->shape[at], INT32_MAX);
    if ((status = op_find_batch(call, A(cu_seqlens_q), q, &s[B])) != QUERN_OK) return status;
    s[B1] = s[B] + 1;
    s[NQ] = s[TQ] = q->shape[at];
    s[NKV] = s[TKV] = k->shape[at];
    return QUERN_OK;
}

/* 0 <= kv_first <= kv_count <= Nkv of every sequence; an absent one has its default. */
static quern_status check_key_ranges(const int32_t *first, const int32_t *count, int64_t batch, int64_t keys)
{
    for (int64_t b = 0; b < batch; b++) {
        const int64_t end = count != NULL ? count[b] : keys, from = first != NULL ? first[b] : 0;
        if (end < 0 || end > keys)
            return error_argument("kv_count[%lld] is %lld: 0 ... %lld, the key tokens, are accepted",
                                  (long long)b, (long long)end, (long long)keys);
        if (from < 0 || from > end)
            return error_argument("kv_first[%lld] is %lld: 0 ... %lld, the end of its keys, are accepted",
                                  (long long)b, (long long)from, (long long)end);
    }
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    if (!call->varlen)
        return check_key_ranges(call->alignment[A(kv_first)] > 0 ? data[A(kv_first)] : NULL,
                                call->alignment[A(kv_count)] > 0 ? data[A(kv_count)] : NULL, call->symbol[B],
                                call->symbol[NKV]);
    const int64_t *s = call->symbol;
    const bool own = call->alignment[A(cu_seqlens_kv)] > 0;
    const quern_status status = view_check_offsets(data[A(cu_seqlens_q)], s[B], "cu_seqlens_q", s[TQ]);
    if (status != QUERN_OK || (!own && s[TKV] >= s[TQ])) return status;
    return view_check_offsets(data[own ? A(cu_seqlens_kv) : A(cu_seqlens_q)], s[B],
                              own ? "cu_seqlens_kv" : "cu_seqlens_q", s[TKV]);
}

const op_family attention_family = {
    OP_TABLES(operations, attention_param_rows, symbols, ops),
    OP_ROWS(tensors, quern_attention_tensors, QUERN_ATTENTION_TENSORS_INIT),
    OP_CALL(quern_attention_params, QUERN_ATTENTION_PARAMS_INIT,
            OP_STEP_BYTES(validate_lists) + OP_STEP_BYTES(rowdot) + OP_STEP_BYTES(attend)),
    .first = QUERN_OP_ATTENTION_FORWARD,
    .varlen_by = A(cu_seqlens_q),
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .check_data = check_data,
    .build = attention_build,
};
