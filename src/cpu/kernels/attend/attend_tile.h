/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_tile.h - one step of blockwise attention: rows against a tile of keys. */
#ifndef QUERN_CPU_ATTEND_TILE_H
#define QUERN_CPU_ATTEND_TILE_H

#include "cpu/kernels/attend/attend.h"

/* Up to TILE_ROWS rows, their state, and the O that a step adds P V to. lo and hi never decrease from row to
 * row. */
typedef struct tile_rows {
    const attend_sequence *seq;
    int32_t n, head; /* rows, kv head */
    const float *q;  /* words */
    float *o;        /* [n][value_width] */
    const int32_t *lo, *hi;
    float *max, *sum;
    bool fresh; /* this step overwrites o with its P V instead of adding */
} tile_rows;

/* Keys [first, end) of a sequence. */
typedef struct key_run {
    int64_t first, end;
} key_run;

/* The keys of one step in ascending order. A single run starts anywhere. Of several runs, all start at
 * multiples of 16, all but the last have lengths that are multiples of 16, and each row sees a prefix of them
 * (lo = 0). Counted from each run's start rounded down to 16, they are at most TILE_KEYS. */
typedef struct key_tile {
    int32_t n;
    key_run run[TILE_KEYS / 16];
} key_tile;

/* S = Q K^T, softmax, O += P V. scratch->shrink[r] returns the factor of row r's earlier O and sum. The step
 * prefetches the keys of `next`, which may be empty. */
void attend_tile_step(const attend_plan *plan, const attend_packed *packed, const tile_rows *rows,
                      const key_tile *keys, const key_tile *next, attend_scratch *scratch);

#endif
