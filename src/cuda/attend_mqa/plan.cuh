/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plan.cuh - the plan of one query of attention whose heads share their keys, by 128 threads: it finds the
 * query's sequence, cleans its list and looks whether the tables name a page for every row it needs; a query
 * of which one is missing sees nothing and sets the status bit, as entries out of range do.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_PLAN_CUH
#define QUERN_CUDA_ATTEND_MQA_PLAN_CUH

#include "attend_mqa/params.cuh"
#include "stages/mask.h"

namespace mqa
{

enum { PLANNERS = 128, PLANNER_WARPS = PLANNERS / 32 };

/* Shared memory of a plan, and the plan. */
struct plan_room {
    int32_t count[PLANNER_WARPS], found;
    int32_t *sorted; /* room up to the power of two that holds the longest list */
    mqa_query query;
    const int32_t *list; /* of its entries; NULL: the first ones */
    bool as_given;       /* the list is clean as it is, and no page is missing */
};

/* A barrier of the planners, by its number; the sum of a number, and whether any of them has `yes`. */
template <int BARRIER> __device__ __forceinline__ void planners_sync()
{
    asm volatile("bar.sync %0, %1;" ::"n"(BARRIER), "n"((int)PLANNERS) : "memory");
}
template <int BARRIER> __device__ __forceinline__ bool any_planner(bool yes)
{
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, "
        "q;\n}"
        : "=r"(any)
        : "r"((uint32_t)yes), "n"(BARRIER), "n"((int)PLANNERS)
        : "memory");
    return any != 0;
}
template <int BARRIER> __device__ __forceinline__ int planners_sum(plan_room &m, int x)
{
    for (int w = 16; w > 0; w /= 2) x += __shfl_xor_sync(~0u, x, w);
    planners_sync<BARRIER>();
    if (threadIdx.x % 32 == 0) m.count[threadIdx.x / 32] = x;
    planners_sync<BARRIER>();
    x = 0;
    for (int w = 0; w < PLANNER_WARPS; w++) x += m.count[w];
    return x;
}

/* How many threads before this one have `here`; *all: of the planners. */
template <int BARRIER> __device__ __forceinline__ int planner_rank(plan_room &m, bool here, int *all)
{
    const unsigned bits = __ballot_sync(~0u, here);
    const int warp = threadIdx.x / 32;
    planners_sync<BARRIER>();
    if (threadIdx.x % 32 == 0) m.count[warp] = __popc(bits);
    planners_sync<BARRIER>();
    int before = __popc(bits & ((1u << threadIdx.x % 32) - 1));
    *all = 0;
    for (int w = 0; w < PLANNER_WARPS; w++) {
        before += w < warp ? m.count[w] : 0;
        *all += m.count[w];
    }
    return before;
}

/* Sorts n numbers >= 0, in place; there is room up to the next power of two. */
template <int BARRIER> __device__ __noinline__ void sort_list(int32_t *x, int n)
{
    int size = 1;
    while (size < n) size *= 2;
#pragma unroll 1
    for (int i = n + threadIdx.x; i < size; i += PLANNERS) x[i] = INT32_MAX;
    for (int run = 2; run <= size; run *= 2)
        for (int step = run / 2; step > 0; step /= 2) {
            planners_sync<BARRIER>();
#pragma unroll 1
            for (int i = threadIdx.x; i < size; i += PLANNERS) {
                const int other = i ^ step;
                if (other <= i || (x[i] > x[other]) != ((i & run) == 0)) continue;
                const int32_t held = x[i];
                x[i] = x[other];
                x[other] = held;
            }
        }
    planners_sync<BARRIER>();
}

/* The query's sequence and its row there; false past the last sequence. Varlen: also where its entries
 * begin where they follow one another, each sequence having a whole number of them. */
template <int BARRIER>
__device__ __forceinline__ bool find_query(const mqa_planner &a, plan_room &m, int64_t row, sequence *s,
                                           int64_t *query, int64_t *entry0)
{
    *entry0 = 0;
    if (a.of.cu_q == NULL) {
        const uint32_t b = quotient((uint32_t)row, a.n_q);
        *s = sequence_at(a.of, b);
        *query = row - (int64_t)b * a.of.n_q;
        return true;
    }
    planners_sync<BARRIER>();
    if (threadIdx.x == 0) m.found = -1;
    planners_sync<BARRIER>();
    int before = 0;
#pragma unroll 1
    for (int64_t b = threadIdx.x; b < a.of.batch; b += PLANNERS) {
        const sequence q = sequence_at(a.of, b);
        if (row >= q.q0 && row < q.q0 + q.nq) atomicMax(&m.found, (int)b);
    }
    planners_sync<BARRIER>();
    const int found = m.found;
    if (found < 0) return false;
#pragma unroll 1
    for (int64_t b = threadIdx.x; a.entries.table == NULL && b < found; b += PLANNERS)
        before += (int)quotient((uint32_t)sequence_at(a.of, b).nq, a.ratio);
    *entry0 = planners_sum<BARRIER>(m, before);
    *s = sequence_at(a.of, found);
    *query = row - s->q0;
    return true;
}

/* What the planners find of a query's list and of the pages that it needs, in one sum. */
struct list_state {
    int entries; /* of a clean list: visible ones, ascending, and then none */
    bool clean, missing;
};
enum { ENTRY_BITS = 14, PLANNER_BITS = 8 };
static_assert(MQA_LIST_MOST < 1 << ENTRY_BITS && PLANNERS < 1 << PLANNER_BITS, "a sum holds the counts");
template <int BARRIER>
__device__ __forceinline__ list_state planners_state(plan_room &m, int entries, bool clean, bool missing)
{
    const int all =
        planners_sum<BARRIER>(m, entries | !clean << ENTRY_BITS | missing << (ENTRY_BITS + PLANNER_BITS));
    return {all & ((1 << ENTRY_BITS) - 1), (all >> ENTRY_BITS & ((1 << PLANNER_BITS) - 1)) == 0,
            all >> (ENTRY_BITS + PLANNER_BITS) != 0};
}

/* This thread's part of a list: how many entries are some, whether it can be clean, and whether a page is
 * missing. */
__device__ __forceinline__ int look_at_list(const mqa_planner &a, const int32_t *list, int most, int visible,
                                            int b, bool *clean, bool *missing)
{
    enum { AT_ONCE = 4 };
    int entries = 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < most; first += PLANNERS * AT_ONCE) {
        int32_t x[AT_ONCE], next[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + j * PLANNERS;
            x[j] = i < most ? list[i] : -1;
            next[j] = i + 1 < most ? list[i + 1] : -1;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const bool seen = x[j] >= 0 && x[j] < visible;
            entries += x[j] >= 0;
            *clean =
                *clean && x[j] >= -1 && x[j] < visible && (next[j] == -1 || (x[j] >= 0 && next[j] > x[j]));
            if (a.entries.table != NULL && seen) *missing |= !row_exists(a.entries, b, x[j]);
        }
    }
    return entries;
}

/* Cleans a query's list into `to` and returns how many entries it keeps; *missing: whether a page is. */
template <int BARRIER>
__device__ __forceinline__ int clean_list(const mqa_planner &a, plan_room &m, const int32_t *given,
                                          int32_t *to, int most, int visible, int64_t entries, int b,
                                          bool *bad, bool *missing)
{
    int n = 0, all;
#pragma unroll 1
    for (int i = threadIdx.x; i - (int)threadIdx.x < most; i += PLANNERS) {
        const int32_t x = i < most ? given[i] : -1;
        *bad = *bad || x < -1 || x >= entries;
        const bool keep = x >= 0 && x < visible;
        const int rank = planner_rank<BARRIER>(m, keep, &all);
        if (keep) m.sorted[n + rank] = x;
        n += all;
    }
    planners_sync<BARRIER>();
    bool falls = false;
#pragma unroll 1
    for (int i = 1 + threadIdx.x; i < n; i += PLANNERS) falls = falls || m.sorted[i] <= m.sorted[i - 1];
    if (any_planner<BARRIER>(falls)) sort_list<BARRIER>(m.sorted, n);
    int kept = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i - (int)threadIdx.x < n; i += PLANNERS) {
        const bool keep = i < n && (i == 0 || m.sorted[i] != m.sorted[i - 1]);
        const int rank = planner_rank<BARRIER>(m, keep, &all);
        if (keep) to[kept + rank] = m.sorted[i];
        kept += all;
    }
    bool none = false;
    for (int i = threadIdx.x; a.entries.table != NULL && i < n; i += PLANNERS)
        none = none || !row_exists(a.entries, b, m.sorted[i]);
    *bad = any_planner<BARRIER>(*bad);
    *missing = *missing || any_planner<BARRIER>(none);
    return kept;
}

/* Whether a table names no page for one of this thread's raw rows, or of its entries without a list. */
__device__ __forceinline__ bool page_missing(const mqa_planner &a, const mqa_query &q)
{
    bool missing = false;
    if (a.raw.table != NULL)
#pragma unroll 1
        for (int i = threadIdx.x; i < q.raw; i += PLANNERS) missing |= !row_exists(a.raw, q.b, q.raw0 + i);
    if (a.entries.table != NULL && a.list == NULL)
#pragma unroll 1
        for (int i = threadIdx.x * (int)a.entries.slots.d; i < q.entries;
             i += PLANNERS * (int)a.entries.slots.d)
            missing |= !row_exists(a.entries, q.b, i);
    return missing;
}

/* Where the tokens of sequence b begin, and the position of a query of a batch. */
__device__ __forceinline__ int64_t start_of(const mqa_planner &a, int64_t b)
{
    const int64_t given = a.positions != NULL ? a.positions[b] : a.position;
    return given < 0 ? 0 : given;
}
__device__ __forceinline__ int position_of(const mqa_planner &a, int query)
{
    const int b = quotient(query, a.n_q);
    return (int)start_of(a, b) + query - b * (int)a.of.n_q;
}

/* What a query of a sequence sees; *entries: how many the sequence has. */
__device__ __forceinline__ mqa_query query_of(const mqa_planner &a, const sequence &s, int64_t query,
                                              int64_t entry0, int64_t *entries)
{
    const int64_t start = start_of(a, s.b), tokens = start + s.nq; /* as its position, below 2^31 */
    const bool follow = a.of.cu_q != NULL && a.entries.table == NULL;
    const int64_t raw = a.raw.table != NULL ? tokens : s.nk, position = start + query,
                  own = position - (tokens - raw), /* own raw row */
        first = mask_window_first(own, a.window), end = own + 1 < raw ? own + 1 : raw,
                  whole = quotient((uint32_t)(position + 1), a.ratio);
    *entries = a.entries.p == NULL       ? 0
               : follow                  ? quotient((uint32_t)s.nq, a.ratio)
               : a.entries.table != NULL ? quotient((uint32_t)tokens, a.ratio)
                                         : a.entry_rows;
    return {(int32_t)s.view_b,
            (int32_t)(s.q0 + query),
            (int32_t)position,
            (int32_t)((a.raw.table != NULL ? 0 : s.k0) + first),
            (int32_t)(end > first ? end - first : 0),
            (int32_t)entry0,
            (int32_t)(whole < *entries ? whole : *entries),
            (int32_t)s.b};
}

/* Plans a query: m.query and m.list, for all planners. */
template <int BARRIER>
__device__ __forceinline__ void plan_query(const mqa_planner &a, plan_room &m, int64_t row)
{
    int64_t query, entry0, entries;
    sequence s;
    mqa_query q = {0, (int32_t)row, 0, 0, 0, 0, 0, 0};
    const int32_t *list = NULL;
    bool bad = false, missing = false, as_given = false;
    if (find_query<BARRIER>(a, m, row, &s, &query, &entry0)) {
        q = query_of(a, s, query, entry0, &entries);
        const int visible = q.entries;
        int most = a.k, listed = 0;
        bool clean = true;
        missing = page_missing(a, q);
        if (a.list != NULL) {
            list = a.list + q.sequence * a.list_row[0] + q.row * a.list_row[1];
            if (a.count != NULL)
                most = min(most, a.count[q.sequence * a.count_row[0] + q.row * a.count_row[1]]);
            listed = look_at_list(a, list, most, visible, q.b, &clean, &missing);
        }
        const list_state all = planners_state<BARRIER>(m, listed, clean, missing);
        missing = all.missing;
        as_given = all.clean && !missing;
        if (a.list != NULL) {
            q.entries = all.entries;
            if (!all.clean) {
                int32_t *const to = a.kept + (row - a.row0) * a.k;
                q.entries = clean_list<BARRIER>(a, m, list, to, most, visible, entries, q.b, &bad, &missing);
                list = to;
            }
        }
    }
    planners_sync<BARRIER>(); /* the plan before has been read */
    if (threadIdx.x == 0) {
        if (missing) q.raw = q.entries = 0;
        m.query = q;
        m.list = list;
        m.as_given = as_given;
        if (a.status != NULL && (bad || missing))
            atomicOr(a.status, (bad ? QUERN_STATUS_BAD_INDEX : 0) | (missing ? QUERN_STATUS_BAD_PAGE : 0));
    }
    planners_sync<BARRIER>();
}

} // namespace mqa

#endif
