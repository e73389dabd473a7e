/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index_loss.c - the indexer's loss: its schema, its public functions, and its step. */
#include "core/error.h"
#include "dsv4/call.h"
#include "dsv4/hyper.h"

#include <math.h>

enum { LS_B = 1, LS_T, LS_HI, LS_C, LS_S, LS_H, LS_D, LS_K };
enum { WIDTH_STEP = 8, HEAD_DIM_MOST = 512 };

typedef struct loss_call {
    op_call head;
    quern_dsv4_index_loss_params params;
    _Alignas(op_step) char program[OP_STEP_BYTES(indexer_loss)];
} loss_call;

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
_Static_assert(sizeof tensors / sizeof *tensors == OP_TENSOR_COUNT(quern_dsv4_index_loss_tensors),
               "a row a tensor");

#define AT(member) offsetof(quern_dsv4_index_loss_params, member)
static const op_param params[] = {
    {"ratio", AT(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "tokens of an entry; 0: 4"},
    {"start_abs_pos", AT(start_abs_pos), OP_INTEGER, 0, INT32_MAX, NULL, "where query 0 stands"},
    {"lambda", AT(lambda), OP_NUMBER, 0, 0, NULL, "the loss's factor"},
};
#undef AT
static const quern_dsv4_index_loss_params defaults = QUERN_DSV4_INDEX_LOSS_PARAMS_INIT;
static const char *const operations[] = {"dsv4_index_loss"};
static const char *const symbols[] = {
    "",           [LS_B] = "B", [LS_T] = "T", [LS_HI] = "Hi", [LS_C] = "C_I",
    [LS_S] = "S", [LS_H] = "H", [LS_D] = "D", [LS_K] = "k",   NULL};
static const op_entry ops[] = {
    {.name = "v4-index-loss",
     .help = "the loss of DeepSeek-V4's indexer against attention's weights over the entries, and its "
             "gradients"},
};

static quern_status check_params(op_call *call)
{
    quern_dsv4_index_loss_params *p = &((loss_call *)call)->params;
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
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "%s has %lld channels: a multiple of %d up to %lld is accepted", name, (long long)width,
                     WIDTH_STEP, (long long)most);
}

static quern_status derive(op_call *call)
{
    static const struct {
        int32_t tensor, ndim;
    } free_extents[] = {{L(q_index), 4}, {L(k_index), 3}, {L(q), 4}};
    const quern_tensor *const *t = call->given;
    int64_t *s = call->symbol;
    quern_status status = QUERN_OK;
    for (int i = L(q_index); i <= L(lse_win); i++)
        if (t[i] == NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed", tensors[i].field);
    call->like = *t[L(q_index)];
    for (int i = 0; i < 3 && status == QUERN_OK; i++)
        status = op_check_activation(call, free_extents[i].tensor, free_extents[i].ndim);
    if (status == QUERN_OK && t[L(idx)] != NULL) status = op_check_kind(call, L(idx), 3);
    if (status != QUERN_OK) return status;
    s[LS_B] = t[L(q_index)]->shape[0];
    s[LS_T] = t[L(q_index)]->shape[1];
    s[LS_HI] = t[L(q_index)]->shape[2];
    s[LS_C] = t[L(q_index)]->shape[3];
    s[LS_S] = t[L(k_index)]->shape[1];
    s[LS_H] = t[L(q)]->shape[2];
    s[LS_D] = t[L(q)]->shape[3];
    s[LS_K] = t[L(idx)] != NULL ? t[L(idx)]->shape[2] : 0;
    if ((status = check_width("q_index", s[LS_C], DSV4_INDEX_WIDTH_MOST)) != QUERN_OK ||
        (status = check_width("q", s[LS_D], HEAD_DIM_MOST)) != QUERN_OK)
        return status;
    if (s[LS_HI] < 1 || s[LS_HI] > DSV4_HEADS_MOST || s[LS_H] < 1 || s[LS_H] > DSV4_HEADS_MOST ||
        s[LS_T] > INT32_MAX || s[LS_S] > INT32_MAX || s[LS_K] > INT32_MAX)
        return error_set(
            QUERN_ERR_INVALID_ARGUMENT,
            "%lld index heads, %lld heads, %lld queries and %lld entries: 1 to %d heads of both and "
            "up to %d of the others are accepted",
            (long long)s[LS_HI], (long long)s[LS_H], (long long)s[LS_T], (long long)s[LS_S], DSV4_HEADS_MOST,
            INT32_MAX);
    return QUERN_OK;
}

static void build(op_build *b)
{
    const op_call *call = b->call;
    const quern_dsv4_index_loss_params *p = &((const loss_call *)call)->params;
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
    OP_TABLES(loss_call, operations, tensors, params, symbols, ops),
    .first = QUERN_OP_DSV4_INDEX_LOSS,
    .defaults = &defaults,
    .params_init = "QUERN_DSV4_INDEX_LOSS_PARAMS_INIT",
    .tensors_init = "QUERN_DSV4_INDEX_LOSS_TENSORS_INIT",
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
