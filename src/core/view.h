/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * view.h - checks of the tensors that a caller hands in, and the normalised views that stages take. Every
 * check sets the error sentence (argument, given, accepted) and touches no data.
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
    VIEW_SCALE = 1 << QUERN_U8 | 1 << QUERN_E4M3,
    VIEW_U8 = 1 << QUERN_U8
};

enum { VIEW_ANY = -1 /* an extent that is free */ };

/* What is wanted of one tensor. */
typedef struct view_rule {
    const char *name;
    const quern_tensor *tensor;
    uint32_t dtypes;
    int32_t ndim;
    int64_t shape[QUERN_MAX_DIMS]; /* VIEW_ANY or the extent */
    bool optional;                 /* NULL is fine */
    bool output;                   /* no two elements may share memory */
} view_rule;

/* Checks one tensor against its rule; `device` as in `like` (NULL: any). `run`: its data pointer counts too
 * (a workspace query looks at shapes only). */
quern_status view_check(const view_rule *rule, const quern_tensor *like, bool run);
/* What attention, dense and sparse, accepts: a head dim, and query heads to key/value heads. */
quern_status view_check_head_dim(const char *name, int64_t dim);
quern_status view_check_heads(int64_t heads, int64_t kv_heads);
/* Checks all rules, then that no output shares memory with another tensor of the list and that every pointer is memory
 * of its tensor's device. */
quern_status view_check_all(const view_rule *rules, int32_t count, const quern_tensor *like, bool run);

/* The view, or the absent view for NULL. */
quern_tensor view_or_absent(const quern_tensor *t);
/* A leading batch extent of 1: [T, ...] as [1, T, ...]. NULL gives the absent view. */
quern_tensor view_with_batch(const quern_tensor *t);
/* A contiguous view on the same device as `like`. */
quern_tensor view_on(const quern_tensor *like, void *data, quern_dtype dtype, int32_t ndim, const int64_t *shape);
/* Extents [first, first + count) along `dim`; an absent view stays absent. */
void view_narrow(quern_tensor *t, int32_t dim, int64_t first, int64_t count);
/* Elements of a view. */
int64_t view_elements(const quern_tensor *t);

/* Checks a workspace: its size, that it is there, and that it is memory of the device of `like`. */
quern_status view_check_workspace(const void *workspace, size_t given, size_t needed, const quern_tensor *like);

/* Checks cu_seqlens [batch + 1] on the CPU: from 0, never falling, the last at most `total`. */
quern_status view_check_borders(const quern_tensor *cu, const char *name, int64_t total);

#endif
