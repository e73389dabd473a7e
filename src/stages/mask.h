/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * mask.h - which keys a query sees; the code that the host and the device share.
 *
 * Keys are tokens, or entries that stand for blocks of tokens: entry e for tokens [e stride, e stride +
 * block_size). The keys that a query sees are an interval whose ends never fall from query to query. Under
 * ATTEND_BLOCKS a list says which blocks of the interval count.
 */
#ifndef QUERN_STAGES_MASK_H
#define QUERN_STAGES_MASK_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define MASK_FUNCTION __host__ __device__ __forceinline__
#else
#define MASK_FUNCTION static inline
#endif

typedef enum attend_mask {
    ATTEND_RANGE,      /* tokens: causal or not, optional window, query_offset */
    ATTEND_COMPRESSED, /* entries: stride, block_size, visibility; optional group list */
    ATTEND_BLOCKS      /* tokens of listed blocks */
} attend_mask;

/* When a compressed entry is seen: once its whole block has passed, or as soon as it has begun. */
typedef enum entry_visibility { ENTRY_COMPLETE = 0, ENTRY_STARTED = 1 } entry_visibility;

/* A mask as numbers; a field that its kind does not read is ignored. */
typedef struct key_mask {
    int32_t kind; /* attend_mask */
    bool causal;
    int32_t visibility; /* COMPRESSED: entry_visibility */
    int64_t window; /* RANGE; 0: none. Causal: so many keys, the query's own last; else window / 2 to either
                       side */
    int64_t query_offset;       /* RANGE: query 0's position; -1: the last query is at the last key. Else 0 */
    int64_t block_size, stride; /* COMPRESSED */
} key_mask;

/* Keys [lo, hi) of a sequence, or queries. */
typedef struct key_range {
    int64_t lo, hi;
} key_range;

/* Entries whose blocks lie within the first `tokens` tokens. */
MASK_FUNCTION int64_t mask_entries(int64_t tokens, int64_t block_size, int64_t stride)
{
    const int64_t room = tokens - block_size;
    return room < 0 ? 0 : room / stride + 1;
}

/* Blocks of `size` that hold n keys, the last one perhaps in part. */
MASK_FUNCTION int64_t mask_blocks(int64_t n, int64_t size)
{
    return (n + size - 1) / size;
}

/* The keys that query `query` of a sequence of nq queries and nk keys sees: 0 <= lo <= hi <= nk. */
MASK_FUNCTION key_range mask_keys(const key_mask *m, int64_t nq, int64_t nk, int64_t query)
{
    int64_t first = 0, end = nk;
    if (m->kind == ATTEND_RANGE) {
        const int64_t position = query + (m->query_offset >= 0 ? m->query_offset : nk - nq);
        if (m->causal || position < 0) { /* before position 0 nothing is seen */
            end = position + 1;
            if (m->window > 0 && m->window <= position) first = position - m->window + 1;
        } else if (m->window > 0) {
            first = position - m->window / 2;
            end = position + m->window / 2 + 1;
        }
    } else if (m->kind == ATTEND_COMPRESSED) {
        if (m->causal) {
            const int64_t newest =
                m->visibility == ENTRY_COMPLETE ? query - m->block_size + 1 : query; /* first token */
            end = newest < 0 ? 0 : newest / m->stride + 1;
        }
    } else if (m->causal) {
        end = query + 1;
    }
    if (first < 0) first = 0;
    if (first > nk) first = nk; /* a window past the last key begins behind it */
    if (end > nk) end = nk;
    if (end < first) end = first;
    const key_range range = {first, end};
    return range;
}

/* The queries of a sequence of nq that see key `key` of nk: they follow one another, too. */
MASK_FUNCTION key_range mask_queries(const key_mask *m, int64_t nq, int64_t nk, int64_t key)
{
    int64_t first = 0, end = nq;
    if (m->kind == ATTEND_RANGE) {
        const int64_t start = m->query_offset >= 0 ? m->query_offset : nk - nq,
                      at = key - start, /* its query */
            ahead = m->window / 2, behind = m->causal ? m->window : ahead + 1;
        first = -start;
        if (m->causal) first = at;
        else if (m->window > 0 && ahead < key) first = at - ahead;
        if (m->window > 0 && behind < nq - at) end = at + behind;
    } else if (m->causal) {
        first = key;
        if (m->kind == ATTEND_COMPRESSED)
            first = key * m->stride + (m->visibility == ENTRY_COMPLETE ? m->block_size - 1 : 0);
    }
    if (first < 0) first = 0;
    if (first > nq || key >= nk) first = nq;
    if (end < first) end = first;
    const key_range range = {first, end};
    return range;
}

/* The first of the keys that a causal query at `position` >= 0 sees in a window; 0: no window. */
MASK_FUNCTION int64_t mask_window_first(int64_t position, int64_t window)
{
    const key_mask m = {ATTEND_RANGE, true, 0, window, position, 0, 0};
    return mask_keys(&m, 1, position + 1, 0).lo;
}

/* How many blocks of `size` tokens query `query` of n tokens sees, whole or in part: the first so many. */
MASK_FUNCTION int64_t mask_blocks_seen(bool causal, int64_t n, int64_t query, int64_t size)
{
    const key_mask m = {ATTEND_BLOCKS, causal, 0, 0, 0, 0, 0};
    return mask_blocks(mask_keys(&m, n, n, query).hi, size);
}

#endif
