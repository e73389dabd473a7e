/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_pack.c - the plan of an attention call, and its keys and values packed into panels, once per
 * key/value head. Packing reads and writes each once: 1 to 3% of a causal call's time. */
#include "core/parallel.h"
#include "cpu/check_data.h"
#include "cpu/kernels/attend/attend.h"
#include "cpu/kernels/attend/nonfinite.h"
#include "cpu/rows_at.h"
#include "cpu/levels.h"

enum { PACK_ROWS = 256 };

attend_plan attend_plan_of(const stage_exec *exec, const attend_args *args)
{
    attend_plan p = {.args = args, .kernels = cpu_kernels_for(exec->cpu_level)->attention};
    p.bf16 = args->q.dtype == QUERN_BF16 && p.kernels->mm_bf16 != NULL;
    const bool none = args->seqs.n_q == 0 || (args->seqs.cu_q.ndim == 0 && args->seqs.batch == 0);
    p.heads = none ? 0 : (int32_t)args->q.shape[2]; /* any number where there are no queries */
    p.kv_heads = none ? 0 : (int32_t)args->k.shape[2];
    p.group = p.kv_heads > 0 ? p.heads / p.kv_heads : 1;
    const bool by_head = args->list.ndim > 0 && args->scope == LIST_BY_HEAD;
    p.hs = by_head ? 1 : p.group;
    p.units = by_head ? p.heads : p.kv_heads;
    p.dim_k = (int32_t)args->q.shape[3];
    p.dim_v = (int32_t)args->v.shape[3];
    p.key_words = p.bf16 ? p.dim_k / 2 : p.dim_k;
    p.value_width = round_up(p.dim_v, 16);
    p.value_panel = attend_row_panel(&p, p.dim_v);
    p.sequences = args->seqs.batch;
    p.packed_rows = args->seqs.cu_q.ndim == 0
                        ? args->seqs.batch * round_up(args->seqs.n_kv, KEY_ALIGN)
                        : round_up(args->seqs.n_kv, KEY_ALIGN) + KEY_ALIGN * args->seqs.batch;
    p.list_block = args->mask == ATTEND_COMPRESSED ? STAGE_GROUP_ENTRIES : args->block_size;
    p.scale2 = args->scale * log2_e;
    return p;
}

attend_sequence attend_sequence_at(const attend_plan *plan, int64_t b)
{
    const stage_seqs *s = &plan->args->seqs;
    if (s->cu_q.data == NULL) {
        const int32_t *first = plan->args->kv_first.data, *count = plan->args->kv_count.data;
        const int64_t from = first != NULL ? first[b] : 0, end = count != NULL ? count[b] : s->n_kv;
        return (attend_sequence){b, 0, s->n_q, from, end - from, b * round_up(s->n_kv, KEY_ALIGN), 0};
    }
    const int32_t *cq = s->cu_q.data, *ck = s->cu_kv.data != NULL ? s->cu_kv.data : cq;
    const int64_t list_row = attend_list_length(plan) > 0 ? first_list_row(s, plan->args->tile, b) : 0;
    return (attend_sequence){0,
                             cq[b],
                             cq[b + 1] - cq[b],
                             ck[b],
                             ck[b + 1] - ck[b],
                             round_up(ck[b], KEY_ALIGN) + KEY_ALIGN * b,
                             list_row};
}

/* 0 <= kv_first <= kv_count <= keys, of every sequence. */
static quern_status check_key_ranges(const stage_exec *exec, const attend_args *args)
{
    const bool given = is_present(&args->kv_first) || is_present(&args->kv_count);
    for (int64_t b = 0; given && b < args->seqs.batch; b++) {
        const int64_t end = i32_at(&args->kv_count, b, args->seqs.n_kv), from = i32_at(&args->kv_first, b, 0);
        const bool bad_end = end < 0 || end > args->seqs.n_kv;
        if (bad_end || from < 0 || from > end)
            return stage_report(exec, (stage_fault){.kind = QUERN_STATUS_BAD_POSITION,
                                                    .tensor = bad_end ? &args->kv_count : &args->kv_first,
                                                    .index = b,
                                                    .most = bad_end ? args->seqs.n_kv : end});
    }
    return QUERN_OK;
}

quern_status attend_check(const stage_exec *exec, const attend_args *args)
{
    return is_present(&args->seqs.cu_q) ? check_seqs(exec, &args->seqs) : check_key_ranges(exec, args);
}

void attend_interval(const attend_args *args, const attend_sequence *seq, int64_t query, int64_t *lo,
                     int64_t *hi)
{
    const key_mask mask = {args->mask,         args->causal,     args->visibility, args->window,
                           args->query_offset, args->block_size, args->stride};
    const key_range range = mask_keys(&mask, seq->nq, seq->nk, query);
    *lo = range.lo;
    *hi = range.hi;
}

int32_t attend_row_panel(const attend_plan *plan, int64_t dim)
{
    const int64_t width = round_up(dim, 16);
    return width < plan->kernels->panel ? (int32_t)width : plan->kernels->panel;
}

int64_t attend_row_panels(const attend_plan *plan, int64_t dim)
{
    return round_up(dim, attend_row_panel(plan, dim)) / attend_row_panel(plan, dim);
}

void attend_packed_carve(const attend_plan *plan, arena *a, attend_packed *packed)
{
    const size_t rows = (size_t)plan->packed_rows, heads = (size_t)plan->kv_heads;
    packed->keys = arena_take(a, heads * rows * (size_t)plan->key_words * 4);
    packed->values =
        arena_take(a, heads * rows * (size_t)(attend_row_panels(plan, plan->dim_v) * plan->value_panel) *
                          (plan->bf16 ? 2 : 4));
    packed->nonfinite = arena_take(a, heads * rows / KEY_ALIGN);
}

typedef struct pack_job {
    const attend_plan *plan;
    const attend_pack_target *targets;
    int32_t count;
    int64_t pieces; /* pieces of one (sequence, kv head), counted for the longest sequence */
} pack_job;

static const void *row_of(const row_source *src, int64_t row)
{
    return (const char *)src->data + row * src->stride * (int64_t)quern_dtype_size(src->dtype);
}

/* Packs KEY_ALIGN rows with keys along columns; rows past the sequence are zeros. */
static void pack_columns(const attend_plan *p, const attend_pack_target *t, const attend_sequence *seq,
                         int64_t head, int64_t row, int64_t rows)
{
    const attention_kernels *k = p->kernels;
    const int64_t words = p->bf16 ? t->tensor->shape[3] / 2 : t->tensor->shape[3];
    for (int64_t c = 0; c < KEY_ALIGN; c += k->panel) {
        const int64_t n = rows - c < 0 ? 0 : rows - c < k->panel ? rows - c : k->panel;
        const row_source src = rows_at(t->tensor, seq->view_b, seq->k0 + row + c, head, n);
        const int64_t at = (head * p->packed_rows + seq->packed0 + row + c) * words;
        if (p->bf16) k->pack_keys_bf16(&src, k->panel, (uint32_t *)t->columns + at);
        else k->pack_keys_f32(&src, k->panel, (float *)t->columns + at);
    }
}

static void pack_pairs(const attend_plan *p, const row_source *src, int32_t panel, uint32_t *dst,
                       int64_t stride)
{
    if (p->bf16) p->kernels->pack_values_bf16(src, panel, dst, stride);
    else p->kernels->pack_values_f32(src, panel, (float *)dst, stride);
}

/* Whether one of n rows (in bf16, pairs of rows) of the panels is nonfinite: a magnitude's exponent bits are
 * all set. Read here and not from the tensor, whose rows may lie pages apart, they come from L1 in order. */
static bool panels_nonfinite(const attend_plan *p, const uint32_t *panels, int64_t count, int64_t stride,
                             int64_t words)
{
    const quern_dtype dtype = p->bf16 ? QUERN_BF16 : QUERN_F32;
    uint32_t most = 0;
    for (int64_t j = 0; j < count; j++) {
        const uint32_t of_panel =
            p->kernels->rows->magnitude(panels + j * stride, dtype, words * (p->bf16 ? 2 : 1));
        if (of_panel > most) most = of_panel;
    }
    return most >= 0x7f800000u;
}

/* The same with keys along rows and nonfinite values as 0. Returns whether there was one. */
static bool pack_rows(const attend_plan *p, const attend_pack_target *t, const attend_sequence *seq,
                      int64_t head, int64_t row, int64_t rows)
{
    const int64_t pairs = p->bf16 ? 2 : 1, panels = attend_row_panels(p, t->tensor->shape[3]);
    const int64_t stride = p->packed_rows / pairs * t->row_panel;
    uint32_t *dst =
        (uint32_t *)t->rows + head * panels * stride + (seq->packed0 + row) / pairs * t->row_panel;
    const row_source src = rows_at(t->tensor, seq->view_b, seq->k0 + row, head, rows);
    const int64_t filled = (rows + pairs - 1) / pairs;
    pack_pairs(p, &src, t->row_panel, dst, stride);
    const bool nonfinite = panels_nonfinite(p, dst, panels, stride, filled * t->row_panel);
    for (int64_t r = 0; nonfinite && r < rows; r += 2) {
        uint32_t finite[2 * MAX_DIM];
        const row_source two = {finite, src.dtype, src.dim, rows - r < 2 ? 1 : 2, src.dim};
        for (int64_t i = 0; i < two.rows; i++)
            copy_finite(row_of(&src, r + i), src.dtype, src.dim,
                        (char *)finite + i * src.dim * (int64_t)quern_dtype_size(src.dtype));
        pack_pairs(p, &two, t->row_panel, dst + r / pairs * t->row_panel, stride);
    }
    for (int64_t j = 0; j < panels; j++)
        for (int64_t i = filled * t->row_panel; i < KEY_ALIGN / pairs * t->row_panel; i++)
            dst[j * stride + i] = 0;
    return nonfinite;
}

static void pack_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const pack_job *job = arg;
    const attend_plan *p = job->plan;
    const int64_t head = index / job->pieces % p->kv_heads;
    const attend_sequence seq = attend_sequence_at(p, index / job->pieces / p->kv_heads);
    const int64_t first = index % job->pieces * PACK_ROWS, padded = round_up(seq.nk, KEY_ALIGN);
    for (int64_t row = first; row < first + PACK_ROWS && row < padded; row += KEY_ALIGN) {
        const int64_t rows = seq.nk - row < KEY_ALIGN ? seq.nk - row : KEY_ALIGN;
        const int64_t flag = (head * p->packed_rows + seq.packed0 + row) / KEY_ALIGN;
        for (int32_t i = 0; i < job->count; i++) {
            const attend_pack_target *t = &job->targets[i];
            if (t->columns != NULL) pack_columns(p, t, &seq, head, row, rows);
            if (t->rows != NULL) t->nonfinite[flag] = pack_rows(p, t, &seq, head, row, rows);
        }
    }
}

void attend_pack_all(const stage_exec *exec, const attend_plan *plan, const attend_pack_target *targets,
                     int32_t count)
{
    const stage_seqs *seqs = &plan->args->seqs;
    int64_t longest = seqs->cu_q.data == NULL ? seqs->n_kv : 0;
    for (int64_t b = 0; b < plan->sequences && seqs->cu_q.data != NULL; b++) {
        const attend_sequence seq = attend_sequence_at(plan, b);
        if (seq.nk > longest) longest = seq.nk;
    }
    pack_job job = {plan, targets, count, (longest + PACK_ROWS - 1) / PACK_ROWS};
    parallel_for(exec, plan->sequences * plan->kv_heads * job.pieces, pack_piece, &job);
}

void attend_pack(const stage_exec *exec, const attend_plan *plan, const attend_packed *packed)
{
    const attend_pack_target targets[] = {
        {&plan->args->k, packed->keys, NULL, NULL, 0},
        {&plan->args->v, NULL, packed->values, packed->nonfinite, plan->value_panel}};
    attend_pack_all(exec, plan, targets, 2);
}
