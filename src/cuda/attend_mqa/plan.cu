/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plan.cu - the plan of attention whose heads share their keys: a block a query. It finds the query's
 * sequence, cleans its list and looks whether the tables name a page for every row it needs; a query of which
 * one is missing sees nothing and sets the status bit, as entries out of range do.
 */
#include "attend_mqa/params.cuh"
#include "stages/mask.h"

enum { THREADS = 128, WARPS = THREADS / 32, ALIGNMENT = 16 };

struct mqa_planner {
    seqs of;
    row_source raw, entries;
    const int32_t *positions, *list, *count;
    int64_t list_row[2], count_row[2];
    int64_t position, window, entry_rows;
    uint32_t ratio;
    int32_t k;
    mqa_query *queries;
    int32_t *kept, *status;
};

/* The sum over a block; `count` has a slot a warp. */
__device__ int block_sum(int x, int *count)
{
    for (int w = 16; w > 0; w /= 2) x += __shfl_xor_sync(~0u, x, w);
    __syncthreads();
    if (threadIdx.x % 32 == 0) count[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int w = 0; w < WARPS; w++) x += count[w];
    return x;
}

/* How many threads before this one have `here`; *all: of the block. */
__device__ int block_rank(bool here, int *count, int *all)
{
    const unsigned bits = __ballot_sync(~0u, here);
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) count[warp] = __popc(bits);
    __syncthreads();
    int before = __popc(bits & ((1u << threadIdx.x % 32) - 1));
    *all = 0;
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? count[w] : 0;
        *all += count[w];
    }
    return before;
}

/* Sorts n numbers >= 0, in place; there is room up to the next power of two. */
__device__ void block_sort(int32_t *x, int n)
{
    int size = 1;
    while (size < n) size *= 2;
    for (int i = n + threadIdx.x; i < size; i += THREADS) x[i] = INT32_MAX;
    for (int run = 2; run <= size; run *= 2)
        for (int apart = run / 2; apart > 0; apart /= 2) {
            __syncthreads();
            for (int i = threadIdx.x; i < size; i += THREADS) {
                const int other = i ^ apart;
                if (other <= i || (x[i] > x[other]) != ((i & run) == 0)) continue;
                const int32_t held = x[i];
                x[i] = x[other];
                x[other] = held;
            }
        }
    __syncthreads();
}

/* The query's sequence and its row there; false past the last sequence. Varlen: also where its entries
 * begin, each sequence having a whole number of them. */
__device__ bool find_query(const mqa_planner &a, int64_t row, int *count, sequence *s, int64_t *query,
                           int64_t *entry0)
{
    *entry0 = 0;
    if (a.of.cu_q == NULL) {
        const int64_t b = row / a.of.n_q;
        *s = sequence_at(a.of, b);
        *query = row - b * a.of.n_q;
        return true;
    }
    __shared__ int found;
    if (threadIdx.x == 0) found = -1;
    __syncthreads();
    int before = 0;
    for (int64_t b = threadIdx.x; b < a.of.batch; b += THREADS) {
        const sequence q = sequence_at(a.of, b);
        if (row >= q.q0 && row < q.q0 + q.nq) atomicMax(&found, (int)b);
    }
    __syncthreads();
    if (found < 0) return false;
    for (int64_t b = threadIdx.x; b < found; b += THREADS)
        before += (int)((uint32_t)sequence_at(a.of, b).nq / a.ratio);
    *entry0 = block_sum(before, count);
    *s = sequence_at(a.of, found);
    *query = row - s->q0;
    return true;
}

/* Cleans the query's list into a.kept and returns how many entries it keeps. */
__device__ int clean_list(const mqa_planner &a, int64_t row, int64_t b, int64_t at, int visible,
                          int64_t entries, int *count, bool *bad)
{
    extern __shared__ int32_t held[];
    const int32_t *given = a.list + b * a.list_row[0] + at * a.list_row[1];
    int32_t *to = a.kept + row * a.k;
    int most = a.k, n = 0, all;
    if (a.count != NULL) most = min(most, a.count[b * a.count_row[0] + at * a.count_row[1]]);
    for (int i = threadIdx.x; i - (int)threadIdx.x < most; i += THREADS) {
        const int32_t x = i < most ? given[i] : -1;
        *bad = *bad || x < -1 || x >= entries;
        const bool keep = x >= 0 && x < visible;
        const int rank = block_rank(keep, count, &all);
        if (keep) held[n + rank] = x;
        n += all;
    }
    __syncthreads();
    bool falls = false;
    for (int i = 1 + threadIdx.x; i < n; i += THREADS) falls = falls || held[i] <= held[i - 1];
    if (__syncthreads_or(falls)) block_sort(held, n);
    int kept = 0;
    for (int i = threadIdx.x; i - (int)threadIdx.x < n; i += THREADS) {
        const bool keep = i < n && (i == 0 || held[i] != held[i - 1]);
        const int rank = block_rank(keep, count, &all);
        if (keep) to[kept + rank] = held[i];
        kept += all;
    }
    return kept;
}

/* Whether a table names no page for one of the rows that a query sees. */
__device__ bool page_missing(const mqa_planner &a, const mqa_query &q, int64_t row)
{
    bool missing = false;
    if (a.raw.table != NULL)
        for (int i = threadIdx.x; i < q.raw; i += THREADS)
            missing = missing || !row_exists(a.raw, q.sequence, q.raw0 + i);
    if (a.entries.table != NULL && a.list == NULL)
        for (int i = threadIdx.x * (int)a.entries.slots.d; i < q.entries;
             i += THREADS * (int)a.entries.slots.d)
            missing = missing || !row_exists(a.entries, q.sequence, i);
    if (a.entries.table != NULL && a.list != NULL) {
        __syncthreads(); /* the list is whole */
        for (int i = threadIdx.x; i < q.entries; i += THREADS)
            missing = missing || !row_exists(a.entries, q.sequence, a.kept[row * a.k + i]);
    }
    return __syncthreads_or(missing);
}

__global__ void __launch_bounds__(THREADS) mqa_plan(const __grid_constant__ mqa_planner a)
{
    __shared__ int count[WARPS];
    const int64_t row = blockIdx.x;
    int64_t query, entry0;
    sequence s;
    mqa_query out = {0, (int32_t)row, 0, 0, 0, 0, 0, 0};
    bool bad = false, missing = false;
    if (find_query(a, row, count, &s, &query, &entry0)) {
        const int64_t given = a.positions != NULL ? a.positions[s.b] : a.position,
                      start = given < 0 ? 0 : given, tokens = start + s.nq;
        const bool varlen = a.of.cu_q != NULL;
        const int64_t raw = a.raw.table != NULL ? tokens : s.nk,
                      entries = a.entries.p == NULL       ? 0
                                : varlen                  ? (int64_t)((uint32_t)s.nq / a.ratio)
                                : a.entries.table != NULL ? tokens / a.ratio
                                                          : a.entry_rows;
        const int64_t position = start + query, own = position - (tokens - raw), /* own raw row */
            first = mask_window_first(own, a.window), end = own + 1 < raw ? own + 1 : raw,
                      whole = mask_entries(position + 1, a.ratio, a.ratio);
        const int visible = (int)(whole < entries ? whole : entries);
        out = {(int32_t)s.view_b,
               (int32_t)(s.q0 + query),
               (int32_t)position,
               (int32_t)(s.k0 + first),
               (int32_t)(end > first ? end - first : 0),
               (int32_t)entry0,
               visible,
               0};
        if (a.list != NULL)
            out.entries = clean_list(a, row, s.view_b, out.row, visible, entries, count, &bad);
        if (page_missing(a, out, row)) {
            out.raw = out.entries = 0;
            missing = true;
        }
    }
    bad = __syncthreads_or(bad);
    if (threadIdx.x != 0) return;
    a.queries[row] = out;
    if (a.status != NULL && (bad || missing))
        atomicOr(a.status, (bad ? QUERN_STATUS_BAD_INDEX : 0) | (missing ? QUERN_STATUS_BAD_PAGE : 0));
}

static int64_t queries_of(const attend_mqa_args *args)
{
    return args->q.shape[0] * args->q.shape[1];
}

static int64_t list_of(const attend_mqa_args *args)
{
    return present(args->list) ? args->list.shape[2] : 0;
}

bool mqa_takes(const attend_mqa_args *args, char why[STAGE_WHY_BYTES])
{
    const bool bytes = args->format == ENTRY_ROW584;
    const quern_dtype kv = args->kv.dtype;
    if (args->q.dtype == QUERN_F32 || (bytes ? args->q.dtype != QUERN_BF16 : kv != args->q.dtype))
        snprintf(why, STAGE_WHY_BYTES,
                 "q is %s and kv %s: the cuda backend takes bf16 or f16 for both, or bf16 with rows of bytes",
                 dtype_text(args->q.dtype), dtype_text(kv));
    else if (args->q.shape[3] > MQA_DIM)
        snprintf(why, STAGE_WHY_BYTES, "head dim %lld: the cuda backend takes multiples of 8 up to %d",
                 (long long)args->q.shape[3], MQA_DIM);
    else if (list_of(args) > MQA_LIST_MOST)
        snprintf(why, STAGE_WHY_BYTES, "lists of %lld entries: the cuda backend takes up to %d",
                 (long long)list_of(args), MQA_LIST_MOST);
    else if (queries_of(args) > INT32_MAX / 4 || args->ratio > INT32_MAX)
        snprintf(why, STAGE_WHY_BYTES,
                 "%lld queries, a ratio of %lld: the cuda backend takes up to %d and %d",
                 (long long)queries_of(args), (long long)args->ratio, INT32_MAX / 4, INT32_MAX);
    else if ((present(args->seqs.cu_q) && (present(args->seqs.cu_kv) || present(args->positions))) ||
             (bytes && present(args->entries_table) && args->entries.ndim == 3))
        snprintf(why, STAGE_WHY_BYTES,
                 "sequences of any lengths from a cache: the cuda backend takes one length");
    else return true;
    return false;
}

size_t attend_mqa_bytes(const stage_exec *, const attend_mqa_args *args)
{
    const size_t n = (size_t)queries_of(args);
    return n * sizeof(mqa_query) + n * (size_t)list_of(args) * sizeof(int32_t) + ALIGNMENT;
}

static mqa_kernel kernel_of(const attend_mqa_args *args, const mqa_planner &plan)
{
    mqa_kernel a = {};
    a.queries = plan.queries;
    a.list = plan.list != NULL ? plan.kept : NULL;
    a.list_row = plan.k;
    a.rows = (int32_t)queries_of(args);
    a.raw = plan.raw;
    a.entries = plan.entries;
    a.bytes = args->format == ENTRY_ROW584;
    a.q = view4_of(args->q);
    a.o = view4_of(args->o);
    a.lse = view3_of(args->lse);
    a.lse_win = view3_of(args->lse_win);
    a.sink = (const float *)args->sink.data;
    if (present(args->cos_sin))
        a.rotation = {args->cos_sin.data, args->cos_sin.strides[0], args->cos_sin.dtype,
                      (int32_t)args->cos_sin.shape[1]};
    a.heads = (int32_t)args->q.shape[2];
    a.dim = (int32_t)args->q.shape[3];
    a.scale = args->scale;
    a.scale2 = args->scale * 1.44269504089f;
    a.q_wide = rows_aligned16(args->q);
    a.o_wide = rows_aligned16(args->o);
    return a;
}

quern_status mqa_make_plan(const stage_exec *exec, const attend_mqa_args *args, void *workspace,
                           mqa_kernel *a)
{
    const int64_t rows = queries_of(args), codes = args->format == ENTRY_ROW584 ? MQA_CODES : 0;
    mqa_planner p = {};
    p.of = seqs_of(args->seqs);
    p.raw = row_source_of(args->kv, args->kv_table, args->page, codes);
    p.entries = row_source_of(args->entries, args->entries_table, args->page, codes);
    p.positions = (const int32_t *)args->positions.data;
    p.position = args->position;
    p.window = args->window;
    p.entry_rows = present(args->entries) ? args->entries.shape[1] : 0;
    p.ratio = (uint32_t)args->ratio;
    p.queries = (mqa_query *)(((uintptr_t)workspace + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    p.kept = (int32_t *)(p.queries + rows);
    p.status = exec->status;
    if (present(args->list)) {
        p.list = (const int32_t *)args->list.data;
        p.k = (int32_t)args->list.shape[2];
        for (int i = 0; i < 2; i++) p.list_row[i] = args->list.strides[i];
    }
    if (present(args->count)) {
        p.count = (const int32_t *)args->count.data;
        for (int i = 0; i < 2; i++) p.count_row[i] = args->count.strides[i];
    }
    *a = kernel_of(args, p);
    size_t room = 1;
    while (room < (size_t)p.k) room *= 2;
    return launch_shared({(cudaStream_t)exec->stream, NULL}, mqa_plan, dim3((unsigned)rows), THREADS,
                         room * sizeof(int32_t), "plan of queries", p);
}
