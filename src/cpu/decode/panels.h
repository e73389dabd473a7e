/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * panels.h - attention of a few query rows over rows of a cache, panel by panel. Every row of a step sees
 * every key of its panels, so no mask is needed.
 */
#ifndef QUERN_CPU_DECODE_PANELS_H
#define QUERN_CPU_DECODE_PANELS_H

#include "core/arena.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/rows_at.h"
#include "stages/cache.h"

enum {
    PANEL_KEYS = CACHE_BLOCK,
    STEP_PANELS = 6, /* 384 keys, as in the forward pass's tiles of compressed entries, so that sums have the
                        same order */
    STEP_KEYS = STEP_PANELS * PANEL_KEYS
};

/* The shape and dtype of a call's products. */
typedef struct decode_shape {
    const attention_kernels *kernels;
    bool bf16; /* products over pairs of bf16; otherwise f32 */
    bool prefetch_l2;
    quern_dtype dtype;
    int64_t dim_k, dim_v;
    int64_t key_words, value_width; /* words of a key or query in a panel; floats of an O row */
    int64_t value_panel, value_panels;
    float scale2;  /* multiplies scores in the softmax */
} decode_shape;

/* Up to 64 neighbouring keys and values of one head. */
typedef struct decode_panel {
    const char *keys, *values;
    int64_t n;
} decode_panel;

/* Query rows with their running softmax. */
typedef struct decode_rows {
    void *q;          /* [n][key_words] */
    float *o;         /* [n][value_width] */
    float *max, *sum; /* [n]; after decode_rows_finish() sum is the lse */
    int32_t n;
    bool fresh; /* o is not written yet */
} decode_rows;

/* A thread's room for steps. */
typedef struct decode_scratch {
    float *keys, *values; /* panels */
    float *s;             /* [rows][STEP_KEYS] */
    float *shrink;
    int32_t *lo, *hi;
    char *gathered;     /* a panel gathered from several blocks: keys, then values */
    decode_panel ahead; /* prefetched during the next step; n 0: none */
} decode_scratch;

decode_shape decode_shape_of(const stage_exec *exec, quern_dtype dtype, int64_t dim_k, int64_t dim_v,
                             float scale);
void decode_rows_carve(const decode_shape *shape, int64_t most, arena *a, decode_rows *rows);
void decode_scratch_carve(const decode_shape *shape, int64_t most_rows, arena *a, decode_scratch *s);

/* n rows from `heads` on of query `row` of q [1, T, H, D], to row `at`. */
void decode_rows_pack(const decode_shape *shape, const quern_tensor *q, int64_t row, int64_t head, int64_t n,
                      int32_t at, decode_rows *rows);
void decode_rows_reset(decode_rows *rows, int32_t n);
/* s[i][0 .. 384) = q k for the keys of up to STEP_PANELS panels, all but the last of 64. Returns the keys.
 * `packed`: by the prefill's kernels, to get the same bits. */
int32_t decode_scores(const decode_shape *shape, const decode_rows *rows, const decode_panel *panels,
                      int32_t count, bool packed, decode_scratch *s);
/* Turns the scores into P and adds P V to the rows; values false: only updates the running maxima and
 * sums. */
void decode_add(const decode_shape *shape, decode_rows *rows, const decode_panel *panels, int32_t count,
                int32_t keys, bool values, decode_scratch *s);
/* Divides by the sums. */
void decode_rows_finish(const decode_shape *shape, decode_rows *rows);

/* Keys [*key, end) of a sequence as the next panel, as far as they stand in one block; moves *key on. */
decode_panel decode_next_panel(const cache_plane *plane, int64_t b, int64_t head, int64_t *key, int64_t end);
#endif
