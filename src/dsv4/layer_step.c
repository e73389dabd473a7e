/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * layer_step.c - a step of the layer:
 *
 *   copy_pages                       pages and states that several sequences hold
 *   step_tokens, step_places         which sequences run, where their tokens stand, where new rows go
 *   copy_rows                        old raw rows, so that each sequence's stand side by side
 *   gemm, norm_rope                  projections of x; queries and raw rows
 *   pool_append                      entries and keys
 *   step_check                       sequences of which a row is not finite stop
 *   store_rows                       raw rows, entries and keys
 *   indexer, attend_mqa              the choice, the core
 *   copy_rows                        the last raw rows to their rings
 *   gemm                             output projections, with rows of 0 for tokens of no sequence that runs
 *
 * Each stage takes all sequences. Formats of bytes may refuse a row: then copies of the states are changed,
 * which replace them last. Where stages run beside each other, the choice waits longest: what it needs stands
 * before what the core alone needs, and nothing waits for rows of the step but what reads them.
 */
#include "core/error.h"
#include "core/view.h"
#include "dsv4/call.h"
#include "dsv4/layer.h"

/* What step_tokens and step_places write, in the workspace. */
typedef struct step_rooms {
    stage_step step;                    /* of the sequences that run */
    quern_tensor cu, starts;            /* i32 [B + 1], [B] */
    quern_tensor pages_of, raw_of;      /* i32 [B, columns], [B] */
    quern_tensor at;                    /* i32 [T] */
    quern_tensor own, copied, returned; /* of states that are copied; else absent */
    stage_step live;                    /* `step` without the sequences that have stopped since */
    quern_tensor cu_raw, raw_slots, entry_slots, first_entry, old, kept;
    int32_t chosen; /* the step that chooses entries; -1: there is none */
} step_rooms;

/* Tokens of an entry; 0: there are none. */
static int64_t ratio_of(const op_build *b)
{
    return b->call->symbol[LS_R];
}

static int64_t ring_of(const op_build *b)
{
    return b->call->lead[LEAD_OF(LL_RAW)].extent[1];
}

/* Slots of a page of entries. */
static int64_t page_of(const op_build *b)
{
    return ratio_of(b) == 0 ? 1
                            : layer_page_of(&b->call->lead[LEAD_OF(LL_ENTRIES)], layer_params(b)->format,
                                            b->call->symbol[LS_D]);
}

/* Tokens that the states' rings hold. */
static int64_t held_of(const op_build *b)
{
    const int64_t *s = b->call->symbol;
    return ratio_of(b) == 0
               ? 0
               : dsv4_ring_of(layer_params(b)->kind == QUERN_DSV4_LAYER_CSA, s[LS_D], s[LS_FLOATS]);
}

/* Whether a row may be refused once states have changed. */
static bool may_refuse(const op_build *b)
{
    return ratio_of(b) > 0 &&
           (layer_params(b)->format != QUERN_DSV4_ROWS || layer_params(b)->key_format != QUERN_DSV4_ROWS);
}

static void add_copies(op_build *b)
{
    static const struct {
        int32_t tensor, pool;
    } pools[] = {{DLS(raw), QUERN_DSV4_RAW},
                 {DLS(entries), QUERN_DSV4_ENTRIES},
                 {DLS(keys), QUERN_DSV4_ENTRIES},
                 {DLS(states), QUERN_LEDGER_STATES},
                 {DLS(merged), QUERN_LEDGER_STATES},
                 {DLS(indexer_states), QUERN_LEDGER_STATES},
                 {DLS(indexer_merged), QUERN_LEDGER_STATES}};
    const quern_tensor copies = layer_view(b, DLS(copies));
    for (size_t i = 0; i < sizeof pools / sizeof *pools && copies.ndim > 0; i++) {
        const quern_tensor of = layer_view(b, pools[i].tensor);
        if (of.ndim > 0)
            *OP_ADD(b, copy_pages) = (copy_pages_args){pools[i].pool, copies, view_as_pages(&of)};
    }
}

/* Rows that the core reads. Those of bytes begin at multiples of 16: it copies as many at a time. */
static quern_tensor raw_rows(op_build *b, quern_dtype dtype, int64_t rows, int64_t columns)
{
    enum { AT_ONCE = 16 };
    const int64_t row = dtype == QUERN_U8 ? (columns + AT_ONCE - 1) / AT_ONCE * AT_ONCE : columns;
    const quern_tensor all = op_matrix(b, dtype, rows, row);
    return layer_columns(&all, 0, columns);
}

static quern_tensor runs(op_build *b, int64_t n)
{
    const int64_t shape[] = {n, 3};
    return op_room(b, QUERN_I64, 2, shape);
}

static void add_tokens(op_build *b, step_rooms *r)
{
    const int64_t *s = b->call->symbol, batch = s[LS_B], more = batch + 1, tokens = s[LS_T],
                  table[] = {batch, s[LS_COLUMNS]};
    const quern_tensor cu = layer_view(b, DLS(cu)), fault = layer_view(b, DLS(fault)),
                       states = layer_view(b, DLS(states));
    r->cu = op_room(b, QUERN_I32, 1, &more);
    quern_tensor *const vectors[] = {&r->step.slots, &r->step.positions, &r->starts, &r->raw_of, &r->own};
    for (int i = 0; i < (may_refuse(b) ? 5 : 4); i++) *vectors[i] = op_room(b, QUERN_I32, 1, &batch);
    r->at = op_room(b, QUERN_I32, 1, &tokens);
    if (ratio_of(b) > 0) r->pages_of = op_room(b, QUERN_I32, 2, table);
    if (may_refuse(b)) r->copied = runs(b, batch);
    r->step.rows = view_ranges(&r->cu);
    step_tokens_args *args = OP_ADD(b, step_tokens);
    *args = (step_tokens_args){
        .ratio = ratio_of(b),
        .page = page_of(b),
        .pages = b->call->lead[LEAD_OF(LL_ENTRIES)].extent[0],
        .ring = ring_of(b),
        .raw_pages = b->call->lead[LEAD_OF(LL_RAW)].extent[0],
        .rollback = held_of(b),
        .most = layer_step_room(b->call),
        .slot_count = states.ndim + fault.ndim > 0 ? s[LS_SLOTS] : INT32_MAX,
        .step = {layer_view(b, DLS(slots)), layer_view(b, DLS(positions)), view_ranges(&cu)},
        .merged = layer_view(b, DLS(merged)),
        .merged_index = layer_view(b, DLS(indexer_merged)),
        .raw_table = layer_view(b, DLS(raw_table)),
        .table = layer_view(b, DLS(entries_table)),
        .fault = fault,
        .cu = r->cu,
        .slots = r->step.slots,
        .positions = r->step.positions,
        .starts = r->starts,
        .pages_of = r->pages_of,
        .raw_of = r->raw_of,
        .at = r->at,
        .own = r->own,
        .copied = r->copied};
}

/* Behind the step of this number; -1: of none but those that it needs. */
static void copy_runs(op_build *b, const quern_tensor *which, const quern_tensor *x, const quern_tensor *out,
                      int32_t behind)
{
    *OP_ADD(b, copy_rows) = (copy_rows_args){.runs = *which, .pair = {{*x, *out}}};
    op_behind(b, behind);
}

/* A compressor: its states, or copies of them, and what the step makes. */
typedef struct compressor {
    int32_t states, first, made_for; /* tensors: its states, its first weight, what it makes rows for */
    quern_tensor sums, merged;       /* copies; absent where no row can be refused */
    quern_tensor made;               /* f32 [n, width]; absent where there is no such compressor */
} compressor;

/* A vector [slots] as a matrix. */
static quern_tensor as_rows(const quern_tensor *t)
{
    quern_tensor m = *t;
    m.ndim = 2;
    m.shape[1] = m.strides[1] = 1;
    return m;
}

/* The states' rows and numbers to their copies, or back behind the choice: by one step, so that they take the
 * time of one launch. */
static void move_states(op_build *b, const compressor parts[2], const step_rooms *r, bool back)
{
    copy_rows_args *args = OP_ADD(b, copy_rows);
    int n = 0;
    args->runs = back ? r->returned : r->copied;
    for (int i = 0; i < 2 && parts[i].sums.ndim > 0; i++) {
        const quern_tensor states = layer_view(b, parts[i].states),
                           numbers = layer_view(b, parts[i].states + 1),
                           of[][2] = {{states, parts[i].sums},
                                      {as_rows(&numbers), as_rows(&parts[i].merged)}};
        for (int k = 0; k < 2; k++, n++) {
            args->pair[n].x = of[k][back];
            args->pair[n].out = of[k][!back];
        }
    }
    op_behind(b, back ? r->chosen : -1);
}

/* Fills a compressor's part of the append. */
static void fill_part(op_build *b, const quern_tensor *proj, const compressor *c, pool_append_part *part)
{
    const quern_tensor bias = layer_view(b, c->first), states = layer_view(b, c->states);
    const bool copies = c->sums.ndim > 0;
    part->width = c->made.shape[1];
    part->merged = copies ? c->merged : layer_view(b, c->states + 1);
    part->state = copies ? c->sums : states;
    part->proj = *proj;
    part->entry = layer_entry(b, c->first);
    part->out = c->made;
    layer_biases(&bias, part->width, &part->bias_a, &part->bias_b);
}

/* Appends the tokens to the compressors' states: to both, to the first, or where there is none to none. */
static void append(op_build *b, const step_rooms *r, const layer_parts *parts, compressor c[2])
{
    const quern_tensor *const proj[] = {&parts->main, &parts->index};
    const int64_t *s = b->call->symbol, widths[] = {s[LS_D], s[LS_CI]};
    for (int i = 0; i < 2 && proj[i]->ndim > 0; i++) {
        const quern_tensor states = layer_view(b, c[i].states);
        c[i].made = op_matrix(b, QUERN_F32, layer_step_entries(b->call), widths[i]);
        if (!may_refuse(b)) continue;
        c[i].sums = op_matrix(b, QUERN_F32, s[LS_B], states.shape[1]);
        c[i].merged = op_room(b, QUERN_I32, 1, &s[LS_B]);
    }
    if (proj[0]->ndim == 0) return;
    if (may_refuse(b)) move_states(b, c, r, false);
    pool_append_args *args = OP_ADD(b, pool_append);
    args->ratio = s[LS_R];
    args->ring = held_of(b);
    args->overlap = layer_params(b)->kind == QUERN_DSV4_LAYER_CSA;
    args->step = r->step;
    if (may_refuse(b)) args->step.slots = r->own;
    for (int i = 0; i < 2 && proj[i]->ndim > 0; i++) fill_part(b, proj[i], &c[i], &args->part[i]);
}

static void add_places(op_build *b, step_rooms *r)
{
    const int64_t *s = b->call->symbol, batch = s[LS_B], more = batch + 1;
    const int64_t entries = layer_step_entries(b->call);
    r->live = r->step;
    r->live.slots = op_room(b, QUERN_I32, 1, &batch);
    r->cu_raw = op_room(b, QUERN_I32, 1, &more);
    r->raw_slots = op_room(b, QUERN_I64, 1, &s[LS_T]);
    if (ratio_of(b) > 0) {
        r->entry_slots = op_room(b, QUERN_I64, 1, &entries);
        r->first_entry = op_room(b, QUERN_I32, 1, &batch);
    }
    r->old = runs(b, 2 * batch);
    r->kept = runs(b, 2 * batch);
    if (may_refuse(b)) r->returned = runs(b, batch);
    step_places_args *args = OP_ADD(b, step_places);
    *args = (step_places_args){.ratio = ratio_of(b),
                               .page = page_of(b),
                               .ring = ring_of(b),
                               .window = layer_params(b)->window,
                               .step = r->step,
                               .raw_of = r->raw_of,
                               .pages_of = r->pages_of,
                               .slots = r->live.slots,
                               .cu_raw = r->cu_raw,
                               .raw_slots = r->raw_slots,
                               .entry_slots = r->entry_slots,
                               .first_entry = r->first_entry,
                               .old = r->old,
                               .kept = r->kept,
                               .returned = r->returned};
}

/* Stops sequences whose rows formats of bytes would refuse, if the caller has a tensor for their faults. */
static void add_check(op_build *b, const step_rooms *r, const quern_tensor *kv, const compressor *main,
                      const compressor *index)
{
    const quern_tensor fault = layer_view(b, DLS(fault)), none = {0};
    const bool rows = layer_params(b)->format != QUERN_DSV4_ROWS,
               keys = layer_params(b)->key_format != QUERN_DSV4_ROWS;
    if (fault.ndim == 0 || (!rows && !keys)) return;
    step_check_args *args = OP_ADD(b, step_check);
    *args = (step_check_args){.ratio = ratio_of(b),
                              .step = r->step,
                              .first_entry = r->first_entry,
                              .rows = rows ? *kv : none,
                              .entries = rows ? main->made : none,
                              .keys = keys ? index->made : none,
                              .fault = fault,
                              .slots = r->live.slots,
                              .raw_slots = r->raw_slots,
                              .entry_slots = r->entry_slots,
                              .kept = r->kept,
                              .returned = r->returned};
}

/* Stores f32 rows, made for a tensor of the call. page 0: `to` has no pages. */
static void store(op_build *b, quern_dsv4_format format, int32_t made_for, const quern_tensor *rows,
                  const quern_tensor *slots, int64_t page, const quern_tensor *to)
{
    if (rows->ndim == 0) return;
    *OP_ADD(b, store_rows) = (store_rows_args){
        .format = dsv4_entry_format(format), .page = page, .x = *rows, .slots = *slots, .cache = *to};
    op_made_for(b, made_for);
}

/* Clears rows of a result, or of `core`, that belong to no sequence that runs. */
static void clear(op_build *b, const step_rooms *r, const quern_tensor *t, int64_t ratio)
{
    if (t->ndim > 0) /* [rows, C] or [rows, heads, C] */
        *OP_ADD(b, clear_rows) = (clear_rows_args){.ratio = ratio, .step = r->live, .out = view_as_pages(t)};
}

/* Percent of the device for q's product, which the core alone needs, beside all from the indexer's product to
 * the choice, which takes the others: small steps would wait behind what so large a weight reads at once. Of
 * few tokens the scores are soon there: the product begins once the step's rows are stored, on all. */
static int32_t q_percent(const op_build *b)
{
    enum { FEW_TOKENS = 16, PERCENT = 20 };
    return layer_params(b)->kind == QUERN_DSV4_LAYER_CSA && b->call->symbol[LS_T] > FEW_TOKENS ? PERCENT : 0;
}

/* The choice of entries, idx [T, k] and count [T, 1]. */
static void choose(op_build *b, step_rooms *r, const layer_parts *parts, quern_tensor *idx,
                   quern_tensor *count)
{
    const int64_t tokens = parts->x.shape[0];
    const quern_tensor q = op_matrix(b, parts->x.dtype, tokens, b->call->symbol[LS_HICI]),
                       q_by_head = layer_heads(&q, 1, b->call->symbol[LS_HI]),
                       keys = layer_view(b, DLS(keys)), scores = layer_view(b, DL(idx_score));
    *idx = op_matrix(b, QUERN_I32, tokens, b->call->symbol[LS_K]);
    *count = op_matrix(b, QUERN_I32, tokens, 1);
    layer_rotate(b, &parts->index_q_in, &q, 1, b->call->symbol[LS_HI], &r->at, false, OP_NONE);
    indexer_args *args = layer_choose(b, &q, &keys, &parts->heads, idx, count, 1);
    if (q_percent(b) > 0) op_percent(b, 100 - q_percent(b));
    r->chosen = op_number(b);
    args->format = dsv4_entry_format(layer_params(b)->key_format);
    args->page = page_of(b);
    args->table = r->pages_of;
    args->cu = r->cu;
    args->positions = r->starts;
    if (scores.ndim > 0) args->scores = view_with_batch(&scores);
    op_give(b, DL(idx_q), &q_by_head);
    op_give(b, DL(idx_topk), idx);
}

/* The core to [T, H D]. */
static quern_tensor attend(op_build *b, step_rooms *r, layer_parts *parts, const quern_tensor *raw)
{
    const quern_tensor kv = view_with_batch(raw), unrotated = layer_view(b, DL(core)),
                       entries = layer_view(b, DLS(entries));
    const int64_t tokens = parts->x.shape[0], *s = b->call->symbol;
    layer_states states = {.batch = 1, .sinks = parts->sinks};
    quern_tensor to = {0};
    if (q_percent(b) == 0) {
        layer_project_q(b, parts);
        if (parts->index.ndim > 0) op_after_all(b);
    }
    if (parts->index.ndim > 0) choose(b, r, parts, &states.idx, &states.count);
    states.q = op_matrix(b, parts->x.dtype, tokens, s[LS_HD]);
    states.core = op_matrix(b, parts->x.dtype, tokens, s[LS_HD]);
    layer_rotate(b, &parts->q_in, &states.q, 1, s[LS_H], &r->at, true, OP_NONE);
    layer_give_q(b, &states.q, 1);
    if (unrotated.ndim > 0) to = view_with_batch(&unrotated);
    attend_mqa_args args = layer_core(b, &states, &kv, &entries);
    args.format = dsv4_entry_format(layer_params(b)->format);
    args.positions = r->starts;
    args.seqs.batch = s[LS_B];
    args.seqs.cu_q = r->cu;
    args.seqs.cu_kv = r->cu_raw;
    if (entries.ndim > 0) {
        args.page = page_of(b);
        args.entries_table = r->pages_of;
    }
    layer_attend(b, &args, &r->at, &to);
    return states.core;
}

/* Converts f32 rows, as many as it has room for, to a result of the call, if it has that result. */
static void give_rows(op_build *b, int32_t tensor, const quern_tensor *rows)
{
    const quern_tensor to = layer_view(b, tensor), out = layer_heads(&to, 1, 1);
    if (to.ndim == 0 || rows->ndim == 0) return;
    const quern_tensor given = layer_rows(rows, 0, to.shape[0]), in = layer_heads(&given, 1, 1);
    layer_change(b, &in, &out);
}

/* Results with a row a token, or an entry, but for `out`, whose product writes its zeros. A row depends on
 * its token alone, so zeros for tokens of no sequence stand behind all that reads the rows. */
static void clear_results(op_build *b, const step_rooms *r)
{
    static const int32_t by_token[] = {DL(q_residual), DL(kv_rows), DL(idx_q),      DL(idx_score),
                                       DL(idx_topk),   DL(core),    DL(core_irope), DL(o_a_out)};
    static const int32_t by_entry[] = {DL(compressed), DL(idx_k)};
    const quern_tensor q = layer_view(b, DL(q));
    quern_tensor by_row = q;
    for (size_t i = 0; i < sizeof by_token / sizeof *by_token; i++) {
        const quern_tensor t = layer_view(b, by_token[i]);
        clear(b, r, &t, 0);
    }
    for (int i = 0; i < 2; i++) {
        const quern_tensor t = layer_view(b, by_entry[i]);
        clear(b, r, &t, ratio_of(b));
    }
    if (q.ndim == 0) return;
    for (int i = 0; i < 2; i++) { /* [H, T, D] */
        by_row.shape[i] = q.shape[1 - i];
        by_row.strides[i] = q.strides[1 - i];
    }
    clear(b, r, &by_row, 0);
}

/* Stores the step's rows. On a CPU the first that is refused is named: a token's raw row before what is made
 * of it. On a GPU keys stand first, which the choice waits for. */
static void store_all(op_build *b, const step_rooms *r, const quern_tensor *kv, const quern_tensor *raw,
                      const compressor parts[2])
{
    const quern_dsv4_layer_step_params *p = layer_params(b);
    const quern_tensor entries = layer_view(b, DLS(entries)), keys = layer_view(b, DLS(keys));
    const bool first = b->program->beside;
    if (first) store(b, p->key_format, DL(idx_k), &parts[1].made, &r->entry_slots, page_of(b), &keys);
    store(b, p->format, DL(kv_rows), kv, &r->raw_slots, 0, raw);
    store(b, p->format, DL(compressed), &parts[0].made, &r->entry_slots, page_of(b), &entries);
    if (!first) store(b, p->key_format, DL(idx_k), &parts[1].made, &r->entry_slots, page_of(b), &keys);
}

/* The last steps, which write what the step's rows are read from: behind the choice, as nobody waits for them
 * but they would hold up what it needs. */
static void keep(op_build *b, const step_rooms *r, const quern_tensor *raw, const quern_tensor *rings,
                 const compressor *parts)
{
    copy_runs(b, &r->kept, raw, rings, r->chosen);
    if (parts[0].sums.ndim > 0) move_states(b, parts, r, true);
}

void layer_step_build(op_build *b)
{
    const int64_t *s = b->call->symbol, *extent = b->call->lead[LEAD_OF(LL_RAW)].extent,
                  window =
                      layer_params(b)->window - 1 < ring_of(b) ? layer_params(b)->window - 1 : ring_of(b);
    compressor parts_of[] = {{.states = DLS(states), .first = DL(compressor_bias)},
                             {.states = DLS(indexer_states), .first = DL(indexer_bias)}};
    step_rooms r = {.chosen = -1};
    if (s[LS_T] <= LAYER_TOKENS_BESIDE) (void)op_beside(b);
    add_copies(b);
    add_tokens(b, &r);
    add_places(b, &r);
    const quern_tensor pool = layer_view(b, DLS(raw)),
                       raw = raw_rows(b, pool.dtype, s[LS_T] + s[LS_B] * window, extent[2]);
    quern_tensor rings = pool; /* [pages R, row] */
    rings.ndim = 2;
    rings.shape[0] = pool.shape[0] * pool.shape[1];
    rings.shape[1] = pool.shape[2];
    rings.strides[0] = pool.strides[1];
    rings.strides[1] = 1;
    copy_runs(b, &r.old, &rings, &raw, -1);
    layer_parts parts = layer_project(b);
    const quern_tensor kv = op_matrix(b, QUERN_F32, s[LS_T], s[LS_D]);
    append(b, &r, &parts, parts_of);
    layer_rotate(b, &parts.kv_in, &kv, 1, 1, &r.at, true, DL(kv_norm));
    layer_project_index(b, &parts);
    if (q_percent(b) > 0) {
        const int32_t index = op_number(b);
        layer_project_q(b, &parts);
        op_behind(b, index);
        op_percent(b, q_percent(b));
    }
    add_check(b, &r, &kv, &parts_of[0], &parts_of[1]);
    store_all(b, &r, &kv, &raw, parts_of);
    const quern_tensor core = attend(b, &r, &parts, &raw), o_a_out = layer_project_groups(b, &core),
                       out = layer_view(b, DL(out));
    const quern_tensor by_head = layer_heads(&core, 1, s[LS_H]), groups = layer_heads(&o_a_out, 1, s[LS_G]);
    op_give(b, DL(q_residual), &parts.residual);
    give_rows(b, DL(kv_rows), &kv);
    give_rows(b, DL(compressed), &parts_of[0].made);
    give_rows(b, DL(idx_k), &parts_of[1].made);
    op_give(b, DL(core_irope), &by_head);
    op_give(b, DL(o_a_out), &groups);
    clear_results(b, &r);
    keep(b, &r, &raw, &rings, parts_of);
    if (!layer_project_out(b, &o_a_out, &r.raw_slots)) clear(b, &r, &out, 0);
}

quern_status quern_dsv4_layer_step_workspace(quern_context *ctx, const quern_dsv4_layer_step_params *given,
                                             const quern_dsv4_layer_step_tensors *of, size_t *bytes)
{
    return op_workspace_of(&dsv4_layer_step_family, 0, ctx, given, of, bytes);
}

quern_status quern_dsv4_layer_step(quern_context *ctx, const quern_exec *exec,
                                   const quern_dsv4_layer_step_params *given,
                                   const quern_dsv4_layer_step_tensors *of, void *workspace,
                                   size_t workspace_bytes)
{
    return op_run(&dsv4_layer_step_family, 0, ctx, exec, given, of, workspace, workspace_bytes);
}
