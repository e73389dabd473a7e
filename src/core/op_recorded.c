/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/op_recorded.h"

#include <string.h>

static bool same(const backend_point *a, const backend_point *b)
{
    return a->recording == b->recording && a->count == b->count &&
           memcmp(a->after, b->after, (size_t)a->count * sizeof *a->after) == 0;
}

/* Whether calls i and k need the same memory. */
static bool touch(const op_recorded *r, int32_t k, int32_t i)
{
    for (int32_t a = k > 0 ? r->end[k - 1] : 0; a < r->end[k]; a++)
        for (int32_t b = i > 0 ? r->end[i - 1] : 0; b < r->end[i]; b++)
            if (op_spans_meet(&r->span[a], &r->span[b])) return true;
    return false;
}

/* What comes next waits for these calls; 0: for what was there before them. */
static quern_status resume(const op_recorded *r, const quern_backend *backend, const stage_exec *exec,
                           uint64_t calls)
{
    const backend_point *points[RECORDED_CALLS] = {&r->start};
    int32_t count = 0;
    for (int32_t k = 0; k < r->calls; k++)
        if (calls >> k & 1) points[count++] = &r->after[k];
    return backend->resume(exec, points, count > 0 ? count : 1);
}

bool op_recorded_begin(op_recorded *r, const quern_backend *backend, const stage_exec *exec,
                       const op_span *spans, int32_t count)
{
    backend_point now;
    if (!backend->point(exec, &now) || atomic_flag_test_and_set_explicit(&r->busy, memory_order_acquire))
        return false;
    if (!same(&now, &r->left) || (uint32_t)r->calls >= RECORDED_CALLS || r->spans + count > RECORDED_SPANS) {
        r->calls = r->spans = 0;
        r->last = 0;
        r->start = now;
    }
    const int32_t i = r->calls;
    uint64_t behind = 0;
    memcpy(&r->span[r->spans], spans, (size_t)count * sizeof *spans);
    r->end[i] = r->spans += count;
    r->before[i] = 0;
    for (int32_t k = i - 1; k >= 0; k--) {
        if (r->before[i] >> k & 1 || !touch(r, k, i)) continue;
        behind |= (uint64_t)1 << k;
        r->before[i] |= r->before[k] | (uint64_t)1 << k;
    }
    if (resume(r, backend, exec, behind) == QUERN_OK) {
        r->last = (r->last & ~behind) | (uint64_t)1 << i;
        return true;
    }
    r->left.count = -1;
    atomic_flag_clear_explicit(&r->busy, memory_order_release);
    return false;
}

quern_status op_recorded_end(op_recorded *r, const quern_backend *backend, const stage_exec *exec)
{
    quern_status status = QUERN_OK;
    if (backend->point(exec, &r->after[r->calls])) {
        r->calls++;
        status = resume(r, backend, exec, r->last);
    }
    if (!backend->point(exec, &r->left)) r->left.count = -1; /* the next call begins anew */
    atomic_flag_clear_explicit(&r->busy, memory_order_release);
    return status;
}
