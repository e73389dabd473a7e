/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * append_step.c - a step's tokens into states that stand in slots of tensors, of the main compressor and of
 * the indexer's:
 *
 *   copy_pages of the states  ->  [steps of weights.c, gemm: x w -> proj]  ->  pool_append
 */
#include "cache/step.h"
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"

#include <inttypes.h>

typedef struct step_call {
    op_call head;
    quern_dsv4_compress_params params;
    dsv4_weight_given weights[POOL_PARTS]; /* the compressor's, the indexer's */
    _Alignas(op_step) char program[POOL_PARTS * (DSV4_WEIGHT_BYTES + OP_STEP_BYTES(gemm) +
                                                 2 * OP_STEP_BYTES(copy_pages)) +
                                   OP_STEP_BYTES(pool_append)];
} step_call;

#define PARAMS(call) ((quern_dsv4_compress_params *)op_params(call))

static quern_tensor view(const op_build *b, int32_t tensor)
{
    return op_view(b->call, tensor, false);
}

/* The tensors and extents of a compressor that the other has too. */
typedef struct part_names {
    int32_t b_a, b_b, norm_weight, out, pooled, states, merged, table;
    dsv4_symbol width, row, floats, columns;
} part_names;
static const part_names names[POOL_PARTS] = {
    {DP(b_a), DP(b_b), DP(norm_weight), DP(out), DP(pooled), DP(states), DP(merged), DP(table), DS_C, DS_ROW,
     DS_FLOATS, DS_TABLE},
    {DP(index_b_a), DP(index_b_b), DP(index_norm_weight), DP(index_out), DP(index_pooled), DP(index_states),
     DP(index_merged), DP(index_table), DS_CI, DS_IROW, DS_IFLOATS, DS_ITABLE},
};
enum { MAIN, INDEX };

static bool has_index(const op_call *call)
{
    return op_uses(call, DP(index_b_a));
}

static quern_dsv4_format format_of(const op_call *call, int part)
{
    return part == INDEX ? PARAMS(call)->index_format : PARAMS(call)->format;
}

static quern_status check_params(op_call *call)
{
    quern_dsv4_compress_params *p = &((step_call *)call)->params;
    p->start_abs_pos = p->start_token = p->n_blocks = 0;
    return dsv4_resolve(p);
}

static void roles(op_call *call)
{
    const quern_tensor *const *t = call->given;
    const bool csa = PARAMS(call)->kind == QUERN_DSV4_CSA, both = csa && t[DP(index_b_a)] != NULL,
               project = t[DP(x)] != NULL;
    uint8_t *r = call->role;
    for (int i = 0; i < DSV4_APPEND_TENSORS; i++) r[i] = OP_REFUSED;
    r[DP(proj)] = project ? OP_REFUSED : OP_NEEDED;
    if (!project) op_reason(call, DP(proj), ": proj, or x and w, are needed");
    r[DP(x)] = r[DP(norm_weight)] = r[DP(cos_sin)] = OP_OPTIONAL;
    r[DP(b_a)] = OP_NEEDED;
    if (csa) r[DP(b_b)] = OP_NEEDED;
    r[DP(out)] = OP_RESULT;
    r[DP(pooled)] = OP_OPTIONAL_RESULT;
    r[DP(slots)] = r[DP(positions)] = r[DP(cu)] = OP_NEEDED;
    r[DP(states)] = r[DP(merged)] = OP_UPDATED;
    r[DP(copies)] = r[DP(table)] = OP_OPTIONAL;
    if (t[DP(table)] != NULL) r[DP(out)] = OP_UPDATED;
    r[DP(fault)] = t[DP(fault)] != NULL ? OP_UPDATED : OP_OPTIONAL;
    dsv4_weight_roles(call, &dsv4_append_weights[MAIN], project);
    dsv4_weight_roles(call, &dsv4_append_weights[INDEX], both && project);
    if (csa) r[DP(index_b_a)] = OP_OPTIONAL;
    if (!both) return;
    r[DP(index_proj)] = project ? OP_REFUSED : OP_NEEDED;
    r[DP(index_b_b)] = OP_NEEDED;
    r[DP(index_norm_weight)] = r[DP(index_table)] = OP_OPTIONAL;
    r[DP(index_out)] = t[DP(index_table)] != NULL ? OP_UPDATED : OP_RESULT;
    r[DP(index_pooled)] = OP_OPTIONAL_RESULT;
    r[DP(index_states)] = r[DP(index_merged)] = OP_UPDATED;
}

static const char *refuse(const op_call *call, int32_t tensor, char text[OP_REASON])
{
    const bool main = tensor < DP(index_proj);
    if (tensor == DP(b_b)) return ": HCA has no series b";
    if (!main && PARAMS(call)->kind != QUERN_DSV4_CSA) return ": HCA has no indexer";
    if (!main && call->given[DP(index_b_a)] == NULL) return ": it stands beside index_b_a";
    if (tensor == DP(index_proj)) return ": it stands beside proj";
    if (tensor != DP(proj) && call->given[DP(x)] != NULL)
        return dsv4_weight_refuse(call, &dsv4_append_weights[main ? MAIN : INDEX], tensor, text);
    return main ? ": proj alone, or x and a weight are accepted" : ": it stands beside x";
}

/* Rows of the states' rings, from the floats of a state. */
static int64_t ring_of(const op_call *call)
{
    const int64_t *s = call->symbol;
    return dsv4_ring_of(PARAMS(call)->kind == QUERN_DSV4_CSA, s[DS_C], s[DS_FLOATS]);
}

/* The extents of a compressor's entries: rows, or with a table pages, whose slots are a number that
 * follows. */
static quern_status derive_out(op_call *call, int part)
{
    const part_names *of = &names[part];
    const quern_dsv4_format format = format_of(call, part);
    const int64_t width = call->symbol[of->width], row = dsv4_row_elements(format, width);
    const quern_tensor *out = call->given[of->out];
    op_extents *lead = &call->lead[part];
    *lead = (op_extents){1, {call->symbol[DS_N]}};
    call->symbol[of->row] = row;
    if (!op_uses(call, of->table)) return QUERN_OK;
    const int32_t ndim = format == QUERN_DSV4_ROWS ? 3 : 2;
    const char *field = dsv4_append_rows[of->out].field;
    if (out == NULL) return error_argument("%s is NULL: a tensor is needed", field);
    if (out->ndim != ndim)
        return error_argument("%s has %d dimensions: with a table %d are accepted", field, out->ndim, ndim);
    lead->count = ndim - 1;
    lead->extent[0] = out->shape[0];
    lead->extent[1] = out->shape[1];
    if (ndim == 2) call->symbol[of->row] = out->shape[1];
    if (out->shape[1] < 1 || (ndim == 2 && out->shape[1] % row != 0))
        return error_argument("%s has pages of %" PRId64 " %s: with a table 1 or more slots of %" PRId64
                              " are accepted",
                              field, out->shape[1], ndim == 2 ? "bytes" : "slots", row);
    return QUERN_OK;
}

static int64_t page_of(const op_call *call, int part)
{
    const part_names *of = &names[part];
    if (!op_uses(call, of->table)) return 0;
    const int64_t slots = call->given[of->out]->shape[1];
    const quern_dsv4_format format = format_of(call, part);
    return format == QUERN_DSV4_ROWS ? slots : slots / dsv4_row_elements(format, call->symbol[of->width]);
}

static quern_status derive_index(op_call *call, int64_t ring)
{
    int64_t *s = call->symbol;
    if (!has_index(call)) return QUERN_OK;
    const quern_dsv4_compress_params own = {.hadamard = PARAMS(call)->index_hadamard,
                                            .format = PARAMS(call)->index_format};
    s[DS_ICOLUMNS] = pool_row_columns(true, s[DS_CI]);
    s[DS_IFLOATS] = pool_state_floats(true, s[DS_CI], ring);
    call->stored_2 = own.format == QUERN_DSV4_ROWS ? call->like.dtype : QUERN_U8;
    quern_status status = dsv4_check_width(&own, s[DS_CI], s[DS_ROPE]);
    if (status == QUERN_OK) status = dsv4_weight_check(call, &dsv4_append_weights[INDEX], s[DS_IN]);
    if (status == QUERN_OK) status = derive_out(call, INDEX);
    return status == QUERN_OK && op_uses(call, DP(index_out))
               ? dsv4_check_stored(call, DP(index_out), own.format)
               : status;
}

static quern_status derive(op_call *call)
{
    int64_t *s = call->symbol;
    quern_status status = dsv4_append_derive(call, PARAMS(call), s[DS_C]);
    if (status != QUERN_OK) return status;
    s[DS_T] = call->like.shape[0];
    if (s[DS_T] > INT32_MAX || s[DS_B] > INT32_MAX)
        return error_argument("%" PRId64 " tokens of %" PRId64 " sequences: up to %d are accepted", s[DS_T],
                              s[DS_B], INT32_MAX);
    s[DS_B1] = s[DS_B] + 1;
    s[DS_N] = s[DS_T] / s[DS_R] + s[DS_B];
    const int64_t ring = ring_of(call);
    s[DS_FLOATS] = pool_state_floats(PARAMS(call)->kind == QUERN_DSV4_CSA, s[DS_C], ring);
    s[DS_COPY] = 3;
    status = derive_out(call, MAIN);
    return status == QUERN_OK ? derive_index(call, ring) : status;
}

static void copy_states(op_build *b, const quern_tensor *copies, const quern_tensor *states)
{
    *OP_ADD(b, copy_pages) = (copy_pages_args){QUERN_LEDGER_STATES, *copies, view_as_pages(states)};
}

static void build_part(op_build *b, int part, const quern_tensor *proj, pool_append_part *to)
{
    const op_call *call = b->call;
    const part_names *of = &names[part];
    quern_dsv4_compress_params p = *PARAMS(call);
    if (part == INDEX) {
        p.format = p.index_format;
        p.hadamard = p.index_hadamard;
    }
    const quern_tensor norm = view(b, of->norm_weight), angles = view(b, DP(cos_sin));
    to->width = call->symbol[of->width];
    to->merged = view(b, of->merged);
    to->state = view(b, of->states);
    to->proj = *proj;
    to->bias_a = view(b, of->b_a);
    to->bias_b = view(b, of->b_b);
    to->entry = dsv4_entry(&p, &norm, &angles);
    to->out = view(b, of->out);
    to->pooled = view(b, of->pooled);
    to->table = view(b, of->table);
    to->page = page_of(call, part);
}

static void build(op_build *b)
{
    step_call *c = (step_call *)b->call;
    const quern_tensor copies = view(b, DP(copies)), cu = view(b, DP(cu));
    const int parts = has_index(b->call) ? POOL_PARTS : 1;
    quern_tensor proj[POOL_PARTS];
    for (int i = 0; i < parts && copies.ndim > 0; i++) {
        const quern_tensor states = view(b, names[i].states), merged = view(b, names[i].merged);
        copy_states(b, &copies, &states);
        copy_states(b, &copies, &merged);
    }
    for (int i = 0; i < parts; i++) proj[i] = dsv4_append_projection(b, i == INDEX, &c->weights[i]);
    pool_append_args *args = OP_ADD(b, pool_append);
    args->ratio = c->params.ratio;
    args->ring = ring_of(b->call);
    args->overlap = c->params.kind == QUERN_DSV4_CSA;
    args->step = (stage_step){view(b, DP(slots)), view(b, DP(positions)), view_ranges(&cu)};
    args->fault = view(b, DP(fault));
    for (int i = 0; i < parts; i++) build_part(b, i, &proj[i], &args->part[i]);
}

/* ---- data ---- */

static int32_t number(const quern_tensor *t, const void *data, int64_t i)
{
    return ((const int32_t *)data)[i * t->strides[0]];
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

/* What a compressor has of sequence b, whose tokens are at ... end - 1. */
static quern_status check_part(const op_call *call, void *const *data, const pool_append_args *args, int part,
                               int64_t b, int32_t slot, int64_t at, int64_t end)
{
    const pool_append_part *own = &args->part[part];
    const part_names *of = &names[part];
    const int64_t r = args->ratio, whole = end / r, before = at / r,
                  last = (whole - 1) * r + (own->entry.rope_last ? r - 1 : 0), positions = call->symbol[DS_P];
    if (own->entry.cos_sin.ndim > 0 && whole > before && last >= positions)
        return error_argument("sequence %" PRId64 " of the call comes to an entry at position %" PRId64
                              ": cos_sin has positions 0 to %" PRId64,
                              b, last, positions - 1);
    if (own->table.ndim > 0 && whole > before) {
        const quern_status status =
            dsv4_check_pages(&dsv4_append_rows[of->table], &own->table, data[of->table], b,
                             before / own->page, (whole - 1) / own->page + 1, own->out.shape[0]);
        if (status != QUERN_OK) return status;
    }
    if (at == 0) return QUERN_OK;
    const int64_t merged = number(&own->merged, data[of->merged], source_of(call, data, slot));
    if (at >= merged && at - merged <= args->ring && merged >= 0) return QUERN_OK;
    return error_argument("positions[%" PRId64 "] is %" PRId64 " and the state's sums have %" PRId64
                          " rows: as many, or up to %" PRId64 " more are accepted",
                          b, at, merged, args->ring);
}

static quern_status check_sequence(const op_call *call, void *const *data, const pool_append_args *args,
                                   int64_t b)
{
    const int64_t *s = call->symbol;
    const int32_t *slots = data[DP(slots)], *cu = data[DP(cu)];
    const int32_t slot = number(&args->step.slots, slots, b);
    if (slot == -1) return QUERN_OK;
    if (slot < -1 || slot >= s[DS_SLOTS])
        return error_argument("slots[%" PRId64 "] is %d: -1 to %" PRId64 " is accepted", b, slot,
                              s[DS_SLOTS] - 1);
    const int64_t at = number(&args->step.positions, data[DP(positions)], b),
                  end = at + number(&args->step.rows, cu, b + 1) - number(&args->step.rows, cu, b);
    if (end == at) return QUERN_OK; /* forks share a slot until one of them has tokens */
    for (int64_t i = 0; i < b; i++)
        if (number(&args->step.slots, slots, i) == slot &&
            number(&args->step.rows, cu, i + 1) > number(&args->step.rows, cu, i))
            return error_argument("slots[%" PRId64 "] and slots[%" PRId64
                                  "] are %d: a slot is accepted once where there are tokens",
                                  i, b, slot);
    if (end > INT32_MAX)
        return error_argument("sequence %" PRId64 " of the call comes to %" PRId64
                              " tokens: up to %d are accepted",
                              b, end, INT32_MAX);
    for (int part = 0; part < POOL_PARTS; part++) {
        const quern_status status =
            args->part[part].width > 0 ? check_part(call, data, args, part, b, slot, at, end) : QUERN_OK;
        if (status != QUERN_OK) return status;
    }
    return QUERN_OK;
}

static quern_status check_data(const op_call *call, void *const *data)
{
    const pool_append_args *args = OP_FIND(call, pool_append);
    const step_call *c = (const step_call *)call;
    quern_status status = QUERN_OK;
    for (int i = 0; i < POOL_PARTS && status == QUERN_OK; i++)
        if (args->part[i].width > 0)
            status = dsv4_weight_check_data(call, &dsv4_append_weights[i], &c->weights[i], data);
    const copy_pages_args *copies = OP_FIND(call, copy_pages);
    if (status == QUERN_OK && copies != NULL) status = step_check_copies(copies, data[DP(copies)]);
    if (args->fault.ndim > 0) return status; /* faults of sequences are no errors */
    if (status == QUERN_OK)
        status = step_check_numbers(&args->step, data[DP(cu)], data[DP(positions)], call->symbol[DS_B],
                                    call->symbol[DS_T]);
    for (int64_t b = 0; b < call->symbol[DS_B] && status == QUERN_OK; b++)
        status = check_sequence(call, data, args, b);
    return status;
}

static const int8_t like[] = {DP(x), DP(proj), OP_NONE};
static const char *const operations[] = {"dsv4_append_step"};
static const op_entry ops[] = {
    {.name = "v4-append-step",
     .help =
         "a step's tokens into the states of DeepSeek-V4's compressors, and the entries that become whole"},
};
const op_family dsv4_append_step_family = {
    OP_TABLES_WITH(operations, dsv4_compress_param_rows, DSV4_APPEND_PARAMS, dsv4_compress_symbols, ops),
    OP_ROWS(dsv4_append_rows, quern_dsv4_append_tensors, QUERN_DSV4_APPEND_TENSORS_INIT),
    OP_OWN_CALL(step_call, QUERN_DSV4_COMPRESS_PARAMS_INIT),
    .first = QUERN_OP_DSV4_APPEND_STEP,
    .like = like,
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
    return op_workspace_of(&dsv4_append_step_family, 0, ctx, given, of, bytes);
}

quern_status quern_dsv4_append_step(quern_context *ctx, const quern_exec *exec,
                                    const quern_dsv4_compress_params *given,
                                    const quern_dsv4_append_tensors *of, void *workspace,
                                    size_t workspace_bytes)
{
    return op_run(&dsv4_append_step_family, 0, ctx, exec, given, of, workspace, workspace_bytes);
}
