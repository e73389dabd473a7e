/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * view.h - the one check of a tensor that a caller hands in, and the views that stages take. Every check sets
 * the error sentence (argument, given, accepted) and touches no data.
 */
#ifndef QUERN_CORE_VIEW_H
#define QUERN_CORE_VIEW_H

#include <quern/quern.h>

/* Sets of dtypes, as bits. */
enum {
    VIEW_F32 = 1 << QUERN_F32,
    VIEW_ACTIVATION = 1 << QUERN_F32 | 1 << QUERN_F16 | 1 << QUERN_BF16,
    VIEW_I32 = 1 << QUERN_I32,
    VIEW_I64 = 1 << QUERN_I64,
    VIEW_CODES = 1 << QUERN_U8 | 1 << QUERN_E2M1X2,
    VIEW_SCALE = 1 << QUERN_U8 | 1 << QUERN_E4M3,
    VIEW_EXPONENT = 1 << QUERN_U8 | 1 << QUERN_E8M0,
    VIEW_U8 = 1 << QUERN_U8
};

/* A dtype in such a set; 0: it is none. */
static inline uint32_t view_dtype_bit(quern_dtype dtype)
{
    return (unsigned)dtype < 32 ? 1u << (unsigned)dtype : 0;
}

/* What is wanted of one tensor. */
typedef struct view_want {
    const char *name;
    uint32_t dtypes;
    int32_t ndim;
    const int64_t *shape; /* NULL: any extents */
    bool output;          /* no two elements may share memory */
    bool run;             /* the data pointer is checked, too (a workspace query reads shapes only) */
} view_want;

/* The bytes that a tensor reaches: [low, high) from its data; both 0 where it has no elements. */
typedef struct view_span {
    int64_t low, high;
} view_span;

/* Checks dtype and device, the latter as of `like` (NULL: any). */
quern_status view_check_kind(const char *name, uint32_t dtypes, const quern_tensor *t,
                             const quern_tensor *like);
/* Checks extents, strides and address; *span is set. */
quern_status view_check_layout(const view_want *want, const quern_tensor *t, view_span *span);
/* Both. */
quern_status view_check_one(const view_want *want, const quern_tensor *t, const quern_tensor *like,
                            view_span *span);
/* Checks the address of a tensor that has elements and is otherwise as it should be. */
quern_status view_check_data(const char *name, const quern_tensor *t, const view_span *span);
/* Refuses extents that are negative, or too large to calculate with, before anything is derived from them.
 * (Of another ndim than 0 to QUERN_MAX_DIMS it says nothing.) */
quern_status view_check_extents(const char *name, const quern_tensor *t);
/* Whether tensors that were checked, and reach into the same memory, have an element in common. */
bool view_meet(const quern_tensor *a, const quern_tensor *b);
/* The same, wherever they reach. (Most pairs lie apart, and a call compares many.) */
static inline bool view_share_memory(const quern_tensor *a, const view_span *a_span, const quern_tensor *b,
                                     const view_span *b_span)
{
    const uintptr_t pa = (uintptr_t)a->data, pb = (uintptr_t)b->data;
    return pa + (uintptr_t)a_span->high > pb + (uintptr_t)b_span->low &&
           pb + (uintptr_t)b_span->high > pa + (uintptr_t)a_span->low && a_span->high != 0 &&
           b_span->high != 0 && view_meet(a, b);
}
/* What attention, dense and sparse, accepts: a head dim, and query heads to key/value heads. Without queries
 * there may be any number of heads. */
quern_status view_check_head_dim(const char *name, int64_t dim);
quern_status view_check_heads(int64_t heads, int64_t kv_heads, int64_t queries);
/* Refuses q [.., N, H, D] and o, of the same ndim, where one has tokens and heads the other way around.
 * Either may be NULL; their shapes are checked elsewhere. */
quern_status view_check_order(const quern_tensor *q, const quern_tensor *o);
/* Checks cu_seqlens [batch + 1], which the host can read: from 0, never falling, the last at most `total`. */
quern_status view_check_offsets(const int32_t *cu, int64_t batch, const char *name, int64_t total);

/* Checks scales of f32 tensors, which stand at `data` as in the view: finite and above 0. */
quern_status view_check_globals(const void *data, const quern_tensor *view, const char *name);

/* ---- views ---- */

/* Gives a checked tensor strides that are safe to calculate with. Where an extent is 1, or there are no
 * elements, a stride may be any number; it becomes that of a contiguous tensor. */
void view_make_canonical(quern_tensor *t);
/* A leading batch extent of 1: [T, ...] as [1, T, ...]. */
quern_tensor view_with_batch(const quern_tensor *t);
/* Rows [n], [n, m] or [n, parts, m] as pages of parts, [n, parts, m] (stages/step.h). */
quern_tensor view_as_pages(const quern_tensor *t);
/* A contiguous view on the same device as `like`. */
quern_tensor view_on(const quern_tensor *like, void *data, quern_dtype dtype, int32_t ndim,
                     const int64_t *shape);
/* cu_seqlens [B + 1] as ranges of rows [B, 2]. */
quern_tensor view_ranges(const quern_tensor *cu);
/* Extents [first, first + count) along `dim`; an absent view stays absent. */
void view_narrow(quern_tensor *t, int32_t dim, int64_t first, int64_t count);
/* [.., columns] as a matrix [rows, columns]. False, with *flat absent, where the rows do not follow each
 * other at one stride. */
bool view_flatten(const quern_tensor *t, quern_tensor *flat);
/* Elements of a view. */
int64_t view_elements(const quern_tensor *t);

#endif
