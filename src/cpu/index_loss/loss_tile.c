/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * loss_tile.c - up to 96 queries that name a block against up to 128 of its keys.
 *
 *   scores of q, some queries' heads at a time        A: rows of q; B: panels of keys
 *   T group += 2^(scores - lse), over a query's heads
 *   scores of q_index                                 A: rows of q_index; B: panels of key_index
 *   P - T, and the loss
 *   d_q += (P - T) key_index                          A: rows of P - T; B: rows of key_index
 *   d_keys += (P - T)^T q_index                       A: columns of P - T (broadcast); B: rows of q_index
 *
 * The teacher's scores are most of the work where a list serves several heads; 192 rows of them are 32 full
 * micro-kernels of 6 and take 108 KB. Limit: the FMA (or bf16 dot product) peak.
 */
#include "cpu/kernels/attend/nonfinite.h"
#include "cpu/index_loss/index_loss.h"
#include "cpu/rows_at.h"

#include <string.h>

static int64_t most_rows(const loss_plan *p)
{
    return p->group > LOSS_TEACHER_ROWS ? p->group : LOSS_TEACHER_ROWS;
}

void loss_tile_carve(const loss_plan *p, arena *a, loss_tile *t)
{
    const size_t rows = (size_t)most_rows(p), tokens = LOSS_TOKENS, ld = (size_t)p->ld;
    t->token = arena_take(a, tokens * sizeof *t->token);
    t->gather_q = arena_take(a, rows * (size_t)p->teacher.key_words * 4);
    t->scores = arena_take(a, rows * LOSS_LD * sizeof *t->scores);
    t->gather_index = arena_take(a, (tokens + 1) * (size_t)p->student.key_words * 4);
    t->index_pairs = arena_take(a, tokens * ld * 4);
    t->teacher = arena_take(a, tokens * LOSS_LD * sizeof *t->teacher);
    t->student = arena_take(a, tokens * LOSS_LD * sizeof *t->student);
    t->g_words = arena_take(a, (tokens + 1) * LOSS_LD * sizeof *t->g_words);
    t->g_pairs = arena_take(a, tokens / 2 * LOSS_LD * sizeof *t->g_pairs);
    t->d_q = arena_take(a, tokens * ld * sizeof *t->d_q);
    t->d_keys = arena_take(a, LOSS_LD * ld * sizeof *t->d_keys);
    t->lo = arena_take(a, rows * sizeof *t->lo);
    t->hi = arena_take(a, rows * sizeof *t->hi);
    t->max = arena_take(a, rows * sizeof *t->max);
    t->sum = arena_take(a, rows * sizeof *t->sum);
    t->shrink = arena_take(a, rows * sizeof *t->shrink);
}

/* scores[n][LOSS_LD] of n rows and the tile's columns. `panels` and `head` are the keys'. */
static void score(const attend_plan *p, const loss_chunk *c, const loss_tile *t, const void *panels,
                  int64_t head, const void *rows, int64_t n, float *scores)
{
    mm_kernel *mm = p->bf16 ? p->kernels->mm_bf16 : p->kernels->mm_f32;
    const int64_t panel = p->kernels->panel, first = head * p->packed_rows + c->seq.packed0 + t->base;
    for (int64_t column = 0, width; column < t->columns; column += width) {
        const int64_t in_panel = (first + column) % panel, rest = panel - in_panel;
        width = t->columns - column < rest ? t->columns - column : rest;
        mm(n, width, p->key_words, rows, p->key_words, 1,
           (const uint32_t *)panels + (first + column - in_panel) * p->key_words + in_panel, panel,
           scores + column, LOSS_LD, false);
    }
}

/* The columns that a token sees. */
static int32_t end_of(const loss_plan *p, const loss_chunk *c, const loss_tile *t, int32_t token)
{
    const int64_t seen = c->seen[token * p->group], end = seen < t->key1 ? seen : t->key1;
    return (int32_t)(end - t->base);
}

/* Scores of the heads of tokens [first, first + n). */
static void score_teacher(const loss_plan *p, const loss_chunk *c, const loss_tile *t, int32_t first,
                          int32_t n)
{
    const size_t bytes = (size_t)(p->group * p->teacher.key_words) * 4;
    for (int32_t i = 0; i < n; i++)
        memcpy((char *)t->gather_q + (size_t)i * bytes,
               (const char *)c->teacher.q + (size_t)t->token[first + i] * bytes, bytes);
    score(&p->teacher, c, t, p->keys, c->list, t->gather_q, n * p->group, t->scores);
}

static void score_student(const loss_plan *p, const loss_chunk *c, const loss_tile *t)
{
    const int64_t words = p->student.key_words;
    for (int32_t i = 0; i < t->tokens; i++)
        memcpy(t->gather_index + i * words, c->q_index + t->token[i] * words, (size_t)words * 4);
    score(&p->student, c, t, p->index_keys, p->shared ? 0 : c->list, t->gather_index, t->tokens, t->student);
}

/* Adds scores of tokens [first, first + n), `heads` rows each, to their running max and sum. */
static void weigh(const loss_plan *p, const loss_chunk *c, loss_tile *t, int32_t first, int32_t n,
                  int64_t heads, float scale2, float *scores, float *max, float *sum)
{
    for (int32_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t row = i * heads + h, at = t->token[first + i] * heads + h;
            t->lo[row] = (int32_t)(t->key0 - t->base);
            t->hi[row] = end_of(p, c, t, t->token[first + i]);
            t->max[row] = max[at];
            t->sum[row] = sum[at];
        }
    const softmax_tile soft = {
        scores, LOSS_LD, (int32_t)(n * heads), t->columns, t->lo, t->hi, scale2, t->max, t->sum, t->shrink};
    p->teacher.kernels->softmax_f32(&soft);
    for (int32_t i = 0; i < n; i++)
        for (int64_t h = 0; h < heads; h++) {
            max[t->token[first + i] * heads + h] = t->max[i * heads + h];
            sum[t->token[first + i] * heads + h] = t->sum[i * heads + h];
        }
}

static int32_t teacher_tokens(const loss_plan *p, const loss_tile *t, int32_t first)
{
    const int64_t fit = p->group < LOSS_TEACHER_ROWS ? LOSS_TEACHER_ROWS / p->group : 1;
    return t->tokens - first < fit ? t->tokens - first : (int32_t)fit;
}

void loss_tile_weigh(const loss_plan *p, const loss_chunk *c, loss_tile *t)
{
    for (int32_t i = 0; i < t->tokens; i++)
        c->count[t->token[i]] += end_of(p, c, t, t->token[i]) - (int32_t)(t->key0 - t->base);
    score_student(p, c, t);
    for (int32_t first = 0, n; first < t->tokens; first += n) {
        n = t->tokens - first < (int32_t)most_rows(p) ? t->tokens - first : (int32_t)most_rows(p);
        weigh(p, c, t, first, n, 1, p->student.scale2, t->student + (int64_t)first * LOSS_LD, c->max, c->sum);
    }
    for (int32_t first = 0, n; c->weighs_teacher && first < t->tokens; first += n) {
        n = teacher_tokens(p, t, first);
        score_teacher(p, c, t, first, n);
        weigh(p, c, t, first, n, p->group, p->teacher.scale2, t->scores, c->teacher_max, c->teacher_sum);
    }
}

/* The sums of the teacher's probabilities over the heads of every token. */
static void sum_teachers(const loss_plan *p, const loss_chunk *c, const loss_tile *t)
{
    memset(t->teacher, 0, (size_t)t->tokens * LOSS_LD * sizeof *t->teacher);
    for (int32_t first = 0, n; first < t->tokens; first += n) {
        n = teacher_tokens(p, t, first);
        score_teacher(p, c, t, first, n);
        for (int32_t i = 0; i < n; i++) {
            const int32_t token = t->token[first + i];
            for (int64_t h = 0; h < p->group; h++) t->hi[h] = end_of(p, c, t, token);
            p->kernels->add_probabilities(t->scores + i * p->group * LOSS_LD, LOSS_LD, (int32_t)p->group,
                                          t->hi, t->columns, p->teacher.scale2,
                                          c->teacher_lse2 + token * p->group,
                                          t->teacher + (int64_t)(first + i) * LOSS_LD);
        }
    }
}

/* Adds (P - T) x over the nonfinite elements x of the tile's keys to d_q of the tokens that see them. */
static void add_nonfinite_keys(const loss_plan *p, const loss_chunk *c, const loss_tile *t)
{
    const quern_tensor *keys = &p->args->keys_index;
    const int64_t head = p->shared ? 0 : c->list;
    const uint8_t *flags = p->nonfinite + (head * p->student.packed_rows + c->seq.packed0) / KEY_ALIGN;
    for (int64_t key = t->key0; key < t->key1; key++) {
        if (!flags[key / KEY_ALIGN]) continue;
        const void *row = row_at(keys, c->seq.view_b, c->seq.k0 + key, head);
        for (int64_t d = 0; d < p->student.dim_k; d++) {
            if (!is_nonfinite(row, keys->dtype, d)) continue;
            for (int32_t i = 0; i < t->tokens; i++)
                if (key - t->base < end_of(p, c, t, t->token[i]))
                    t->d_q[i * p->ld + d] +=
                        t->student[i * LOSS_LD + key - t->base] * element_as_f32(row, keys->dtype, d);
        }
    }
}

/* The same over the tokens' q_index, to d_keys of the keys that they see. */
static void add_nonfinite_rows(const loss_plan *p, const loss_chunk *c, const loss_tile *t)
{
    const quern_dtype dtype = p->student.bf16 ? QUERN_BF16 : QUERN_F32;
    for (int32_t i = 0; i < t->tokens; i++) {
        const uint32_t *row = c->q_index + t->token[i] * p->student.key_words;
        if (!c->nonfinite[t->token[i]]) continue;
        for (int64_t d = 0; d < p->student.dim_k; d++)
            for (int64_t column = t->key0 - t->base;
                 is_nonfinite(row, dtype, d) && column < end_of(p, c, t, t->token[i]); column++)
                t->d_keys[column * p->ld + d] +=
                    t->student[i * LOSS_LD + column] * element_as_f32(row, dtype, d);
    }
}

/* P - T in bf16, by rows and in pairs of rows. An odd number of rows is followed by one of zeros. */
static void narrow(const loss_plan *p, const loss_tile *t)
{
    const row_source rows = {t->g_words, QUERN_BF16, LOSS_LD, t->tokens, t->columns};
    for (int32_t i = 0; i < t->tokens; i++)
        p->kernels->rows->convert(t->student + (int64_t)i * LOSS_LD, QUERN_F32,
                                  t->g_words + (int64_t)i * LOSS_LD, QUERN_BF16, t->columns);
    p->student.kernels->pack_values_bf16(&rows, LOSS_LD, t->g_pairs, 0);
}

/* chunk.d_q of the tokens += (P - T) key_index. */
static void add_d_q(const loss_plan *p, const loss_chunk *c, const loss_tile *t)
{
    const attend_plan *s = &p->student;
    mm_kernel *mm = s->bf16 ? s->kernels->mm_bf16 : s->kernels->mm_f32;
    const int64_t pairs = s->bf16 ? 2 : 1, width = round_up(s->dim_k, 16),
                  panels = attend_row_panels(s, s->dim_k), stride = s->packed_rows / pairs * p->key_panel;
    const uint32_t *rows = (const uint32_t *)p->index_rows + (p->shared ? 0 : c->list) * panels * stride +
                           (c->seq.packed0 + t->base) / pairs * p->key_panel;
    for (int64_t j = 0; j < panels; j++) {
        const int64_t column = j * p->key_panel,
                      n = width - column < p->key_panel ? width - column : p->key_panel;
        mm(t->tokens, n, t->columns / pairs, s->bf16 ? (const void *)t->g_words : t->student, LOSS_LD / pairs,
           1, rows + j * stride, p->key_panel, t->d_q + column, p->ld, false);
    }
    add_nonfinite_keys(p, c, t);
    for (int32_t i = 0; i < t->tokens; i++)
        p->kernels->rows->add_scaled(c->d_q + t->token[i] * p->ld, t->d_q + i * p->ld, 1.0f, s->dim_k);
}

/* t->d_keys += (P - T)^T q_index. */
static void add_d_keys(const loss_plan *p, const loss_chunk *c, loss_tile *t)
{
    const attend_plan *s = &p->student;
    mm_kernel *mm = s->bf16 ? s->kernels->mm_bf16 : s->kernels->mm_f32;
    const int64_t words = s->key_words, width = round_up(s->dim_k, 16),
                  depth = s->bf16 ? (t->tokens + 1) / 2 : t->tokens;
    const quern_dtype dtype = s->bf16 ? QUERN_BF16 : QUERN_F32;
    bool nonfinite = false;
    for (int32_t i = 0; i < t->tokens; i++) {
        uint32_t *row = t->gather_index + i * words;
        nonfinite |= c->nonfinite[t->token[i]];
        if (c->nonfinite[t->token[i]]) copy_finite(row, dtype, s->dim_k, row);
    }
    const row_source rows = {t->gather_index, dtype, s->dim_k, t->tokens, s->dim_k};
    if (s->bf16) s->kernels->pack_values_bf16(&rows, (int32_t)p->ld, t->index_pairs, 0);
    else s->kernels->pack_values_f32(&rows, (int32_t)p->ld, t->index_pairs, 0);
    for (int64_t j = 0; j < width; j += s->kernels->panel)
        mm(t->columns, width - j < s->kernels->panel ? width - j : s->kernels->panel, depth,
           s->bf16 ? (const void *)t->g_pairs : t->student, 1, LOSS_LD, (const uint32_t *)t->index_pairs + j,
           p->ld, t->d_keys + j, p->ld, !t->fresh);
    t->fresh = false;
    if (nonfinite) add_nonfinite_rows(p, c, t);
}

void loss_tile_run(const loss_plan *p, const loss_chunk *c, loss_tile *t)
{
    const int32_t lo = (int32_t)(t->key0 - t->base);
    sum_teachers(p, c, t);
    score_student(p, c, t);
    for (int32_t i = 0; i < t->tokens; i++) {
        const int32_t token = t->token[i];
        float sums[2];
        p->kernels->divergence(t->student + (int64_t)i * LOSS_LD, t->teacher + (int64_t)i * LOSS_LD, lo,
                               end_of(p, c, t, token), t->columns, p->args->scale_index, c->lse[token],
                               1.0f / (float)p->group, sums);
        c->loss[token] += (double)sums[0];
        c->total[token] += (double)sums[1];
    }
    const bool d_q = is_present(&p->args->d_q_index), d_keys = p->d_keys.data != NULL;
    if (p->student.bf16 && (d_q || d_keys)) narrow(p, t);
    if (d_q) add_d_q(p, c, t);
    if (d_keys) add_d_keys(p, c, t);
}
