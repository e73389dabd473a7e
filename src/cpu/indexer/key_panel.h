/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* key_panel.h - a panel of the indexer's keys from any of their formats. */
#ifndef QUERN_CPU_KEY_PANEL_H
#define QUERN_CPU_KEY_PANEL_H

#include "backend.h"
#include "core/arena.h"
#include "cpu/indexer/indexer_kernels.h"
#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/formats/row_formats.h"
#include "cpu/levels.h"
#include "stages/indexer.h"

typedef struct key_panel {
    const indexer_kernels *kernels;
    const attention_kernels *packing;
    const cpu_kernels *level;
    const indexer_args *args;
    int64_t width;
    row_size row;        /* of a key as it is stored */
    bool bf16;           /* words are pairs of bf16 values, else floats */
    void *words;         /* [words][panel] */
    float *rows, *scale; /* of byte formats: the widened rows, and the factor of a key's score */
    uint16_t *halves;
    char *gathered; /* rows of several pages, side by side */
} key_panel;

static inline int64_t key_panel_words(const key_panel *p)
{
    return p->bf16 ? p->width / 2 : p->width;
}

/* Of a key with bytes of powers of two as scales, the first of them that is NaN, or -1. */
int64_t key_panel_bad_scale(const key_panel *p, int64_t b, int64_t key);
void key_panel_carve(key_panel *p, arena *a);
/* Keys first ... first + n - 1 of sequence b, n <= panel; the other columns are 0. */
void key_panel_fill(key_panel *p, int64_t b, int64_t first, int64_t n);

/* Where keys first ... first + n - 1 stand, as far as they follow each other in memory. */
typedef struct key_bytes {
    const char *data;
    int64_t bytes;
} key_bytes;
key_bytes key_panel_bytes(const key_panel *p, int64_t b, int64_t first, int64_t n);

#endif
