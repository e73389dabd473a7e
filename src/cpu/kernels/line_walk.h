/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * line_walk.h - prefetching while rows are read in place, line by line at an even pace: a burst of more lines
 * than the processor can have in flight would stall it.
 *
 * What is read 9 KB later is prefetched into L1. Where L1 has few fill buffers (read_ahead's l2), what is
 * read 7 KB later is prefetched into L2, and what is read 512 bytes later from there into L1. Past the last
 * row that is read_ahead's `next`.
 */
#ifndef QUERN_CPU_LINE_WALK_H
#define QUERN_CPU_LINE_WALK_H

#include "cpu/kernels/attention_kernels.h"
#include "cpu/kernels/vector.h"

enum {
    LINE = 64,
    UNIT = 4 * LINE,
    UNITS_AHEAD = 36,    /* into L1 */
    UNITS_AHEAD_L2 = 28, /* into L2, and from there into L1: */
    UNITS_NEAR = 2
};

/* Lines to prefetch, in order: `left` units of the rows in hand, then those of what is read next. */
typedef struct line_cursor {
    const char *at;
    int64_t left;
} line_cursor;

typedef struct line_walk {
    line_cursor far, near; /* near: only where `far` fetches into L2 */
    read_ahead ahead;
} line_walk;

/* Starts `units` after the first row, whose elements have `size` bytes. */
INLINE line_cursor cursor_over(const row_source *src, const int64_t size, int64_t units, const void *next)
{
    const int64_t left = src->rows * src->stride / (UNIT / size) - units;
    return (line_cursor){left > 0 ? (const char *)src->data + units * UNIT : next, left};
}

INLINE line_walk walk_over(const row_source *src, const int64_t size, read_ahead ahead)
{
    return (line_walk){cursor_over(src, size, ahead.l2 ? UNITS_AHEAD_L2 : UNITS_AHEAD, ahead.next),
                       cursor_over(src, size, UNITS_NEAR, ahead.next), ahead};
}

INLINE void prefetch_at(line_cursor *c, const void *next, const bool l2)
{
    if (c->left-- == 0) c->at = next;
    for (int i = 0; i < UNIT; i += LINE) {
        if (l2) __builtin_prefetch(c->at + i, 0, 2);
        else __builtin_prefetch(c->at + i, 0, 3);
    }
    c->at += UNIT;
}

INLINE void prefetch_unit(line_walk *w)
{
    if (w->ahead.l2) {
        prefetch_at(&w->far, w->ahead.next, true);
        prefetch_at(&w->near, w->ahead.next, false);
    } else {
        prefetch_at(&w->far, w->ahead.next, false);
    }
}

#endif
