/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * tokens.cu - which sequences of a step run, and where their tokens stand: a warp a sequence. Every block
 * adds up the step's offsets itself, so that no launch comes before. Limit: latency, of the step's numbers
 * and of what a slot leads to: most of it is in no cache, so all is asked for before any of it is needed.
 */
#include "common/launch.cuh"
#include "common/step.cuh"
#include "step/params.cuh"
#include "variants.cuh"

enum { THREADS = 128, WARPS = THREADS / 32 };

struct tokens_kernel {
    step_view step;
    int64_t ratio, page, pages, raw_pages, rollback, most, slot_count;
    const int32_t *merged[2], *raw_table, *table; /* merged, table: or NULL */
    int64_t merged_s[2], raw_table_s, table_s[2];
    int32_t columns;
    int32_t *fault; /* or NULL */
    int64_t fault_s, faults;
    int32_t *cu, *slots, *positions, *starts, *pages_of, *raw_of, *at, *own; /* own: or NULL */
    int64_t *copied;
    int32_t *status;
};

/* Sequence b as the step has it. */
struct tokens_run {
    int64_t slot, first, from, rows; /* rows from `from` on, also of a sequence without a slot */
};

__device__ __forceinline__ tokens_run run_of(const tokens_kernel &a, int64_t b)
{
    const int32_t *const rows = a.step.rows + b * a.step.rows_s[0];
    const int64_t from = rows[0], to = rows[a.step.rows_s[1]];
    return {step_slot(a.step, b), a.step.positions[b * a.step.positions_s], from, to - from};
}

__device__ __forceinline__ void ask(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* Asks for sequence b's pages. A warp calls. */
__device__ __forceinline__ void ask_pages(const tokens_kernel &a, int64_t b)
{
    enum { LINE = 128 / sizeof(int32_t) };
    const int lane = (int)threadIdx.x % 32;
    if (lane == 0) ask(a.raw_table + b * a.raw_table_s);
    if (a.table == NULL || a.table_s[1] != 1) return;
    for (int64_t c = lane * LINE; c < a.columns; c += 32 * LINE) ask(a.table + b * a.table_s[0] + c);
}

/* Asks for what a slot leads to. */
__device__ __forceinline__ void ask_slot(const tokens_kernel &a, int64_t slot)
{
    if (slot < 0 || slot >= a.slot_count) return;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (a.merged[i] != NULL) ask(a.merged[i] + slot * a.merged_s[i]);
    if (a.fault != NULL && slot < a.faults) ask(a.fault + slot * a.fault_s);
}

/* Rows of the sequences before the block's first one, and of all; bad: some offset is wrong. */
__device__ __forceinline__ step_sums add_rows(const tokens_kernel &a)
{
    const bool offsets = a.step.rows_s[0] == a.step.rows_s[1]; /* the rows are cu_seqlens: they start at 0 */
    const int64_t own = (int64_t)blockIdx.x * WARPS;
    int64_t before = 0, total = 0;
    bool bad = false;
    for (int64_t b = threadIdx.x; b < a.step.batch; b += THREADS) {
        const tokens_run r = run_of(a, b);
        bad = bad || r.from < 0 || (offsets && b == 0 && r.from != 0) || r.rows < 0 ||
              r.from + r.rows > a.step.total;
        total += r.rows;
        if (b < own) before += r.rows;
        else if (b < own + WARPS) ask_slot(a, r.slot);
    }
    return add_threads<WARPS>(before, total, bad);
}

__device__ __forceinline__ int64_t pages_before(const tokens_kernel &a, int64_t tokens)
{
    return a.ratio > 0 ? mask_blocks(tokens / a.ratio, a.page) : 0;
}

/* Whether an earlier sequence of the step has tokens and the slot. A warp calls. */
__device__ __forceinline__ bool is_taken(const tokens_kernel &a, int64_t b, int64_t slot)
{
    bool found = false;
    for (int64_t i = threadIdx.x % 32; i < b; i += 32) {
        const tokens_run r = run_of(a, i);
        found = found || (r.slot == slot && r.rows > 0);
    }
    return __any_sync(~0u, found);
}

/* Whether the rows in both states' sums allow the position. */
__device__ __forceinline__ bool has_position(const tokens_kernel &a, const tokens_run &r)
{
    bool good = r.first >= 0 && r.first <= a.most - r.rows;
    int64_t sums[2] = {r.first, r.first};
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (r.first > 0 && a.merged[i] != NULL) sums[i] = a.merged[i][r.slot * a.merged_s[i]];
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (r.first > 0) good &= sums[i] >= 0 && r.first >= sums[i] && r.first <= sums[i] + a.rollback;
    return good;
}

__device__ __forceinline__ bool has_pages(const tokens_kernel &a, int64_t b, const tokens_run &r)
{
    const int64_t needed = a.table != NULL ? pages_before(a, r.first + r.rows) : 0,
                  columns = needed < a.columns ? needed : a.columns;
    bool good = needed <= a.columns;
#pragma unroll 4
    for (int64_t c = threadIdx.x % 32; c < columns; c += 32)
        good &= (uint32_t)a.table[b * a.table_s[0] + c * a.table_s[1]] < (uint64_t)a.pages;
    good &= (uint32_t)a.raw_table[b * a.raw_table_s] < (uint64_t)a.raw_pages;
    return __all_sync(~0u, good);
}

/* Whether a sequence with tokens, or with a slot that is none, runs. A warp calls. */
__device__ __forceinline__ bool may_run(const tokens_kernel &a, int64_t b, const tokens_run &r)
{
    const bool slot = r.slot >= 0 && r.slot < a.slot_count && !is_taken(a, b, r.slot);
    int32_t *const fault = slot && a.fault != NULL && r.slot < a.faults ? a.fault + r.slot * a.fault_s : NULL;
    if (fault != NULL && r.first > 0 && *fault != 0) return false;
    int32_t bad = 0;
    if (!slot || !has_position(a, r)) bad = QUERN_STATUS_BAD_POSITION;
    else if (!has_pages(a, b, r)) bad = QUERN_STATUS_BAD_PAGE;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        if (bad != 0) raise_status(a.status, bad);
        if (fault != NULL) *fault = bad != 0 ? *fault | bad : 0;
    }
    return bad == 0;
}

/* The results of a sequence that has these rows from `row` on. */
__device__ __forceinline__ void put(const tokens_kernel &a, int64_t b, const tokens_run &r, bool runs,
                                    int64_t row, int64_t count)
{
    const int lane = (int)threadIdx.x % 32;
    const int64_t most = INT32_MAX - count, start = runs ? r.first : 0,
                  needed = pages_before(a, start + count), columns = needed < a.columns ? needed : a.columns;
    for (int64_t c = lane; c < columns; c += 32)
        a.pages_of[b * a.columns + c] = runs ? a.table[b * a.table_s[0] + c * a.table_s[1]] : 0;
    for (int64_t i = lane; i < count; i += 32) a.at[row + i] = runs ? (int32_t)(start + i) : 0;
    if (lane != 0) return;
    if (b == 0) a.cu[0] = 0;
    a.cu[b + 1] = (int32_t)(row + count);
    a.slots[b] = runs ? (int32_t)r.slot : -1;
    a.positions[b] = (int32_t)(r.first < 0 ? 0 : r.first < most ? r.first : most);
    a.starts[b] = (int32_t)start;
    a.raw_of[b] = runs ? a.raw_table[b * a.raw_table_s] : 0;
    if (a.own == NULL) return;
    a.own[b] = runs ? (int32_t)b : -1;
    a.copied[3 * b] = runs ? r.slot : 0;
    a.copied[3 * b + 1] = b;
    a.copied[3 * b + 2] = runs;
}

__global__ void __launch_bounds__(THREADS) step_tokens(const __grid_constant__ tokens_kernel a)
{
    const int64_t first = (int64_t)blockIdx.x * WARPS, b = first + threadIdx.x / 32;
    if (b < a.step.batch) ask_pages(a, b);
    const step_sums sum = add_rows(a);
    const bool good = !sum.bad;
    const int64_t total = good ? sum.total : 0;
    if (blockIdx.x == 0 && threadIdx.x == 0 && !good) raise_status(a.status, QUERN_STATUS_BAD_OFFSETS);
    for (int64_t t = total + (int64_t)blockIdx.x * THREADS + threadIdx.x; t < a.step.total;
         t += (int64_t)gridDim.x * THREADS)
        a.at[t] = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0 && a.step.batch == 0) a.cu[0] = 0;
    if (b >= a.step.batch) return;
    tokens_run r = run_of(a, b);
    int64_t row = sum.before;
    for (int64_t i = first; i < b && good; i++) row += run_of(a, i).rows;
    const int64_t count = good ? r.rows : 0;
    if (!good) row = r.rows = 0;
    const bool some = good && (r.slot < -1 || (r.slot >= 0 && count > 0));
    put(a, b, r, some && may_run(a, b, r), row, count);
}

static quern_status run(const stage_exec *exec, const step_tokens_args *args, void *)
{
    const quern_tensor *const merged[] = {&args->merged, &args->merged_index};
    tokens_kernel a = {};
    a.step = step_view_of(args->step, args->at.shape[0]);
    a.ratio = args->ratio;
    a.page = args->page;
    a.pages = args->pages;
    a.raw_pages = args->raw_pages;
    a.rollback = args->rollback;
    a.most = args->most;
    a.slot_count = args->slot_count;
    for (int i = 0; i < 2; i++) {
        a.merged[i] = present(*merged[i]) ? (const int32_t *)merged[i]->data : NULL;
        a.merged_s[i] = merged[i]->strides[0];
    }
    a.raw_table = (const int32_t *)args->raw_table.data;
    a.raw_table_s = args->raw_table.strides[0];
    if (present(args->table)) {
        a.table = (const int32_t *)args->table.data;
        a.columns = (int32_t)args->table.shape[1];
        for (int i = 0; i < 2; i++) a.table_s[i] = args->table.strides[i];
    }
    if (present(args->fault)) {
        a.fault = (int32_t *)args->fault.data;
        a.fault_s = args->fault.strides[0];
        a.faults = args->fault.shape[0];
    }
    a.cu = (int32_t *)args->cu.data;
    a.slots = (int32_t *)args->slots.data;
    a.positions = (int32_t *)args->positions.data;
    a.starts = (int32_t *)args->starts.data;
    a.pages_of = (int32_t *)args->pages_of.data;
    a.raw_of = (int32_t *)args->raw_of.data;
    a.at = (int32_t *)args->at.data;
    if (present(args->own)) {
        a.own = (int32_t *)args->own.data;
        a.copied = (int64_t *)args->copied.data;
    }
    a.status = exec->status;
    const unsigned grid = a.step.batch > 0 ? blocks_for(a.step.batch, WARPS) : 1;
    step_tokens<<<grid, THREADS, 0, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("a step's tokens");
}

extern const variant<step_tokens_args> step_tokens_any = {"step_tokens_any", NULL, NULL, run};
