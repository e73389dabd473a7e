/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_loss.c - the indexer's loss: its schema, its public functions, and its step. */
#include "core/error.h"
#include "dsv4/call.h"
#include "dsv4/hyper.h"

#include <math.h>

enum { LS_B = 1, LS_T, LS_HI, LS_C, LS_S, LS_H, LS_D, LS_K };
enum { WIDTH_STEP = 8, HEAD_DIM_MOST = 512 };

#define L(field) OP_TENSOR(quern_dsv4_index_loss_tensors, field)
static const op_tensor tensors[] = {
    {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {LS_B, LS_T, LS_HI, LS_C}, {0}},
    {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {LS_B, LS_S, LS_C}, {0}},
    {"w", "w", OP_WEIGHT, OP_NONE, {LS_B, LS_T, LS_HI}, {0}},
    {"q", "Q", OP_ACTIVATION, OP_NONE, {LS_B, LS_T, LS_H, LS_D}, {0}},
    {"kv_cmp", "KV_cmp", OP_ACTIVATION, OP_NONE, {LS_B, LS_S, LS_D}, {0}},
    {"lse_win", "lse_win", OP_F32, OP_NONE, {LS_B, LS_H, LS_T}, {0}},
    {"sink", "sink", OP_F32, OP_NONE, {LS_H}, {0}},
    {"idx", "idx", OP_I32, OP_NONE, {LS_B, LS_T, LS_K}, {0}},
    {"loss", "loss", OP_F32, OP_NONE, {0}, {0}},
    {"row_loss", "row_loss", OP_F32, OP_NONE, {LS_B, LS_T}, {0}},
    {"d_q_index", "dq_I", OP_ACTIVATION, OP_NONE, {LS_B, LS_T, LS_HI, LS_C}, {0}},
    {"d_k_index", "dk_I", OP_ACTIVATION, OP_NONE, {LS_B, LS_S, LS_C}, {0}},
    {"d_w", "dw", OP_SOURCE, L(w), {LS_B, LS_T, LS_HI}, {0}},
};

#define FIELD(member) OP_FIELD(quern_dsv4_index_loss_params, member)
static const op_param params[] = {
    {FIELD(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "tokens of an entry; 0: 4"},
    {FIELD(start_abs_pos), OP_INTEGER, 0, INT32_MAX, NULL, "where query 0 stands"},
    {FIELD(lambda), OP_NUMBER, 0, 0, NULL, "the loss's factor"},
};
static const char *const operations[] = {"dsv4_index_loss"};
static const char symbols[] = "B T Hi C_I S H D k";
static const op_entry ops[] = {
    {.name = "v4-index-loss",
     .help = "the loss of DeepSeek-V4's indexer against attention's weights over the entries, and its "
             "gradients"},
};

static quern_status check_params(op_call *call)
{
    quern_dsv4_index_loss_params *p = op_params(call);
    if (p->ratio == 0) p->ratio = DSV4_CSA_RATIO;
    return QUERN_OK;
}

static void roles(op_call *call)
{
    uint8_t *r = call->role;
    for (int i = L(q_index); i <= L(lse_win); i++) r[i] = OP_NEEDED;
    r[L(sink)] = r[L(idx)] = OP_OPTIONAL;
    for (int i = L(loss); i <= L(d_w); i++) r[i] = OP_OPTIONAL_RESULT;
}

static quern_status check_width(const char *name, int64_t width, int64_t most)
{
    if (width >= WIDTH_STEP && width <= most && width % WIDTH_STEP == 0) return QUERN_OK;
    return error_argument("%s has %lld channels: a multiple of %d up to %lld is accepted", name,
                          (long long)width, WIDTH_STEP, (long long)most);
}

static quern_status derive(op_call *call)
{
    const int64_t *s = call->symbol;
    quern_status status;
    if ((status = check_width("q_index", s[LS_C], DSV4_INDEX_WIDTH_MOST)) != QUERN_OK ||
        (status = check_width("q", s[LS_D], HEAD_DIM_MOST)) != QUERN_OK)
        return status;
    if (s[LS_HI] < 1 || s[LS_HI] > DSV4_HEADS_MOST || s[LS_H] < 1 || s[LS_H] > DSV4_HEADS_MOST ||
        s[LS_T] > INT32_MAX || s[LS_S] > INT32_MAX || s[LS_K] > INT32_MAX)
        return error_argument("%lld index heads, %lld heads, %lld queries and %lld entries: 1 to %d heads of "
                              "both and up to %d of the others are accepted",
                              (long long)s[LS_HI], (long long)s[LS_H], (long long)s[LS_T], (long long)s[LS_S],
                              DSV4_HEADS_MOST, INT32_MAX);
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_dsv4_index_loss_params *p = op_params(call);
    const int64_t *s = call->symbol;
    *OP_ADD(b, indexer_loss) =
        (indexer_loss_args){.ratio = p->ratio,
                            .position = p->start_abs_pos,
                            .scale = (float)(1.0 / sqrt((double)s[LS_D])),
                            .scale_index = (float)(1.0 / sqrt((double)s[LS_C] * (double)s[LS_HI])),
                            .lambda = p->lambda,
                            .q_index = op_view(call, L(q_index), false),
                            .keys_index = op_view(call, L(k_index), false),
                            .w = op_view(call, L(w), false),
                            .q = op_view(call, L(q), false),
                            .keys = op_view(call, L(kv_cmp), false),
                            .lse_win = op_view(call, L(lse_win), false),
                            .sink = op_view(call, L(sink), false),
                            .list = op_view(call, L(idx), false),
                            .loss = op_view(call, L(loss), false),
                            .row_loss = op_view(call, L(row_loss), false),
                            .d_q_index = op_view(call, L(d_q_index), false),
                            .d_keys_index = op_view(call, L(d_k_index), false),
                            .d_w = op_view(call, L(d_w), false)};
}

const op_family dsv4_index_loss_family = {
    OP_TABLES(operations, params, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_index_loss_tensors, QUERN_DSV4_INDEX_LOSS_TENSORS_INIT),
    OP_CALL(quern_dsv4_index_loss_params, QUERN_DSV4_INDEX_LOSS_PARAMS_INIT, OP_STEP_BYTES(indexer_loss)),
    .first = QUERN_OP_DSV4_INDEX_LOSS,
    .check_params = check_params,
    .roles = roles,
    .derive = derive,
    .build = build,
};

quern_status quern_dsv4_index_loss_workspace(quern_context *ctx, const quern_dsv4_index_loss_params *given,
                                             const quern_dsv4_index_loss_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_index_loss_family, 0, ctx, given, of, bytes);
}

quern_status quern_dsv4_index_loss(quern_context *ctx, const quern_exec *exec,
                                   const quern_dsv4_index_loss_params *given,
                                   const quern_dsv4_index_loss_tensors *of, void *workspace,
                                   size_t workspace_bytes)
{
    return op_run(&dsv4_index_loss_family, 0, ctx, exec, given, of, workspace, workspace_bytes);
}
