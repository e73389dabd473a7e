/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_pack.c - the plan of an attention call, and its keys and values packed for the tile kernels, once
 * per key/value head. Packing reads and writes each once: 1 to 3% of a causal call's time. */
#include "core/parallel.h"
#include "cpu/attend.h"

#include <math.h>

enum { PACK_ROWS = 256 };

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

attend_plan attend_plan_of(const quern_exec *exec, const attend_args *args)
{
    attend_plan p = {.args = args, .kernels = attention_kernels_for(exec->cpu_level)};
    p.bf16 = args->q.dtype == QUERN_BF16 && p.kernels->mm_bf16 != NULL;
    p.heads = (int32_t)args->q.shape[2];
    p.kv_heads = (int32_t)args->k.shape[2];
    p.group = p.kv_heads > 0 ? p.heads / p.kv_heads : 1;
    const bool by_head = args->list.ndim > 0 && args->scope == QUERN_NSA_SCOPE_HEAD;
    p.hs = by_head ? 1 : p.group;
    p.units = by_head ? p.heads : p.kv_heads;
    p.dim_k = (int32_t)args->q.shape[3];
    p.dim_v = (int32_t)args->v.shape[3];
    p.key_words = p.bf16 ? p.dim_k / 2 : p.dim_k;
    p.value_width = round_up(p.dim_v, 16);
    p.value_panel = p.value_width < p.kernels->panel ? (int32_t)p.value_width : p.kernels->panel;
    p.sequences = args->seqs.batch;
    p.packed_rows = args->seqs.cu_q.data == NULL ? args->seqs.batch * round_up(args->seqs.n_kv, KEY_ALIGN)
                                                 : round_up(args->seqs.n_kv, KEY_ALIGN) + KEY_ALIGN * args->seqs.batch;
    p.list_block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
    p.scale2 = p.bf16 ? args->scale * 1.44269504088896340736f : 1.0f;
    return p;
}

attend_sequence attend_sequence_at(const attend_plan *plan, int64_t b)
{
    const stage_seqs *s = &plan->args->seqs;
    if (s->cu_q.data == NULL)
        return (attend_sequence){b, 0, s->n_q, 0, s->n_kv, b * round_up(s->n_kv, KEY_ALIGN)};
    const int32_t *cq = s->cu_q.data, *ck = s->cu_kv.data != NULL ? s->cu_kv.data : cq;
    return (attend_sequence){0, cq[b], cq[b + 1] - cq[b], ck[b], ck[b + 1] - ck[b],
                             round_up(ck[b], KEY_ALIGN) + KEY_ALIGN * b};
}

void attend_interval(const attend_args *args, const attend_sequence *seq, int64_t query, int64_t *lo, int64_t *hi)
{
    int64_t first = 0, end = seq->nk;
    if (args->mask == ATTEND_RANGE) {
        const int64_t p = query + (args->query_offset >= 0 ? args->query_offset : seq->nk - seq->nq);
        if (args->causal) {
            end = p + 1;
            if (args->window > 0) first = p - args->window + 1;
        } else if (args->window > 0) {
            first = p - args->window / 2;
            end = p + args->window / 2 + 1;
        }
    } else if (args->causal) {
        if (args->mask == ATTEND_BLOCKS) {
            end = query + 1;
        } else {
            const int64_t reach = args->visibility == QUERN_NSA_VISIBLE_COMPLETE ? query - args->block_size + 1 : query;
            end = reach < 0 ? 0 : reach / args->stride + 1;
        }
    }
    if (first < 0) first = 0;
    if (first > seq->nk) first = seq->nk;
    if (end > seq->nk) end = seq->nk;
    *lo = first;
    *hi = end < first ? first : end;
}

int64_t attend_list_row0(const attend_plan *plan, int64_t b)
{
    const stage_seqs *s = &plan->args->seqs;
    if (s->cu_q.data == NULL) return 0;
    const int32_t *cq = s->cu_q.data;
    int64_t row = 0;
    for (int64_t i = 0; i < b; i++) row += (cq[i + 1] - cq[i] + plan->args->tile - 1) / plan->args->tile;
    return row;
}

const int32_t *attend_list(const attend_plan *plan, int64_t b, const attend_sequence *seq, int32_t unit, int64_t tile)
{
    const quern_tensor *t = &plan->args->list;
    return (const int32_t *)t->data + seq->view_b * t->strides[0] + unit * t->strides[1] +
           (attend_list_row0(plan, b) + tile) * t->strides[2];
}

static int64_t value_panels(const attend_plan *p)
{
    return (p->value_width + p->value_panel - 1) / p->value_panel;
}

void attend_packed_carve(const attend_plan *plan, arena *a, attend_packed *packed)
{
    /* 64 more rows than counted, so that a tile that starts in the last panel may read on. */
    const size_t rows = (size_t)plan->packed_rows, heads = (size_t)plan->kv_heads;
    packed->keys = arena_take(a, heads * rows * (size_t)plan->key_words * 4);
    packed->values = arena_take(a, heads * rows * (size_t)(value_panels(plan) * plan->value_panel) * (plan->bf16 ? 2 : 4));
    packed->special = arena_take(a, heads * rows / KEY_ALIGN);
}

typedef struct pack_job {
    const attend_plan *plan;
    const attend_packed *packed;
    int64_t pieces; /* of one (sequence, kv head); the longest sequence's */
} pack_job;

static row_source source_at(const quern_tensor *t, const attend_sequence *seq, int64_t head, int64_t row, int64_t rows)
{
    const int64_t at = seq->view_b * t->strides[0] + (seq->k0 + row) * t->strides[1] + head * t->strides[2];
    return (row_source){(const char *)t->data + at * (int64_t)quern_dtype_size(t->dtype), t->dtype, t->strides[1], rows, t->shape[3]};
}

/* Whether a value of 64 rows is infinite or NaN, from the source. */
static bool any_special(const row_source *src)
{
    uint32_t found = 0;
    for (int64_t r = 0; r < src->rows; r++) {
        if (src->dtype == QUERN_F32) {
            const uint32_t *p = (const uint32_t *)src->data + r * src->stride;
            for (int64_t c = 0; c < src->dim; c++) found |= (p[c] & 0x7f800000u) == 0x7f800000u;
        } else {
            const uint16_t *p = (const uint16_t *)src->data + r * src->stride;
            const uint16_t exponent = src->dtype == QUERN_BF16 ? 0x7f80 : 0x7c00;
            for (int64_t c = 0; c < src->dim; c++) found |= (p[c] & exponent) == exponent;
        }
    }
    return found != 0;
}

static void pack_piece(void *arg, int64_t index, int32_t thread)
{
    (void)thread;
    const pack_job *job = arg;
    const attend_plan *p = job->plan;
    const attention_kernels *k = p->kernels;
    const int64_t head = index / job->pieces % p->kv_heads;
    const attend_sequence seq = attend_sequence_at(p, index / job->pieces / p->kv_heads);
    const int64_t first = index % job->pieces * PACK_ROWS, padded = round_up(seq.nk, KEY_ALIGN);
    for (int64_t row = first; row < first + PACK_ROWS && row < padded; row += KEY_ALIGN) {
        const int64_t rows = seq.nk - row < KEY_ALIGN ? seq.nk - row : KEY_ALIGN, at = seq.packed0 + row;
        for (int64_t c = 0; c < KEY_ALIGN; c += k->panel) {
            const int64_t n = rows - c < 0 ? 0 : rows - c < k->panel ? rows - c : k->panel;
            const row_source src = source_at(&p->args->k, &seq, head, row + c, n);
            const size_t word = ((size_t)(head * p->packed_rows + at + c)) * (size_t)p->key_words;
            if (p->bf16) k->pack_keys_bf16(&src, k->panel, (uint32_t *)job->packed->keys + word);
            else k->pack_keys_f32(&src, k->panel, (float *)job->packed->keys + word);
        }
        const int64_t pairs = p->bf16 ? 2 : 1, stride = p->packed_rows / pairs * p->value_panel;
        const size_t base = (size_t)(head * value_panels(p) * stride + at / pairs * p->value_panel);
        const row_source src = source_at(&p->args->v, &seq, head, row, rows);
        float *values = (float *)job->packed->values + base; /* words either way */
        if (p->bf16) k->pack_values_bf16(&src, p->value_panel, (uint32_t *)values, stride);
        else k->pack_values_f32(&src, p->value_panel, values, stride);
        for (int64_t j = 0; j < value_panels(p); j++) /* rows past the sequence */
            for (int64_t r = (rows + pairs - 1) / pairs; r < KEY_ALIGN / pairs; r++)
                for (int32_t c = 0; c < p->value_panel; c++) values[j * stride + r * p->value_panel + c] = 0.0f;
        job->packed->special[(head * p->packed_rows + at) / KEY_ALIGN] = any_special(&src);
    }
}

void attend_pack(const quern_exec *exec, const attend_plan *plan, const attend_packed *packed)
{
    int64_t longest = 0;
    for (int64_t b = 0; b < plan->sequences; b++) {
        const attend_sequence seq = attend_sequence_at(plan, b);
        if (seq.nk > longest) longest = seq.nk;
        if (plan->args->seqs.cu_q.data == NULL) break;
    }
    pack_job job = {plan, packed, (longest + PACK_ROWS - 1) / PACK_ROWS};
    parallel_for(exec->threads, plan->sequences * plan->kv_heads * job.pieces, pack_piece, &job);
}
