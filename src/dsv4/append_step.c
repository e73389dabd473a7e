/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append_step.c - a step's tokens into states that stand in slots of a tensor:
 *
 *   copy_pages of the states  ->  [steps of weights.c, gemm: x w -> proj]  ->  pool_append
 */
#include "cache/step.h"
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

#include <inttypes.h>

const op_tensor dsv4_append_rows[] = {
    {"proj", "proj", OP_ACTIVATION, OP_NONE, {DS_T, DS_COLUMNS}, {0}},
    {"x", "X", OP_ACTIVATION, OP_NONE, {DS_T, DS_IN}, {0}},
    {"w", "W", OP_WEIGHT, OP_NONE, {DS_IN, DS_COLUMNS}, {0}},
    {"b_a", "B_a", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
    {"b_b", "B_b", OP_WEIGHT, OP_NONE, {DS_R, DS_C}, {0}},
    {"prev_b", "prev_b", OP_WEIGHT, OP_NONE, {DS_B, DS_R, DS_2C}, {0}},
    {"norm_weight", "norm_weight", OP_WEIGHT, OP_NONE, {DS_C}, {0}},
    {"cos_sin", "cos_sin", OP_WEIGHT, OP_NONE, {DS_P, DS_ROPE}, {0}},
    {"out", "out", OP_STORED, OP_NONE, {DS_N, DS_ROW}, {0}},
    {"pooled", "pooled", OP_F32, OP_NONE, {DS_N, DS_C}, {0}},
    DSV4_WEIGHT_TENSORS("w", "W_", DS_IN, DS_COLUMNS){"slots", "slots", OP_I32, OP_NONE, {DS_B}, {0}},
    {"positions", "positions", OP_I32, OP_NONE, {DS_B}, {0}},
    {"cu", "cu", OP_I32, OP_NONE, {DS_B1}, {0}},
    {"states", "states", OP_F32, OP_NONE, {DS_SLOTS, DS_FLOATS}, {0}},
    {"merged", "merged", OP_I32, OP_NONE, {DS_SLOTS}, {0}},
    {"copies", "copies", OP_I32, OP_NONE, {DS_COPIES, DS_COPY}, {0}},
    {"fault", "fault", OP_I32, OP_NONE, {DS_SLOTS}, {0}},
};
_Static_assert(sizeof dsv4_append_rows / sizeof *dsv4_append_rows == DSV4_APPEND_TENSORS, "a row a tensor");
const dsv4_weight_row dsv4_append_weight = {{DP(w), OP_NONE}, DP(w_fp8)};

static const char *const kinds[] = {"csa", "hca", NULL}, *const ends[] = {"first", "last", NULL},
                         *const formats[] = {"rows", "fp8", "fp8-power", "fp4", "row584", NULL};
#define AT(member) offsetof(quern_dsv4_compress_params, member)
static const op_param params[] = {
    {"kind", AT(kind), OP_CHOICE, 0, 1, kinds, "overlapping blocks with two series, or one series"},
    {"ratio", AT(ratio), OP_INTEGER, 0, DSV4_RATIO_MOST, NULL, "r, tokens of a block; 0: 4 (csa), 128 (hca)"},
    {"rope_last", AT(rope_last), OP_FLAG, 0, 1, ends,
     "the token of a block whose position rotates its entry"},
    {"round_bf16", AT(round_bf16), OP_FLAG, 0, 1, NULL, "round pooled rows before the norm"},
    {"hadamard", AT(hadamard), OP_FLAG, 0, 1, NULL, "Walsh-Hadamard transform of the entries"},
    {"eps", AT(eps), OP_POSITIVE, 0, 0, NULL, "of the norm; 0: 1e-6"},
    {"format", AT(format), OP_CHOICE, 0, QUERN_DSV4_ROW584, formats, "of out"},
};
#undef AT

typedef struct step_call {
    op_call head;
    quern_dsv4_compress_params params;
    dsv4_weight_given weight;
    _Alignas(op_step) char program[DSV4_WEIGHT_BYTES + OP_STEP_BYTES(gemm) + OP_STEP_BYTES(pool_append) +
                                   2 * OP_STEP_BYTES(copy_pages)];
} step_call;

/* ---- what both kinds of states share ---- */

static const quern_dsv4_compress_params *params_of(const op_call *call)
{
    const char *at = (const char *)call + call->family->params_at;
    return (const quern_dsv4_compress_params *)(const void *)at;
}

void dsv4_append_roles(op_call *call)
{
    const bool csa = params_of(call)->kind == QUERN_DSV4_CSA, project = call->given[DP(x)] != NULL;
    uint8_t *r = call->role;
    r[DP(proj)] = project ? OP_REFUSED : OP_NEEDED;
    r[DP(x)] = r[DP(norm_weight)] = r[DP(cos_sin)] = OP_OPTIONAL;
    r[DP(b_a)] = OP_NEEDED;
    r[DP(b_b)] = csa ? OP_NEEDED : OP_REFUSED;
    r[DP(prev_b)] = csa ? OP_OPTIONAL : OP_REFUSED;
    r[DP(out)] = OP_RESULT;
    r[DP(pooled)] = OP_OPTIONAL_RESULT;
    for (int i = DP(slots); i <= DP(fault); i++) r[i] = OP_REFUSED;
    dsv4_weight_roles(call, &dsv4_append_weight, project);
}

quern_status dsv4_append_refuse(const op_call *call, int32_t tensor)
{
    const char *why = "proj alone, or x and a weight are accepted";
    if (tensor == DP(b_b) || tensor == DP(prev_b)) why = "HCA has no series b";
    else if (tensor >= DP(slots)) why = "quern_dsv4_append_step() takes it";
    else if (tensor != DP(proj) && call->given[DP(x)] != NULL)
        return dsv4_weight_refuse(call, &dsv4_append_weight, tensor);
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is given: %s", dsv4_append_rows[tensor].field, why);
}

quern_status dsv4_append_derive(op_call *call, const quern_dsv4_compress_params *p, int64_t width)
{
    const int32_t first = call->given[DP(x)] != NULL ? DP(x) : DP(proj);
    const quern_tensor *main = call->given[first], *cos_sin = call->given[DP(cos_sin)];
    int64_t *s = call->symbol;
    if (main == NULL)
        return error_set(QUERN_ERR_INVALID_ARGUMENT, "proj is NULL: proj, or x and w, are needed");
    call->like = *main;
    quern_status status = op_check_activation(call, first, 2);
    if (status == QUERN_OK && cos_sin != NULL) status = op_check_kind(call, DP(cos_sin), 2);
    if (status != QUERN_OK) return status;
    s[DS_IN] = main->shape[1];
    s[DS_R] = p->ratio;
    s[DS_C] = width;
    s[DS_2C] = 2 * width;
    s[DS_COLUMNS] = pool_row_columns(p->kind == QUERN_DSV4_CSA, width);
    s[DS_P] = cos_sin != NULL ? cos_sin->shape[0] : 0;
    s[DS_ROPE] = cos_sin != NULL ? cos_sin->shape[1] : 0;
    s[DS_ROW] = p->format == QUERN_DSV4_ROWS ? width : dsv4_row_bytes(p->format, width);
    if ((status = dsv4_check_width(p, width, s[DS_ROPE])) != QUERN_OK ||
        (status = dsv4_weight_check(call, &dsv4_append_weight, s[DS_IN])) != QUERN_OK)
        return status;
    return op_uses(call, DP(out)) ? dsv4_check_stored(call, DP(out), p->format) : QUERN_OK;
}

static quern_tensor view(const op_build *b, int32_t tensor)
{
    return op_view(b->call, tensor, false);
}

quern_tensor dsv4_append_projection(op_build *b, dsv4_weight_given *given)
{
    const quern_tensor x = view(b, DP(x));
    *given = dsv4_weight_views(b->call, &dsv4_append_weight);
    if (x.ndim == 0) return view(b, DP(proj));
    const dsv4_weight weight = dsv4_weight_add(b, &x, given, false);
    if (weight.proj.ndim > 0) return weight.proj;
    const quern_tensor proj = op_matrix(b, QUERN_F32, x.shape[0], b->call->symbol[DS_COLUMNS]);
    *OP_ADD(b, gemm) = (gemm_args){.a = x, .b = weight.w, .c = proj};
    return proj;
}

/* ---- the operation ---- */

static quern_status check_params(op_call *call)
{
    quern_dsv4_compress_params *p = &((step_call *)call)->params;
    p->start_abs_pos = p->start_token = p->n_blocks = 0;
    return dsv4_resolve(p);
}

static void roles(op_call *call)
{
    dsv4_append_roles(call);
    uint8_t *r = call->role;
    r[DP(prev_b)] = OP_REFUSED;
    r[DP(slots)] = r[DP(positions)] = r[DP(cu)] = OP_NEEDED;
    r[DP(states)] = r[DP(merged)] = OP_UPDATED;
    r[DP(copies)] = OP_OPTIONAL;
    r[DP(fault)] = call->given[DP(fault)] != NULL ? OP_UPDATED : OP_OPTIONAL;
}

static quern_status refuse(const op_call *call, int32_t tensor)
{
    if (tensor != DP(prev_b)) return dsv4_append_refuse(call, tensor);
    return error_set(QUERN_ERR_INVALID_ARGUMENT, "prev_b is given: a step's sequences begin at position 0");
}

/* Rows of the states' rings, from the floats of a state. */
static int64_t ring_of(const op_call *call, int64_t floats)
{
    const bool overlap = params_of(call)->kind == QUERN_DSV4_CSA;
    const int64_t width = call->symbol[DS_C],
                  ring = (floats - pool_sums_floats(overlap, width)) / pool_row_columns(overlap, width);
    return ring < 0 ? 0 : ring > DSV4_RING_MOST ? DSV4_RING_MOST : ring;
}

static quern_status derive(op_call *call)
{
    static const struct {
        int32_t tensor, ndim;
    } sized[] = {{DP(b_a), 2}, {DP(slots), 1}, {DP(states), 2}};
    int64_t *s = call->symbol;
    for (size_t i = 0; i < sizeof sized / sizeof *sized; i++) {
        if (call->given[sized[i].tensor] == NULL)
            return error_set(QUERN_ERR_INVALID_ARGUMENT, "%s is NULL: a tensor is needed",
                             dsv4_append_rows[sized[i].tensor].field);
        const quern_tensor *const *first = call->given + (call->given[DP(x)] != NULL ? DP(x) : DP(proj));
        if (*first != NULL) call->like = **first;
        const quern_status status = op_check_kind(call, sized[i].tensor, sized[i].ndim);
        if (status != QUERN_OK) return status;
    }
    quern_status status = dsv4_append_derive(call, params_of(call), call->given[DP(b_a)]->shape[1]);
    if (status != QUERN_OK) return status;
    s[DS_T] = call->like.shape[0];
    s[DS_B] = call->given[DP(slots)]->shape[0];
    if (s[DS_T] > INT32_MAX || s[DS_B] > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "%" PRId64 " tokens of %" PRId64 " sequences: up to %d are accepted", s[DS_T],
                         s[DS_B], INT32_MAX);
    s[DS_B1] = s[DS_B] + 1;
    s[DS_N] = s[DS_T] / s[DS_R] + s[DS_B];
    s[DS_SLOTS] = call->given[DP(states)]->shape[0];
    s[DS_FLOATS] = pool_state_floats(params_of(call)->kind == QUERN_DSV4_CSA, s[DS_C],
                                     ring_of(call, call->given[DP(states)]->shape[1]));
    s[DS_COPY] = 3;
    if (op_uses(call, DP(copies))) {
        if ((status = op_check_kind(call, DP(copies), 2)) != QUERN_OK) return status;
        s[DS_COPIES] = call->given[DP(copies)]->shape[0];
    }
    return QUERN_OK;
}

/* A tensor [slots, n] or [slots] as pages of one part. */
static quern_tensor as_pages(const quern_tensor *t)
{
    quern_tensor pages = *t;
    pages.ndim = 3;
    pages.shape[1] = 1;
    pages.strides[1] = t->strides[0];
    pages.shape[2] = t->ndim == 2 ? t->shape[1] : 1;
    pages.strides[2] = 1;
    return pages;
}

static void build(op_build *b)
{
    step_call *c = (step_call *)b->call;
    const quern_tensor copies = view(b, DP(copies)), states = view(b, DP(states)),
                       merged = view(b, DP(merged)), cu = view(b, DP(cu)), norm = view(b, DP(norm_weight)),
                       table = view(b, DP(cos_sin));
    if (copies.ndim > 0) {
        *OP_ADD(b, copy_pages) = (copy_pages_args){QUERN_LEDGER_STATES, copies, as_pages(&states)};
        *OP_ADD(b, copy_pages) = (copy_pages_args){QUERN_LEDGER_STATES, copies, as_pages(&merged)};
    }
    const quern_tensor proj = dsv4_append_projection(b, &c->weight);
    *OP_ADD(b, pool_append) =
        (pool_append_args){.ratio = c->params.ratio,
                           .width = b->call->symbol[DS_C],
                           .ring = ring_of(b->call, b->call->symbol[DS_FLOATS]),
                           .overlap = c->params.kind == QUERN_DSV4_CSA,
                           .step = {view(b, DP(slots)), view(b, DP(positions)), view_ranges(&cu)},
                           .by_slot = true,
                           .merged = merged,
                           .state = states,
                           .fault = view(b, DP(fault)),
                           .proj = proj,
                           .bias_a = view(b, DP(b_a)),
                           .bias_b = view(b, DP(b_b)),
                           .entry = dsv4_entry(&c->params, &norm, &table),
                           .out = view(b, DP(out)),
                           .pooled = view(b, DP(pooled))};
}

/* ---- data ---- */

static int32_t number(const quern_tensor *t, const void *data, int64_t i)
{
    return ((const int32_t *)data)[i * t->strides[0]];
}

/* Copies of states are of slots. */
static quern_status check_copies(const op_call *call, void *const *data)
{
    const copy_pages_args *args = OP_FIND(call, copy_pages);
    for (int64_t i = 0; args != NULL && i < args->copies.shape[0]; i++) {
        const int32_t *copy = (const int32_t *)data[DP(copies)] + i * args->copies.strides[0];
        for (int64_t k = 1; copy[0] == QUERN_LEDGER_STATES && k < 3; k++) {
            const int32_t slot = copy[k * args->copies.strides[1]];
            if (slot < 0 || slot >= call->symbol[DS_SLOTS])
                return error_set(QUERN_ERR_INVALID_ARGUMENT,
                                 "copies[%" PRId64 "][%" PRId64 "] is %d: a slot of states, 0 to %" PRId64
                                 ", is accepted",
                                 i, k, slot, call->symbol[DS_SLOTS] - 1);
        }
    }
    return QUERN_OK;
}

/* The slot whose state a slot has once the copies are made. */
static int32_t source_of(const op_call *call, void *const *data, int32_t slot)
{
    const copy_pages_args *args = OP_FIND(call, copy_pages);
    for (int64_t i = 0; args != NULL && i < args->copies.shape[0]; i++) {
        const int32_t *copy = (const int32_t *)data[DP(copies)] + i * args->copies.strides[0];
        if (copy[0] == QUERN_LEDGER_STATES && copy[2 * args->copies.strides[1]] == slot)
            return copy[args->copies.strides[1]];
    }
    return slot;
}

static quern_status check_sequence(const op_call *call, void *const *data, const pool_append_args *args,
                                   int64_t b)
{
    const int64_t *s = call->symbol;
    const int32_t *slots = data[DP(slots)], *cu = data[DP(cu)];
    const int32_t slot = number(&args->step.slots, slots, b);
    if (slot == -1) return QUERN_OK;
    if (slot < -1 || slot >= s[DS_SLOTS])
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "slots[%" PRId64 "] is %d: -1 to %" PRId64 " is accepted", b, slot, s[DS_SLOTS] - 1);
    const int64_t at = number(&args->step.positions, data[DP(positions)], b), r = args->ratio,
                  end = at + number(&args->step.rows, cu, b + 1) - number(&args->step.rows, cu, b),
                  last = (end / r - 1) * r + (args->entry.rope_last ? r - 1 : 0);
    if (end == at) return QUERN_OK; /* forks share a slot until one of them has tokens */
    for (int64_t i = 0; i < b; i++)
        if (number(&args->step.slots, slots, i) == slot &&
            number(&args->step.rows, cu, i + 1) > number(&args->step.rows, cu, i))
            return error_set(QUERN_ERR_INVALID_ARGUMENT,
                             "slots[%" PRId64 "] and slots[%" PRId64
                             "] are %d: a slot is accepted once where there are tokens",
                             i, b, slot);
    if (end > INT32_MAX)
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "sequence %" PRId64 " of the call comes to %" PRId64
                         " tokens: up to %d are accepted",
                         b, end, INT32_MAX);
    if (args->entry.cos_sin.ndim > 0 && end / r > at / r && last >= s[DS_P])
        return error_set(QUERN_ERR_INVALID_ARGUMENT,
                         "sequence %" PRId64 " of the call comes to an entry at position %" PRId64
                         ": cos_sin has positions 0 to %" PRId64,
                         b, last, s[DS_P] - 1);
    if (at == 0) return QUERN_OK;
    const int64_t merged = number(&args->merged, data[DP(merged)], source_of(call, data, slot));
    if (at >= merged && at - merged <= args->ring && merged >= 0) return QUERN_OK;
    return error_set(QUERN_ERR_INVALID_ARGUMENT,
                     "positions[%" PRId64 "] is %" PRId64 " and the state's sums have %" PRId64
                     " rows: as many, or up to %" PRId64 " more are accepted",
                     b, at, merged, args->ring);
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const pool_append_args *args = OP_FIND(call, pool_append);
    quern_status status =
        dsv4_weight_check_data(call, &dsv4_append_weight, &((const step_call *)call)->weight, data);
    if (status == QUERN_OK) status = check_copies(call, data);
    if (args->fault.ndim > 0) return status; /* faults of sequences are no errors */
    if (status == QUERN_OK)
        status = step_check_numbers(&args->step, data[DP(cu)], data[DP(positions)], call->symbol[DS_B],
                                    call->symbol[DS_T]);
    for (int64_t b = 0; b < call->symbol[DS_B] && status == QUERN_OK; b++)
        status = check_sequence(call, data, args, b);
    return status;
}

static const char *const operations[] = {"dsv4_append_step"};
static const op_entry ops[] = {
    {.name = "v4-append-step",
     .help =
         "a step's tokens into the states of DeepSeek-V4's compressors, and the entries that become whole",
     .backward = OP_NONE},
};
static const char *const symbols[] = {"",
                                      [DS_B] = "B",
                                      [DS_B1] = "B+1",
                                      [DS_T] = "T",
                                      [DS_COLUMNS] = "4C|2C",
                                      [DS_IN] = "Dm",
                                      [DS_R] = "r",
                                      [DS_C] = "C",
                                      [DS_2C] = "2C",
                                      [DS_P] = "P",
                                      [DS_ROPE] = "R",
                                      [DS_N] = "n",
                                      [DS_ROW] = "C|bytes",
                                      [DS_ICOLUMNS] = "",
                                      [DS_CI] = "",
                                      [DS_2CI] = "",
                                      [DS_IROW] = "",
                                      [DS_SLOTS] = "slots",
                                      [DS_FLOATS] = "floats",
                                      [DS_COPIES] = "copies",
                                      [DS_COPY] = "3",
                                      NULL};

const op_family dsv4_append_step_family = {
    OP_TABLES(step_call, operations, dsv4_append_rows, params, symbols, ops),
    .first = QUERN_OP_DSV4_APPEND_STEP,
    .varlen_by = OP_NONE,
    .defaults = &dsv4_compress_defaults,
    .params_init = "QUERN_DSV4_COMPRESS_PARAMS_INIT",
    .tensors_init = "QUERN_DSV4_APPEND_TENSORS_INIT",
    .group = "v4-append-step",
    .check_params = check_params,
    .roles = roles,
    .refuse = refuse,
    .derive = derive,
    .check_data = check_data,
    .build = build,
};

quern_status quern_dsv4_append_step_workspace(quern_context *ctx, const quern_dsv4_compress_params *given,
                                              const quern_dsv4_append_tensors *of, size_t *bytes)
{
    step_call call;
    return op_workspace_of(&call.head, &dsv4_append_step_family, 0, ctx, given, of, bytes);
}

quern_status quern_dsv4_append_step(quern_context *ctx, const quern_exec *exec,
                                    const quern_dsv4_compress_params *given,
                                    const quern_dsv4_append_tensors *of, void *workspace,
                                    size_t workspace_bytes)
{
    step_call call;
    return op_run(&call.head, &dsv4_append_step_family, 0, ctx, exec, given, of, workspace, workspace_bytes);
}
