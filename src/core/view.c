/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/view.h"

#include "core/error.h"

#include <math.h>

#include <stdio.h>

void view_make_canonical(quern_tensor *t)
{
    bool empty = false, alone = false;
    int64_t within = 1; /* elements within one step of a dimension */
    for (int32_t i = 0; i < t->ndim; i++) {
        empty = empty || t->shape[i] == 0;
        alone = alone || t->shape[i] == 1;
    }
    if (!empty && !alone) return; /* every stride has a meaning */
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        if (empty || t->shape[i] == 1) t->strides[i] = within;
        if (__builtin_mul_overflow(t->strides[i], t->shape[i] > 0 ? t->shape[i] : 1, &within)) within = 0;
    }
}

quern_tensor view_as_pages(const quern_tensor *t)
{
    quern_tensor v = *t;
    if (t->ndim == 3) return v;
    v.ndim = 3;
    v.shape[1] = 1;
    v.strides[1] = t->strides[0];
    v.shape[2] = t->ndim == 2 ? t->shape[1] : 1;
    v.strides[2] = 1;
    return v;
}

quern_tensor view_with_batch(const quern_tensor *t)
{
    quern_tensor v = *t;
    v.ndim++;
    v.shape[0] = 1;
    v.strides[0] = 0;
    for (int32_t i = 0; i < t->ndim; i++) {
        v.shape[i + 1] = t->shape[i];
        v.strides[i + 1] = t->strides[i];
    }
    return v;
}

quern_tensor view_on(const quern_tensor *like, void *data, quern_dtype dtype, int32_t ndim,
                     const int64_t *shape)
{
    quern_tensor v = quern_tensor_contiguous(data, dtype, ndim, shape);
    v.device = like->device;
    v.device_id = like->device_id;
    return v;
}

quern_tensor view_ranges(const quern_tensor *cu)
{
    quern_tensor t = *cu;
    t.ndim = 2;
    t.shape[0] = cu->shape[0] - 1;
    t.shape[1] = 2;
    t.strides[1] = t.strides[0];
    return t;
}

void view_narrow(quern_tensor *t, int32_t dim, int64_t first, int64_t count)
{
    if (t->ndim == 0) return;
    t->shape[dim] = count;
    if (first != 0 && t->data != NULL)
        t->data = (char *)t->data + first * t->strides[dim] * (int64_t)quern_dtype_size(t->dtype);
}

bool view_flatten(const quern_tensor *t, quern_tensor *flat)
{
    int64_t rows = 1;
    *flat = (quern_tensor){0};
    for (int32_t i = t->ndim - 3; i >= 0; i--)
        if (t->shape[i] > 1 && t->strides[i] != t->strides[i + 1] * t->shape[i + 1]) return false;
    for (int32_t i = 0; i < t->ndim - 1; i++) rows *= t->shape[i];
    const int64_t shape[] = {rows, t->shape[t->ndim - 1]};
    *flat = view_on(t, t->data, t->dtype, 2, shape);
    if (rows > 1 && t->ndim > 1) flat->strides[0] = t->strides[t->ndim - 2];
    return true;
}

int64_t view_elements(const quern_tensor *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static const char *dtype_list(uint32_t dtypes, char text[64])
{
    size_t used = 0;
    text[0] = '\0';
    for (int d = 0; quern_dtype_size((quern_dtype)d) > 0; d++)
        if (dtypes & 1u << d)
            used += (size_t)snprintf(text + used, 64 - used, "%s%s", used > 0 ? " or " : "",
                                     quern_dtype_name((quern_dtype)d));
    return text;
}

/* The span of t; false where it, or the product of its extents, overflows 64 bits. */
static bool find_span(const quern_tensor *t, view_span *s)
{
    int64_t lo = 0, hi = 0, elements = (int64_t)quern_dtype_size(t->dtype), reach;
    const int64_t size = elements;
    bool empty = false;
    *s = (view_span){0, 0};
    for (int32_t i = 0; i < t->ndim; i++) {
        empty = empty || t->shape[i] == 0;
        if (__builtin_mul_overflow(elements, t->shape[i] > 0 ? t->shape[i] : 1, &elements)) return false;
    }
    if (empty) return true;
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 1) continue;
        if (__builtin_mul_overflow(t->shape[i] - 1, t->strides[i], &reach)) return false;
        if (reach < 0 ? __builtin_add_overflow(lo, reach, &lo) : __builtin_add_overflow(hi, reach, &hi))
            return false;
    }
    if (__builtin_add_overflow(hi, 1, &hi)) return false;
    return !__builtin_mul_overflow(lo, size, &s->low) && !__builtin_mul_overflow(hi, size, &s->high);
}

static uint64_t magnitude(int64_t x)
{
    return x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
}

/* Whether two elements of t, which has some, share memory: walking the strides from small to large, each
 * must step over all that stands within. (Layouts that interleave without nesting are refused too.) */
static bool overlaps_itself(const quern_tensor *t)
{
    uint64_t reach = 0;
    bool done[QUERN_MAX_DIMS] = {false};
    for (int32_t n = 0; n < t->ndim; n++) {
        int32_t least = -1;
        for (int32_t i = 0; i < t->ndim; i++)
            if (!done[i] && (least < 0 || magnitude(t->strides[i]) < magnitude(t->strides[least]))) least = i;
        done[least] = true;
        if (t->shape[least] == 1) continue;
        const uint64_t s = magnitude(t->strides[least]);
        if (s <= reach) return true;
        reach += (uint64_t)(t->shape[least] - 1) * s;
    }
    return false;
}

static quern_status refuse_extent(const char *name, const quern_tensor *t, int32_t dim)
{
    return error_argument("%s.shape[%d] is %lld: 0 or more is accepted", name, dim, (long long)t->shape[dim]);
}

quern_status view_check_extents(const char *name, const quern_tensor *t)
{
    static const int64_t most = (int64_t)1 << 62; /* twice an extent is a number, too: codes hold two */
    int64_t bytes = (int64_t)quern_dtype_size(t->dtype);
    if (bytes == 0) bytes = 1;
    for (int32_t i = 0; i < t->ndim && t->ndim <= QUERN_MAX_DIMS; i++) {
        if (t->shape[i] < 0) return refuse_extent(name, t, i);
        if (__builtin_mul_overflow(bytes, t->shape[i] > 0 ? t->shape[i] : 1, &bytes) || bytes >= most)
            return error_argument(
                "%s.shape[%d] is %lld: the extents overflow, fewer than 2^62 bytes are accepted", name, i,
                (long long)t->shape[i]);
    }
    return QUERN_OK;
}

static quern_status check_shape(const view_want *want, const quern_tensor *t)
{
    if (t->ndim != want->ndim)
        return error_argument("%s has %d dimensions: %d are accepted", want->name, t->ndim, want->ndim);
    for (int32_t i = 0; i < t->ndim; i++) {
        if (t->shape[i] < 0) return refuse_extent(want->name, t, i);
        if (want->shape != NULL && t->shape[i] != want->shape[i])
            return error_argument("%s.shape[%d] is %lld: %lld is accepted", want->name, i,
                                  (long long)t->shape[i], (long long)want->shape[i]);
    }
    return QUERN_OK;
}

quern_status view_check_data(const char *name, const quern_tensor *t, const view_span *s)
{
    const size_t size = quern_dtype_size(t->dtype);
    const uintptr_t at = (uintptr_t)t->data;
    uintptr_t end; /* user space ends below 2^63 */
    if (t->data == NULL) return error_argument("%s.data is NULL: memory is needed for its elements", name);
    if (at % size != 0)
        return error_argument("%s.data is %p: a multiple of the element's %zu bytes is accepted", name,
                              t->data, size);
    if (at < magnitude(s->low) || __builtin_add_overflow(at, (uintptr_t)s->high, &end) || end > INTPTR_MAX)
        return error_argument(
            "%s: its strides reach past the address space from %p: memory for every element is accepted",
            name, t->data);
    return QUERN_OK;
}

quern_status view_check_kind(const char *name, uint32_t dtypes, const quern_tensor *t,
                             const quern_tensor *like)
{
    char text[64];
    if (t->device != QUERN_CPU && t->device != QUERN_CUDA)
        return error_argument("%s: device %d: 0 (cpu) or 1 (cuda) is accepted", name, (int)t->device);
    if (like != NULL && (t->device != like->device || t->device_id != like->device_id))
        return error_argument("%s is on device %d:%d: all tensors of a call share one device, here %d:%d",
                              name, (int)t->device, t->device_id, (int)like->device, like->device_id);
    if ((dtypes & view_dtype_bit(t->dtype)) == 0)
        return error_argument("%s: dtype %s: %s is accepted", name, quern_dtype_name(t->dtype),
                              dtype_list(dtypes, text));
    return QUERN_OK;
}

quern_status view_check_one(const view_want *want, const quern_tensor *t, const quern_tensor *like,
                            view_span *span)
{
    const quern_status status = view_check_kind(want->name, want->dtypes, t, like);
    return status == QUERN_OK ? view_check_layout(want, t, span) : status;
}

quern_status view_check_layout(const view_want *want, const quern_tensor *t, view_span *span)
{
    const char *name = want->name;
    const quern_status status = check_shape(want, t);
    if (status != QUERN_OK) return status;
    if (!find_span(t, span))
        return error_argument(
            "%s: shape times strides overflows 64 bits: at most 2^63 - 1 bytes are accepted", name);
    const int32_t last = t->ndim - 1;
    if (last >= 0 && t->shape[last] > 1 && t->strides[last] != 1)
        return error_argument("%s.strides[%d] is %lld: 1 is accepted for the last dimension", name, last,
                              (long long)t->strides[last]);
    if (span->high == 0) return QUERN_OK;
    if (want->output && overlaps_itself(t))
        return error_argument("%s: its strides let elements share memory: an output's may not", name);
    return want->run ? view_check_data(name, t, span) : QUERN_OK;
}

quern_status view_check_head_dim(const char *name, int64_t dim)
{
    if (dim >= 8 && dim <= 512 && dim % 8 == 0) return QUERN_OK;
    return error_argument("%s: head dim %lld: a multiple of 8 from 8 to 512 is accepted", name,
                          (long long)dim);
}

quern_status view_check_heads(int64_t heads, int64_t kv_heads, int64_t queries)
{
    if (heads > INT32_MAX && queries > 0)
        return error_argument("q has %lld heads: at most %d are accepted", (long long)heads, INT32_MAX);
    if (kv_heads < 1 ? heads == 0 : heads > 0 && heads % kv_heads == 0) return QUERN_OK;
    return error_argument("q has %lld heads: a positive multiple of k's %lld is accepted", (long long)heads,
                          (long long)kv_heads);
}

quern_status view_check_order(const quern_tensor *q, const quern_tensor *o)
{
    if (q == NULL || o == NULL || q->ndim != o->ndim || (q->ndim != 3 && q->ndim != 4)) return QUERN_OK;
    const int64_t *of_q = q->shape + q->ndim - 3, *of_o = o->shape + q->ndim - 3;
    if (of_q[0] == of_q[1] || of_q[0] != of_o[1] || of_q[1] != of_o[0]) return QUERN_OK;
    return error_argument("q has %lld x %lld tokens and heads, o %lld x %lld: the order %s is accepted for "
                          "both, and q (or o) seems to be in %s",
                          (long long)of_q[0], (long long)of_q[1], (long long)of_o[0], (long long)of_o[1],
                          q->ndim == 4 ? "[B, N, H, D]" : "[T, H, D]",
                          q->ndim == 4 ? "[B, H, N, D]" : "[H, T, D]");
}

/* Whether `delta` = sum_i d_i strides_i for some |d_i| < shape_i, strides nested as overlaps_itself() wants:
 * the widest stride leaves at most two choices of d. */
static bool reachable(const quern_tensor *t, int64_t delta, uint32_t used)
{
    int32_t widest = -1;
    for (int32_t i = 0; i < t->ndim; i++)
        if (!(used & 1u << i) && t->shape[i] > 1 && (widest < 0 || t->strides[i] > t->strides[widest]))
            widest = i;
    if (widest < 0) return delta == 0;
    const int64_t s = t->strides[widest];
    int64_t d = delta / s;
    if (delta % s < 0) d--;
    for (int64_t x = d; x <= d + 1; x++)
        if (x > -t->shape[widest] && x < t->shape[widest] && reachable(t, delta - x * s, used | 1u << widest))
            return true;
    return false;
}

bool view_meet(const quern_tensor *a, const quern_tensor *b)
{
    /* Views of one buffer may interleave without meeting (the gradients of a fused QKV tensor): with equal
     * positive strides that is decided exactly, otherwise meeting ranges count as shared. */
    const int64_t size = (int64_t)quern_dtype_size(a->dtype),
                  apart = (int64_t)((uintptr_t)b->data - (uintptr_t)a->data);
    if (a->dtype != b->dtype || a->ndim != b->ndim || apart % size != 0 || overlaps_itself(a)) return true;
    quern_tensor both = *a;
    for (int32_t i = 0; i < a->ndim; i++) {
        if (b->shape[i] > both.shape[i]) both.shape[i] = b->shape[i];
        if (both.shape[i] > 1 && (a->strides[i] != b->strides[i] || a->strides[i] <= 0)) return true;
    }
    return reachable(&both, apart / size, 0);
}

quern_status view_check_offsets(const int32_t *cu, int64_t batch, const char *name, int64_t total)
{
    if (cu[0] != 0) return error_argument("%s[0] is %d: 0 is accepted", name, cu[0]);
    for (int64_t i = 0; i < batch; i++)
        if (cu[i + 1] < cu[i])
            return error_argument("%s[%lld] is %d after %d: it may not fall", name, (long long)i + 1,
                                  cu[i + 1], cu[i]);
    if (cu[batch] > total)
        return error_argument("%s ends at %d: at most the %lld rows are accepted", name, cu[batch],
                              (long long)total);
    return QUERN_OK;
}

quern_status view_check_globals(const void *data, const quern_tensor *view, const char *name)
{
    for (int64_t i = 0; i < view_elements(view); i++) {
        int64_t at = 0, rest = i;
        for (int32_t d = view->ndim - 1; d >= 0; rest /= view->shape[d], d--)
            at += rest % view->shape[d] * view->strides[d];
        const float g = ((const float *)data)[at];
        if (!(g > 0.0f) || isinf(g))
            return error_argument("%s[%lld] is %g: a global above 0 and finite is accepted", name,
                                  (long long)i, (double)g);
    }
    return QUERN_OK;
}
