/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_schema.c - the whole layer's tensors and parameters, and the extents that follow from them. */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/dsv4.h"
#include "dsv4/layer.h"
#include "dsv4/layer_tensors.h"
#include "dsv4/weights.h"

#include <stdio.h>

#define GRADIENT(field, name, ...) {"d_" #field, "dw." name, OP_F32, DL(field), {__VA_ARGS__}, {0}},

static const op_tensor tensors[] = {
    LAYER_INPUTS LAYER_RESULTS{"d_out", "d_out", OP_ACTIVATION, DL(out), {LL_TOKENS, LS_IN}, {0}},
    {"d_x", "dX", OP_ACTIVATION, DL(x), {LL_TOKENS, LS_IN}, {0}},
    LAYER_TRAINED(GRADIENT) /* d_sinks ... d_compressor_norm */
    DSV4_WEIGHT_TENSORS("compressor", "w.compressor.", LS_IN, LS_PROJ)
        DSV4_WEIGHT_TENSORS("indexer", "w.compressor.indexer.", LS_IN, LS_4CI)};

static const dsv4_weight_row weights[2] = {{{DL(compressor_kv), DL(compressor_gate)}, DL(compressor_fp8)},
                                           {{DL(indexer_kv), DL(indexer_gate)}, DL(indexer_fp8)}};

const char *const layer_kinds[] = {"csa", "hca", "swa", NULL};
#define FIELD(member) OP_FIELD(quern_dsv4_layer_step_params, member)
#define SAME(member)                                                                                         \
    (offsetof(quern_dsv4_layer_params, member) == offsetof(quern_dsv4_layer_step_params, member))
const op_param layer_param_rows[LAYER_STEP_PARAMS] = {
    {FIELD(kind), OP_CHOICE, 0, QUERN_DSV4_LAYER_SWA, layer_kinds,
     "entries that an indexer chooses, all entries, or the window alone"},
    {FIELD(window), OP_INTEGER, 0, INT32_MAX, NULL, "raw keys of a query; 0: 128"},
    {FIELD(top_k), OP_INTEGER, 0, DSV4_TOP_K_MOST, NULL, "csa: entries chosen; 0: 512"},
    {FIELD(eps), OP_POSITIVE, 0, 0, NULL, "of the norms; 0: 1e-6"},
    {FIELD(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, dsv4_formats, "of raw rows and entries: rows, row584"},
    {FIELD(key_format), OP_CHOICE, 0, QUERN_DSV4_FP4, dsv4_key_formats, "csa: of the indexer's keys"},
};
_Static_assert(SAME(kind) && SAME(window) && SAME(top_k) && SAME(eps),
               "a step's parameters begin with a layer's");
static const char *const operations[] = {"dsv4_layer", "dsv4_layer_backward"};
/* Of a step's tensors there are more. */
static const char symbols[] = LAYER_SYMBOLS;
static const char *const leads[] = {"B T", "B", NULL};
static const op_entry ops[] = {
    {.name = "v4-layer",
     .help = "a whole attention layer of DeepSeek-V4; with d_out also its backward. The indexer gets no "
             "gradient",
     .forward = DSV4_LAYER,
     .backward = DSV4_LAYER_BACKWARD},
};

#define PARAMS(call) ((quern_dsv4_layer_step_params *)op_params(call))

void layer_resolve(quern_dsv4_layer_step_params *p)
{
    if (p->window == 0) p->window = DSV4_WINDOW;
    if (p->top_k == 0) p->top_k = DSV4_TOP_K;
    if (p->eps == 0.0f) p->eps = 1e-6f;
}

static quern_status check_params(op_call *call)
{
    layer_resolve(PARAMS(call));
    return QUERN_OK;
}

const dsv4_weight_row *layer_weights(const op_call *call)
{
    return call->family == &dsv4_layer_family ? weights : layer_step_weights;
}

/* A compressor, of which the first tensor is `first`. */
static void compressor_roles(op_call *call, bool has, int first, const dsv4_weight_row *weight)
{
    call->role[first] = call->role[first + 3] = has ? OP_NEEDED : OP_REFUSED;
    dsv4_weight_roles(call, weight, has);
}

void layer_roles(op_call *call)
{
    const quern_dsv4_layer_kind kind = PARAMS(call)->kind;
    const bool csa = kind == QUERN_DSV4_LAYER_CSA, entries = kind != QUERN_DSV4_LAYER_SWA;
    uint8_t *r = call->role;
    for (int i = DL(x); i <= DL(o_b); i++) r[i] = OP_NEEDED;
    r[DL(sinks)] = OP_OPTIONAL;
    compressor_roles(call, entries, DL(compressor_bias), &layer_weights(call)[0]);
    compressor_roles(call, csa, DL(indexer_bias), &layer_weights(call)[1]);
    r[DL(indexer_q_b)] = r[DL(indexer_heads)] = csa ? OP_NEEDED : OP_REFUSED;
    r[DL(out)] = OP_RESULT;
    for (int i = DL(q_residual); i <= DL(o_a_out); i++) {
        const bool has = i == DL(compressed) ? entries : i < DL(idx_k) || i > DL(idx_topk) || csa;
        r[i] = has ? OP_OPTIONAL_RESULT : OP_REFUSED;
    }
}

static void roles(op_call *call)
{
    const bool backward = call->operation == DSV4_LAYER_BACKWARD;
    uint8_t *r = call->role;
    layer_roles(call);
    for (int i = DL(out); i <= DL(o_a_out) && backward; i++) r[i] = OP_UNUSED;
    r[DL(d_out)] = backward ? OP_NEEDED : OP_UNUSED;
    op_gradient_roles(call, DL(d_x), DL(d_compressor_norm), backward);
}

const char *layer_refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    const quern_dsv4_layer_kind kind = PARAMS(call)->kind;
    const dsv4_weight_row *weight = layer_weights(call);
    for (int i = 0; i < 2; i++)
        if (dsv4_weight_has(&weight[i], tensor) && call->role[weight[i].floats[0]] != OP_REFUSED)
            return dsv4_weight_refuse(call, &weight[i], tensor, text);
    snprintf(text, OP_REASON, ": a layer of kind %s has no %s", layer_kinds[kind],
             kind == QUERN_DSV4_LAYER_SWA ? "compressor" : "indexer");
    return text;
}

/* Whether `whole` is one or more times `part`. */
static bool divides(int64_t part, int64_t whole)
{
    return part > 0 && whole > 0 && whole % part == 0;
}

static quern_status derive_heads(op_call *call)
{
    int64_t *s = call->symbol;
    s[LS_IN] = call->like.shape[call->like.ndim - 1];
    const quern_status status = view_check_head_dim("kv", s[LS_D]);
    if (status != QUERN_OK) return status;
    if (!divides(s[LS_D], s[LS_HD]) || s[LS_HD] / s[LS_D] > DSV4_HEADS_MOST)
        return error_argument("q_b has %lld rows: 1 to %d heads of kv's %lld channels are accepted",
                              (long long)s[LS_HD], DSV4_HEADS_MOST, (long long)s[LS_D]);
    s[LS_H] = s[LS_HD] / s[LS_D];
    if (!divides(s[LS_D], s[LS_GROUP]) || !divides(s[LS_GROUP], s[LS_HD]))
        return error_argument(
            "o_a has %lld columns: the channels of equal groups of q_b's %lld heads of %lld are accepted",
            (long long)s[LS_GROUP], (long long)s[LS_H], (long long)s[LS_D]);
    s[LS_G] = s[LS_HD] / s[LS_GROUP];
    if (!divides(s[LS_G], s[LS_GO]))
        return error_argument("o_a has %lld rows: a multiple of its %lld groups is accepted",
                              (long long)s[LS_GO], (long long)s[LS_G]);
    s[LS_O_LORA] = s[LS_GO] / s[LS_G];
    if (s[LS_ROPE] % 2 != 0 || s[LS_ROPE] > s[LS_D])
        return error_argument("cos_sin has %lld columns: an even number up to the %lld channels is accepted",
                              (long long)s[LS_ROPE], (long long)s[LS_D]);
    return QUERN_OK;
}

static quern_status derive_entries(op_call *call)
{
    const quern_dsv4_layer_step_params *p = PARAMS(call);
    int64_t *s = call->symbol;
    if (p->kind == QUERN_DSV4_LAYER_SWA) return QUERN_OK;
    s[LS_SERIES] = (p->kind == QUERN_DSV4_LAYER_CSA ? 2 : 1) * s[LS_D];
    s[LS_PROJ] = 2 * s[LS_SERIES];
    if (s[LS_R] < 1 || s[LS_R] > DSV4_RATIO_MOST)
        return error_argument("compressor_bias has %lld rows: 1 to %d are accepted", (long long)s[LS_R],
                              DSV4_RATIO_MOST);
    if (p->kind == QUERN_DSV4_LAYER_HCA) return QUERN_OK;
    s[LS_2CI] = 2 * s[LS_CI];
    s[LS_HICI] = s[LS_HI] * s[LS_CI];
    s[LS_4CI] = 4 * s[LS_CI];
    s[LS_K] = p->top_k;
    if (s[LS_CI] < 8 || s[LS_CI] > DSV4_INDEX_WIDTH_MOST || s[LS_CI] % 8 != 0 || s[LS_CI] < s[LS_ROPE])
        return error_argument("indexer_norm has %lld channels: a multiple of 8 up to %d, and at least the "
                              "%lld that are rotated, is accepted",
                              (long long)s[LS_CI], DSV4_INDEX_WIDTH_MOST, (long long)s[LS_ROPE]);
    if (s[LS_HI] < 1 || s[LS_HI] > DSV4_HEADS_MOST)
        return error_argument("indexer_heads has %lld rows: 1 to %d are accepted", (long long)s[LS_HI],
                              DSV4_HEADS_MOST);
    return QUERN_OK;
}

quern_status layer_derive(op_call *call)
{
    quern_status status = op_check_ndim(call, DL(x), call->family == &dsv4_layer_family ? 3 : 2);
    if (status == QUERN_OK) status = derive_heads(call);
    if (status == QUERN_OK) status = derive_entries(call);
    for (int i = 0; i < 2 && status == QUERN_OK; i++)
        status = dsv4_weight_check(call, &layer_weights(call)[i], call->symbol[LS_IN]);
    return status;
}

static quern_status derive(op_call *call)
{
    const quern_tensor *x = call->given[DL(x)];
    int64_t *s = call->symbol;
    const quern_status status = layer_derive(call);
    if (status != QUERN_OK) return status;
    s[LS_T] = x->shape[1];
    s[LS_S] = s[LS_SCORES] = s[LS_R] > 0 ? s[LS_T] / s[LS_R] : 0;
    call->lead[0].count = 2;
    call->lead[0].extent[0] = call->lead[1].extent[0] = x->shape[0];
    call->lead[0].extent[1] = s[LS_T];
    call->lead[1].count = 1;
    if (s[LS_T] > s[LS_P] || s[LS_T] > INT32_MAX)
        return error_argument("x has %lld tokens: cos_sin has positions 0 to %lld", (long long)s[LS_T],
                              (long long)s[LS_P] - 1);
    return QUERN_OK;
}

quern_status layer_check_data(const op_call *call, void *const *data)
{
    const dsv4_weight_given *given = ((const dsv4_layer_call *)call)->weights;
    const dsv4_weight_row *weight = layer_weights(call);
    const quern_status status = dsv4_weight_check_data(call, &weight[0], &given[0], data);
    return status == QUERN_OK ? dsv4_weight_check_data(call, &weight[1], &given[1], data) : status;
}

const op_family dsv4_layer_family = {
    OP_TABLES_WITH(operations, layer_param_rows, LAYER_PARAMS, symbols, ops),
    OP_ROWS(tensors, quern_dsv4_layer_tensors, QUERN_DSV4_LAYER_TENSORS_INIT),
    .first = QUERN_OP_DSV4_LAYER,
    .defaults = &(const quern_dsv4_layer_params)QUERN_DSV4_LAYER_PARAMS_INIT,
    .params_init = "QUERN_DSV4_LAYER_PARAMS_INIT",
    .leads = leads,
    .call_size = sizeof(layer_whole_call),
    .params_at = offsetof(dsv4_layer_call, params),
    .program_at = offsetof(layer_whole_call, program),
    .check_params = check_params,
    .roles = roles,
    .refuse = layer_refuse,
    .derive = derive,
    .check_data = layer_check_data,
    .build = layer_build,
};
