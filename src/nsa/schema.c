/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* schema.c - the description of native sparse attention: its tensors and parameters, the extents that
 * follow from them, and what the host can check of the offsets. */
#include "nsa/schema.h"

#include "core/error.h"
#include "core/view.h"
#include "nsa/call.h"

#include <stddef.h>

static const op_tensor tensors[] = {
    [T(q)] = {"q", "Q", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_H, S_D}, {S_T, S_H, S_D}},
    [T(k)] = {"k", "K", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HKV, S_D}, {S_T, S_HKV, S_D}},
    [T(v)] = {"v", "V", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HKV, S_DV}, {S_T, S_HKV, S_DV}},
    [T(k_slc)] = {"k_slc", "K_slc", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HKV, S_D}, {S_T, S_HKV, S_D}},
    [T(v_slc)] = {"v_slc", "V_slc", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HKV, S_DV}, {S_T, S_HKV, S_DV}},
    [T(k_win)] = {"k_win", "K_win", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HKV, S_D}, {S_T, S_HKV, S_D}},
    [T(v_win)] = {"v_win", "V_win", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HKV, S_DV}, {S_T, S_HKV, S_DV}},
    [T(k_cmp)] = {"k_cmp", "K_cmp", OP_ACTIVATION, OP_NONE, {S_B, S_NC, S_HKV, S_D}, {S_TC, S_HKV, S_D}},
    [T(v_cmp)] = {"v_cmp", "V_cmp", OP_ACTIVATION, OP_NONE, {S_B, S_NC, S_HKV, S_DV}, {S_TC, S_HKV, S_DV}},
    [T(cu_seqlens)] = {"cu_seqlens", "cu_seqlens", OP_I32, OP_NONE, {S_B1}, {0}},
    [T(cu_seqlens_cmp)] = {"cu_seqlens_cmp", "cu_seqlens_cmp", OP_I32, OP_NONE, {S_B1}, {0}},
    [T(w_k)] = {"w_k", "W_k", OP_WEIGHT, OP_NONE, {S_HKV, S_LD, S_D}, {0}},
    [T(w_v)] = {"w_v", "W_v", OP_WEIGHT, OP_NONE, {S_HKV, S_LDV, S_DV}, {0}},
    [T(pe_k)] = {"pe_k", "pe_k", OP_WEIGHT, OP_NONE, {S_HKV, S_L, S_D}, {0}},
    [T(pe_v)] = {"pe_v", "pe_v", OP_WEIGHT, OP_NONE, {S_HKV, S_L, S_DV}, {0}},
    [T(w_gate)] = {"w_gate", "gate", OP_WEIGHT, OP_NONE, {S_H, S_3, S_D}, {0}},
    [T(gates)] = {"gates", "gates", OP_F32, OP_NONE, {S_B, S_N, S_H, S_3}, {S_T, S_H, S_3}},
    [T(block_idx)] =
        {"block_idx", "block_idx", OP_I32, OP_NONE, {S_B, S_HS, S_TILES, S_K}, {S_HS, S_ROWS, S_K}},
    [T(block_count)] = {"block_count", "block_count", OP_I32, OP_NONE, {S_B, S_HS, S_TILES}, {S_HS, S_ROWS}},
    [T(group_idx)] =
        {"group_idx", "group_idx", OP_I32, OP_NONE, {S_B, S_HS, S_TILES, S_C}, {S_HS, S_ROWS, S_C}},
    [T(o)] = {"o", "O", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(o_cmp)] = {"o_cmp", "O_cmp", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(o_slc)] = {"o_slc", "O_slc", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(o_win)] = {"o_win", "O_win", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(lse_cmp)] = {"lse_cmp", "lse_cmp", OP_F32, OP_NONE, {S_B, S_H, S_N}, {S_H, S_T}},
    [T(lse_slc)] = {"lse_slc", "lse_slc", OP_F32, OP_NONE, {S_B, S_H, S_N}, {S_H, S_T}},
    [T(lse_win)] = {"lse_win", "lse_win", OP_F32, OP_NONE, {S_B, S_H, S_N}, {S_H, S_T}},
    [T(d_o)] = {"d_o", "dO", OP_ACTIVATION, T(o), {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(d_o_cmp)] = {"d_o_cmp", "dO_cmp", OP_ACTIVATION, T(o_cmp), {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(d_o_slc)] = {"d_o_slc", "dO_slc", OP_ACTIVATION, T(o_slc), {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(d_o_win)] = {"d_o_win", "dO_win", OP_ACTIVATION, T(o_win), {S_B, S_N, S_H, S_DV}, {S_T, S_H, S_DV}},
    [T(d_q)] = {"d_q", "dQ", OP_ACTIVATION, T(q), {S_B, S_N, S_H, S_D}, {S_T, S_H, S_D}},
    [T(d_k)] = {"d_k", "dK", OP_ACTIVATION, T(k), {S_B, S_N, S_HKV, S_D}, {S_T, S_HKV, S_D}},
    [T(d_v)] = {"d_v", "dV", OP_ACTIVATION, T(v), {S_B, S_N, S_HKV, S_DV}, {S_T, S_HKV, S_DV}},
    [T(d_k_slc)] = {"d_k_slc", "dK_slc", OP_ACTIVATION, T(k_slc), {S_B, S_N, S_HKV, S_D}, {S_T, S_HKV, S_D}},
    [T(d_v_slc)] =
        {"d_v_slc", "dV_slc", OP_ACTIVATION, T(v_slc), {S_B, S_N, S_HKV, S_DV}, {S_T, S_HKV, S_DV}},
    [T(d_k_win)] = {"d_k_win", "dK_win", OP_ACTIVATION, T(k_win), {S_B, S_N, S_HKV, S_D}, {S_T, S_HKV, S_D}},
    [T(d_v_win)] =
        {"d_v_win", "dV_win", OP_ACTIVATION, T(v_win), {S_B, S_N, S_HKV, S_DV}, {S_T, S_HKV, S_DV}},
    [T(d_k_cmp)] =
        {"d_k_cmp", "dK_cmp", OP_ACTIVATION, T(k_cmp), {S_B, S_NC, S_HKV, S_D}, {S_TC, S_HKV, S_D}},
    [T(d_v_cmp)] =
        {"d_v_cmp", "dV_cmp", OP_ACTIVATION, T(v_cmp), {S_B, S_NC, S_HKV, S_DV}, {S_TC, S_HKV, S_DV}},
    [T(d_w_k)] = {"d_w_k", "dW_k", OP_F32, T(w_k), {S_HKV, S_LD, S_D}, {0}},
    [T(d_w_v)] = {"d_w_v", "dW_v", OP_F32, T(w_v), {S_HKV, S_LDV, S_DV}, {0}},
    [T(d_pe_k)] = {"d_pe_k", "dpe_k", OP_F32, T(pe_k), {S_HKV, S_L, S_D}, {0}},
    [T(d_pe_v)] = {"d_pe_v", "dpe_v", OP_F32, T(pe_v), {S_HKV, S_L, S_DV}, {0}},
    [T(d_w_gate)] = {"d_w_gate", "dgate", OP_F32, T(w_gate), {S_H, S_3, S_D}, {0}},
    [T(d_gates)] = {"d_gates", "dgates", OP_F32, T(gates), {S_B, S_N, S_H, S_3}, {S_T, S_H, S_3}},
    [T(q_index)] = {"q_index", "q_I", OP_ACTIVATION, OP_NONE, {S_B, S_N, S_HS, S_DI}, {S_T, S_HS, S_DI}},
    [T(k_index)] =
        {"k_index", "k_I", OP_ACTIVATION, OP_NONE, {OP_LEAD + LEAD_KEYS}, {OP_LEAD + LEAD_KEY_ROWS}},
};

static const char *const compress_choices[] = {"mean", "linear", "given", NULL};
static const char *const scope_choices[] = {"group", "head", NULL};
static const char *const metric_choices[] = {"softmax", "mean-logit", NULL};
static const char *const visibility_choices[] = {"complete", "started", NULL};
static const char *const branch_choices[] = {"cmp", "slc", "win", NULL};
static const char *const gate_choices[] = {"none", "weights", "given", NULL};
static const char *const selection_choices[] = {"computed", "given", "indexed", NULL};
static const char *const list_choices[] = {"computed", "given", NULL};

#define FIELD(member) OP_FIELD(quern_nsa_params, member)
const op_param nsa_param_rows[NSA_PARAMS] = {
    {FIELD(block_size), OP_INTEGER, 1, INT32_MAX, NULL, "l, compression block length"},
    {FIELD(stride), OP_INTEGER, INT64_MIN, INT64_MAX, NULL, "d, its stride; divides l; 0: l"},
    {FIELD(select_block), OP_INTEGER, INT64_MIN, INT64_MAX, NULL,
     "l', selection block length; a multiple of d; 0: l"},
    {FIELD(num_selected), OP_INTEGER, 1, INT32_MAX, NULL,
     "k, selected blocks per tile, forced ones included"},
    {FIELD(tile), OP_INTEGER, 1, 256, NULL, "Tq, consecutive queries that share a selection, 1 to 256"},
    {FIELD(window), OP_INTEGER, 1, INT64_MAX, NULL, "W, window length in keys, self included"},
    {FIELD(compress), OP_CHOICE, 0, QUERN_NSA_COMPRESS_GIVEN, compress_choices,
     "how blocks are compressed; given: K_cmp, V_cmp are inputs"},
    {FIELD(scope), OP_CHOICE, 0, QUERN_NSA_SCOPE_HEAD, scope_choices,
     "heads that share a selection: all of a key/value head, or none"},
    {FIELD(metric), OP_CHOICE, 0, QUERN_NSA_METRIC_MEAN_LOGIT, metric_choices,
     "score of a block; mean-logit needs l = d = l'"},
    {FIELD(compressed_visibility), OP_CHOICE, 0, QUERN_NSA_VISIBLE_STARTED, visibility_choices,
     "an entry is seen once its whole block has passed, or has begun"},
    {FIELD(forced_first), OP_INTEGER, 0, INT32_MAX, NULL, "first blocks, always selected"},
    {FIELD(forced_local), OP_INTEGER, 0, INT32_MAX, NULL,
     "newest blocks, always selected; those of the tile count as one; causal only"},
    {FIELD(max_compressed_groups), OP_INTEGER, 0, INT32_MAX, NULL,
     "c, groups of 128 entries attended; 0: all; needs mean-logit"},
    {FIELD(causal), OP_FLAG, 0, 1, NULL, "a query sees nothing after its own position"},
    {FIELD(scale), OP_ROOT, 0, 0, NULL, "of the scores; 0: 1/sqrt(D)"},
    {FIELD(branches), OP_SET, 1, QUERN_NSA_BRANCH_ALL, branch_choices, "branches that are computed"},
    {FIELD(ungated), OP_FLAG, 0, 1, NULL, "O = O_slc: the selected branch alone, without gates"},
    {FIELD(gate), OP_CHOICE, 0, QUERN_NSA_GATE_GIVEN, gate_choices, NULL},
    {FIELD(selection), OP_CHOICE, 0, QUERN_NSA_LIST_INDEXED, selection_choices, NULL},
    {FIELD(groups), OP_CHOICE, 0, QUERN_NSA_LIST_GIVEN, list_choices, NULL},
};
const quern_nsa_params nsa_defaults = QUERN_NSA_PARAMS_INIT;
static const char *const operations[] = {
    "nsa_forward", "nsa_backward", "nsa_compress",        "nsa_compress_backward",
    "nsa_select",  "nsa_attend",   "nsa_attend_backward", "nsa_gates",
    "nsa_combine", "nsa_gate",     "nsa_gate_backward"};

const char nsa_symbols[] = "B B+1 N T H Hkv D Dv Nc Tc l D|l*D Dv|l*Dv 3 Hs tiles rows k c D_I S Tkv blocks";
static const char *const leads[] = {"B N D_I|B N Hs D_I...", "T D_I|T Hs D_I...", NULL};

static const int8_t branch_outputs[] = {T(o_cmp), T(o_slc), T(o_win), OP_NONE};
static const op_entry ops[] = {
    {.name = "nsa",
     .help =
         "native sparse attention, the whole; with dO also its backward. gate: gates by weights; gates: "
         "handed in; neither: 1/3 each. block_idx, group_idx: handed-in lists; q_I and k_I choose the blocks",
     .forward = NSA_FORWARD,
     .backward = NSA_BACKWARD,
     .aside = "save-branches",
     .aside_tensors = branch_outputs},
    {.name = "nsa-compress",
     .help = "compress keys and values; with dK_cmp and dV_cmp also the backward",
     .forward = NSA_COMPRESS,
     .backward = NSA_COMPRESS_BACKWARD},
    {.name = "nsa-select", .help = "choose the blocks of every tile", .forward = NSA_SELECT},
    {.name = "nsa-attend",
     .help = "attend over the branches asked for; with dO_cmp, dO_slc, dO_win also the backward",
     .forward = NSA_ATTEND,
     .backward = NSA_ATTEND_BACKWARD},
    {.name = "nsa-gates", .help = "compute the gates", .forward = NSA_GATES},
    {.name = "nsa-combine",
     .help = "combine the branches by gates handed in, or 1/3 each",
     .forward = NSA_COMBINE},
    {.name = "nsa-gate",
     .help = "compute the gates and combine in one pass; with dO also the backward (dQ is the gate's share)",
     .forward = NSA_GATE,
     .backward = NSA_GATE_BACKWARD},
};
/* gate, selection and groups stand last. */
static const op_mode modes[] = {{NSA_GATE_PARAM, {OP_NONE, T(w_gate), T(gates)}},
                                {NSA_PARAMS - 2, {OP_NONE, T(block_idx), T(q_index)}},
                                {NSA_PARAMS - 1, {OP_NONE, T(group_idx)}}};

static quern_status preset(void *p, const char *name)
{
    return quern_nsa_params_preset(p, name);
}

int64_t nsa_entries_of(const op_call *call, int64_t n)
{
    const quern_nsa_params *p = &((const nsa_call *)call)->params;
    return mask_entries(n, p->block_size, p->stride);
}

/* Whether the sizes of the largest tensors in the workspace fit 64 bits. */
static quern_status check_products(const op_call *call)
{
    const int64_t *s = call->symbol;
    const int64_t per_query[] = {s[S_H], 512},
                  lists[] = {s[S_HS], call->varlen ? s[S_ROWS] : s[S_TILES], s[S_K]};
    int64_t rows = s[S_T], entries = call->varlen ? 1 : s[S_B];
    bool fits = call->varlen || !__builtin_mul_overflow(s[S_B], s[S_N], &rows);
    for (int i = 0; i < 2; i++) fits = fits && !__builtin_mul_overflow(rows, per_query[i], &rows);
    for (int i = 0; i < 3; i++) fits = fits && !__builtin_mul_overflow(entries, lists[i], &entries);
    if (fits && rows <= INT64_MAX / 64 && entries <= INT64_MAX / 64) return QUERN_OK;
    return error_argument("batch %lld, %lld tokens, %lld heads, num_selected %lld: the sizes overflow: "
                          "products below 2^57 are accepted",
                          (long long)s[S_B], (long long)s[S_N], (long long)s[S_H], (long long)s[S_K]);
}

static int64_t saturating_product(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/* The extents that follow from others and the parameters. */
static void derive_extents(op_call *call, int64_t n)
{
    const quern_nsa_params *p = &((const nsa_call *)call)->params;
    const bool linear = p->compress == QUERN_NSA_COMPRESS_LINEAR;
    int64_t *s = call->symbol;
    s[S_B1] = s[S_B] + 1;
    s[S_N] = s[S_T] = n;
    s[S_NC] = nsa_entries_of(call, n);
    s[S_TC] = n / p->stride;
    s[S_L] = p->block_size;
    s[S_LD] = linear ? saturating_product(p->block_size, s[S_D]) : s[S_D];
    s[S_LDV] = linear ? saturating_product(p->block_size, s[S_DV]) : s[S_DV];
    s[S_3] = 3;
    s[S_HS] = p->scope == QUERN_NSA_SCOPE_HEAD ? s[S_H] : s[S_HKV];
    s[S_TILES] = n / p->tile + (n % p->tile != 0);
    s[S_ROWS] = n / p->tile + s[S_B];
    s[S_K] = p->num_selected;
    s[S_C] = p->max_compressed_groups;
}

/* The indexer's width, and the two shapes that its keys may have. */
static quern_status derive_indexer(op_call *call)
{
    const quern_tensor *q = call->given[T(q_index)], *k = call->given[T(k_index)];
    const int32_t ndim = call->varlen ? 3 : 4;
    int64_t *s = call->symbol;
    if (!op_uses(call, T(q_index))) return QUERN_OK;
    const quern_status status = view_check_head_dim("q_index", q->shape[ndim - 1]);
    if (status != QUERN_OK) return status;
    s[S_DI] = q->shape[ndim - 1];
    const bool shared = k != NULL && k->ndim == ndim - 1;
    call->lead[LEAD_KEYS] = shared ? (op_extents){3, {s[S_B], s[S_N], s[S_DI]}}
                                   : (op_extents){4, {s[S_B], s[S_N], s[S_HS], s[S_DI]}};
    call->lead[LEAD_KEY_ROWS] =
        shared ? (op_extents){2, {s[S_T], s[S_DI]}} : (op_extents){3, {s[S_T], s[S_HS], s[S_DI]}};
    return QUERN_OK;
}

static const int8_t like[] = {T(q), T(o_cmp), T(o_slc), T(o_win), T(o), T(d_o), T(k), OP_NONE};

/* Queries, keys and values give the extents: of each, the first that the operation uses. */
static quern_status derive(op_call *call)
{
    static const int32_t query_list[] = {T(q), T(o_cmp), T(o_slc), T(o_win), T(o), T(d_o)},
                         key_list[] = {T(k), T(k_slc), T(k_win), T(k_cmp)};
    static const int32_t value_list[] = {T(v),     T(v_slc), T(v_win), T(v_cmp), T(o),
                                         T(o_cmp), T(o_slc), T(o_win), T(d_o)};
    const bool compress_alone = call->operation == NSA_COMPRESS || call->operation == NSA_COMPRESS_BACKWARD;
    const int32_t q = op_first_used(call, query_list, 6), k = op_first_used(call, key_list, 4),
                  v = op_first_used(call, value_list, 9);
    const int32_t lead = compress_alone ? k : q, ndim = call->varlen ? 3 : 4, at = call->varlen ? 0 : 1,
                  all[] = {q, k, v};
    if (lead == OP_NONE)
        return error_argument("%s is NULL: a tensor is needed", compress_alone                  ? "k"
                                                                : call->role[T(q)] == OP_NEEDED ? "q"
                                                                                                : "o_cmp");
    quern_status status = QUERN_OK;
    for (int i = 0; i < 3 && status == QUERN_OK; i++)
        if (all[i] != OP_NONE) status = op_check_ndim(call, all[i], ndim);
    if (status != QUERN_OK) return status;
    const quern_tensor *const *t = call->given;
    int64_t *s = call->symbol;
    if ((status = op_find_batch(call, T(cu_seqlens), t[lead], &s[S_B])) != QUERN_OK) return status;
    const int64_t n = t[lead]->shape[at];
    const bool queries = op_uses(call, T(q));
    if (queries && op_uses(call, T(o)) && (status = view_check_order(t[T(q)], t[T(o)])) != QUERN_OK)
        return status;
    s[S_H] = q != OP_NONE ? t[q]->shape[at + 1] : 0;
    s[S_HKV] = k != OP_NONE ? t[k]->shape[at + 1] : 0;
    s[S_D] = queries ? t[T(q)]->shape[at + 2] : k != OP_NONE ? t[k]->shape[at + 2] : 0;
    s[S_DV] = v != OP_NONE ? t[v]->shape[at + 2] : 0;
    if (n > INT32_MAX) return error_argument("%lld tokens: at most %d are accepted", (long long)n, INT32_MAX);
    if (queries || k != OP_NONE) status = view_check_head_dim(queries ? "q" : tensors[k].field, s[S_D]);
    if (status == QUERN_OK && v != OP_NONE) status = view_check_head_dim(tensors[v].field, s[S_DV]);
    if (status == QUERN_OK && q != OP_NONE && k != OP_NONE) status = view_check_heads(s[S_H], s[S_HKV], n);
    if (status != QUERN_OK) return status;
    derive_extents(call, n);
    if ((status = derive_indexer(call)) != QUERN_OK) return status;
    return check_products(call);
}

/* cu_seqlens_cmp that is handed in: every sequence has as many entries as its length makes. */
static quern_status check_entries(const op_call *call, const int32_t *tokens, const int32_t *entries)
{
    const quern_status status =
        view_check_offsets(entries, call->symbol[S_B], "cu_seqlens_cmp", call->symbol[S_TC]);
    if (status != QUERN_OK) return status;
    for (int64_t b = 0; b < call->symbol[S_B]; b++) {
        const int64_t n = (int64_t)tokens[b + 1] - tokens[b], expected = nsa_entries_of(call, n);
        if (entries[b + 1] - entries[b] != expected)
            return error_argument("cu_seqlens_cmp[%lld] is %d after %d: %lld entries of the sequence's %lld "
                                  "tokens are accepted",
                                  (long long)b + 1, entries[b + 1], entries[b], (long long)expected,
                                  (long long)n);
    }
    return QUERN_OK;
}

/* cu_seqlens_cmp; starts that make no sense are left to the call to refuse. */
static quern_status complete(const op_call *call, int32_t tensor, int32_t *data)
{
    const quern_tensor *cu = call->given[T(cu_seqlens)];
    if (tensor != T(cu_seqlens_cmp) || cu == NULL || cu->data == NULL || cu->dtype != QUERN_I32 ||
        cu->ndim != 1)
        return error_set(QUERN_ERR_UNSUPPORTED, "%s does not follow from cu_seqlens", tensors[tensor].field);
    const int32_t *starts = cu->data;
    int64_t sum = 0;
    for (int64_t b = 0; b < cu->shape[0]; b++) {
        if (b > 0) sum += nsa_entries_of(call, (int64_t)starts[b] - starts[b - 1]);
        data[b] = (int32_t)sum;
    }
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    if (!call->varlen) return QUERN_OK;
    const quern_status status =
        view_check_offsets(data[T(cu_seqlens)], call->symbol[S_B], "cu_seqlens", call->symbol[S_T]);
    if (status != QUERN_OK || call->role[T(cu_seqlens_cmp)] != OP_NEEDED) return status;
    return check_entries(call, data[T(cu_seqlens)], data[T(cu_seqlens_cmp)]);
}

const op_family nsa_family = {
    OP_TABLES(operations, nsa_param_rows, nsa_symbols, ops),
    OP_ROWS(tensors, quern_nsa_tensors, QUERN_NSA_TENSORS_INIT),
    OP_OWN_CALL(nsa_call, QUERN_NSA_PARAMS_INIT),
    .first = QUERN_OP_NSA_FORWARD,
    .varlen_by = T(cu_seqlens),
    .preset = preset,
    .leads = leads,
    .like = like,
    .modes = modes,
    .mode_count = sizeof modes / sizeof *modes,
    .complete = complete,
    .check_params = nsa_check_params,
    .roles = nsa_roles,
    .refuse = nsa_refuse,
    .derive = derive,
    .check_data = check_data,
    .build = nsa_build_program,
};
