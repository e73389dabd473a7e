/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mqa.h - the inner functions of attention whose heads share their keys: a query's keys, and the products of
 * all its heads against a tile of them. The forward and backward stages compose these.
 *
 * A tile's rows are copied side by side once and are the A of S^T = K Q^T (and of dP^T = K dO^T), so keys are
 * never transposed. S has a row per key and a column per head. The same rows, in pairs for bf16, are the B of
 * O = P V (and of dQ = dS K). Every head of a query sees the same keys, so there are no masks.
 */
#ifndef QUERN_CPU_MQA_H
#define QUERN_CPU_MQA_H

#include "backend.h"
#include "core/arena.h"
#include "cpu/attend_mqa/mqa_kernels.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/rows/row_kernels.h"
#include "cpu/kernels/formats/row_formats.h"
#include "cpu/levels.h"

enum {
    MQA_TILE = 192, /* keys of a tile */
    MQA_DIM_MOST = 512,
    MQA_PAD = 16 /* padding words of a tile's row: without them rows would share the cache's sets */
};

/* One sequence of the call: its rows in the views, and its first query. */
typedef struct mqa_sequence {
    int64_t b, view_b; /* its number, and that in the views: 0 in varlen batches */
    int64_t query0, queries, raw0, raw, entry0, entries, position;
} mqa_sequence; /* raw0, entry0 are 0 with page tables */

/* The first entry and task of each sequence: [batch + 1]. Rows of a fixed-length batch start at 0. */
typedef struct mqa_starts {
    int64_t *entry, *task;
} mqa_starts;

typedef struct mqa_plan {
    const attend_mqa_args *args;
    const attention_kernels *kernels;
    const mqa_kernels *rows;
    const cpu_kernels *level;
    bool bf16; /* products over pairs of bf16; otherwise f32 */
    bool gathers; /* rows are bf16 as they stand: a tile takes all of them at once */
    int64_t batch, heads, dim, rope;
    int64_t columns; /* columns of S: heads rounded up to 16 */
    int64_t words;   /* words of a key or query row: D, or D / 2 */
    int64_t pitch;   /* words from row to row of a tile */
    int64_t width;   /* floats of an O row: D rounded up to 16 */
    int64_t panel;   /* columns of a panel */
    row_size row;    /* of a key as it is stored */
    int64_t list;    /* length of a query's list; -1: none */
    float scale2;
    int32_t *status; /* the caller's, or NULL */
} mqa_plan;

mqa_plan mqa_plan_of(const stage_exec *exec, const attend_mqa_args *args);
/* Whether the products are of bf16 pairs. */
bool mqa_by_bf16(const stage_exec *exec, const attend_mqa_args *args);

void mqa_starts_carve(const mqa_plan *plan, arena *a, mqa_starts *starts);
/* Fills the starts; a task is `queries` queries of one sequence. Returns the number of tasks. */
int64_t mqa_starts_fill(const mqa_plan *plan, int64_t queries, mqa_starts *starts);
/* Offsets, positions and pages of all sequences; reports the first that is wrong. */
quern_status mqa_check(const stage_exec *exec, const attend_mqa_args *args);
mqa_sequence mqa_sequence_at(const mqa_plan *plan, const mqa_starts *starts, int64_t b);
/* The sequence that a task belongs to. */
int64_t mqa_task_sequence(const mqa_plan *plan, const mqa_starts *starts, int64_t task);

/* The keys of a query: raw rows [raw0, raw0 + raw) of its sequence, then n - raw entries. These are `list` in
 * ascending order, or the first n - raw entries if it is NULL. */
typedef struct mqa_keys {
    int64_t raw0, raw, n;
    const int32_t *list;
} mqa_keys;

/* Its raw rows alone. */
mqa_keys mqa_raw_keys_of(const mqa_plan *plan, const mqa_sequence *s, int64_t query);
/* `list` has room for a list of the call. */
mqa_keys mqa_keys_of(const mqa_plan *plan, const mqa_sequence *s, int64_t query, int32_t *list);
/* The most keys that a query can have. */
int64_t mqa_keys_most(const mqa_plan *plan);

/* A tile of keys. */
typedef struct mqa_tile {
    float *rows;  /* [MQA_TILE][pitch] words */
    float *pairs; /* bf16: [panels][MQA_TILE / 2][panel] words of two keys */
    int64_t n;
} mqa_tile;

void mqa_tile_carve(const mqa_plan *plan, arena *a, mqa_tile *tile);
/* Loads keys [first, first + n) of a query. `values`: they will be the B of a product. */
void mqa_tile_fill(const mqa_plan *plan, const mqa_sequence *s, const mqa_keys *keys, int64_t first,
                   int64_t n, mqa_tile *tile);

/* Rows that are packed or copied next. Products request them as they go: a copy waits for rows that come
 * from memory or from another core, and the products do not. */
enum { MQA_AHEAD = 256 };
typedef struct mqa_ahead {
    int64_t rows, next; /* next: the first that has not been requested */
    int64_t bytes;      /* of a row, at most */
    const void *row[MQA_AHEAD];
} mqa_ahead;

static inline void mqa_ahead_clear(mqa_ahead *ahead)
{
    ahead->rows = ahead->next = ahead->bytes = 0;
}

/* Adds keys [first, end) of a query, or the heads of one, as far as there is room. */
void mqa_ahead_keys(const mqa_plan *plan, const mqa_sequence *s, const mqa_keys *keys, int64_t first,
                    int64_t end, mqa_ahead *ahead);
void mqa_ahead_heads(const row_source *heads, mqa_ahead *ahead);

/* Packs the heads of one query as columns: [panels][words][panel]. */
size_t mqa_columns_bytes(const mqa_plan *plan);
void mqa_pack_columns(const mqa_plan *plan, const row_source *heads, float *to);
/* s [n][columns] = tile . columns. It requests half of the rows ahead, if any. */
void mqa_scores(const mqa_plan *plan, const mqa_tile *tile, const float *columns, float *s, mqa_ahead *ahead);
/* o [heads][width] (+)= p . tile. A softmax or gradient kernel made p: floats [keys][columns], or pairs of
 * keys. It requests the rest of the rows ahead. */
void mqa_values(const mqa_plan *plan, const mqa_tile *tile, const float *p, float *o, bool accumulate,
                mqa_ahead *ahead);

/* Row [b][n] of a [B,N,..] view. */
static inline void *mqa_row(const quern_tensor *t, int64_t b, int64_t n)
{
    return (char *)t->data + (b * t->strides[0] + n * t->strides[1]) * (int64_t)quern_dtype_size(t->dtype);
}

/* The heads of a query in a [B,T,H,D] view. */
static inline row_source mqa_heads(const quern_tensor *t, int64_t b, int64_t n)
{
    return (row_source){mqa_row(t, b, n), t->dtype, t->strides[2], t->shape[2], t->shape[3]};
}

/* Stores a row of D floats at element `at` of a view. */
static inline void mqa_store(const mqa_plan *plan, const float *row, const quern_tensor *t, int64_t at)
{
    plan->level->rows->convert(row, QUERN_F32, (char *)t->data + at * (int64_t)quern_dtype_size(t->dtype),
                               t->dtype, plan->dim);
}

/* The R / 2 cosines of a position, then its sines, as floats. */
void mqa_angles(const mqa_plan *plan, int64_t position, float *angles);

#endif
