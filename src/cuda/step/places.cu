/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * places.cu - where the rows of a step go: one block, as a sequence's raw rows stand behind those of the
 * sequences before that have not stopped. It looks through the rows of up to some hundred tokens itself, in
 * less time than a launch takes; those of more a launch before it does, a warp a row. Limit: latency.
 */
#include "common/launch.cuh"
#include "step/params.cuh"
#include "variants.cuh"

/* Blocks of 1024 threads would wait for a whole multiprocessor beside other kernels of a graph. */
enum { THREADS = 512, WARPS = THREADS / 32, CHECKS = 3, FEW_BYTES = 1 << 19 };

struct checked_rows {
    const float *p; /* NULL: not checked */
    int64_t row_s, count;
    int32_t width;
    bool wide; /* rows can be read four numbers at a time */
};

struct places_kernel {
    step_view step;
    int64_t ratio, page, ring, window;
    const int32_t *raw_of, *pages_of;
    int64_t pages_s[2];
    checked_rows check[CHECKS]; /* of tokens, of entries twice */
    bool inside;                /* checked by the block itself */
    int32_t *bad;               /* i32 [B]: not 0 where a row is not finite; NULL: nothing is checked */
    int32_t *made;              /* i32 [B]: the first entry */
    int32_t *fault;
    int64_t fault_s;
    int32_t *slots, *cu_raw;
    int64_t *raw_slots, *entry_slots, *old, *kept, *returned;
    int64_t tokens, entries; /* that there is room for */
    int32_t *status;
};

/* The sum over the block's threads before this one, and of all in `total`. */
__device__ __forceinline__ int64_t sum_before(int64_t x, int64_t (&parts)[WARPS], int64_t &total)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int64_t sum = x;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int64_t other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
    }
    __syncthreads();
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    int64_t before = 0;
    total = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += parts[w];
        total += parts[w];
    }
    return before + sum - x;
}

/* Notes the sequence of a row that is not finite. */
__device__ __noinline__ void note_bad(const places_kernel &a, bool of_entries, int64_t row)
{
    int64_t before = 0;
    for (int64_t b = 0; b < a.step.batch; b++) {
        const step_place p = step_place_at(a.step, a.ratio, b);
        const int64_t first = of_entries ? before : p.row, count = of_entries ? p.made : p.count;
        if (row >= first && row < first + count) a.bad[b] = 1;
        before += p.made;
    }
}

/* Whether the warp's row has a number that is not finite. Four reads are under way at a time. */
__device__ __forceinline__ bool is_bad(const checked_rows &c, const float *row)
{
    enum { AHEAD = 4 };
    const int lane = (int)threadIdx.x % 32, each = c.wide ? 4 : 1, count = c.width / each;
    uint32_t most = 0;
    for (int i = lane; i < count; i += 32 * AHEAD) {
        uint4 x[AHEAD] = {};
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int at = i + 32 * k;
            if (at >= count) continue;
            if (c.wide) x[k] = ((const uint4 *)row)[at];
            else x[k].x = ((const uint32_t *)row)[at];
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            most = max(max(max(most, x[k].x << 1), x[k].y << 1), max(x[k].z << 1, x[k].w << 1));
    }
    return __any_sync(~0u, most >= 0xff000000u);
}

/* Warp `warp` of `warps` looks through its share of the first rows, so many of tokens and of entries. */
__device__ __forceinline__ void check_rows(const places_kernel &a, int64_t warp, int64_t warps,
                                           int64_t tokens, int64_t entries)
{
    for (int k = 0; k < CHECKS; k++) {
        const checked_rows &c = a.check[k];
        if (c.p == NULL) continue;
        const int64_t most = k == 0 ? tokens : entries, count = c.count < most ? c.count : most;
        for (int64_t row = warp; row < count; row += warps)
            if (is_bad(c, c.p + row * c.row_s) && threadIdx.x % 32 == 0) note_bad(a, k > 0, row);
    }
}

__global__ void __launch_bounds__(THREADS) check_places(const __grid_constant__ places_kernel a)
{
    check_rows(a, (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, (int64_t)gridDim.x * WARPS, INT64_MAX,
               INT64_MAX);
}

__device__ __forceinline__ void set_run(int64_t *run, int64_t from, int64_t to, int64_t count)
{
    run[0] = from;
    run[1] = to;
    run[2] = count;
}

/* Rows [first, first + n) of a sequence between its ring and rows `row` on of the call: two runs. */
__device__ __forceinline__ void ring_runs(const places_kernel &a, int64_t *runs, int64_t b, int64_t first,
                                          int64_t n, int64_t row, bool from_ring)
{
    const int64_t page = a.raw_of[b] * a.ring, slot = (uint32_t)first % (uint32_t)a.ring,
                  one = n < a.ring - slot ? n : a.ring - slot;
    runs += 6 * b;
    set_run(runs, from_ring ? page + slot : row, from_ring ? row : page + slot, one);
    set_run(runs + 3, from_ring ? page : row + one, from_ring ? row + one : page, n - one);
}

/* Old rows of a sequence that the step's see. */
__device__ __forceinline__ int64_t old_rows(const places_kernel &a, const step_place &p)
{
    return !p.live ? 0 : p.first < a.window - 1 ? p.first : a.window - 1;
}

/* What takes a few numbers of sequence b, whose raw rows of the call begin at `row`. */
__device__ __forceinline__ void put_sequence(const places_kernel &a, const step_place &p, int64_t b,
                                             int64_t row)
{
    const int64_t old = old_rows(a, p), count = p.live ? p.count : 0, last = count < a.ring ? count : a.ring;
    a.slots[b] = p.live ? (int32_t)p.slot : -1;
    a.cu_raw[b + 1] = (int32_t)(row + old + count);
    ring_runs(a, a.old, b, p.first - old, old, row, true);
    ring_runs(a, a.kept, b, p.first + p.count - last, last, row + old + count - last, false);
    if (a.returned != NULL) set_run(a.returned + 3 * b, b, p.live ? p.slot : 0, p.live);
}

/* The rows of sequence b's tokens and entries, by the thread `lane` of `lanes`. */
__device__ __forceinline__ void put_rows(const places_kernel &a, int64_t b, int64_t lane, int64_t lanes)
{
    const step_place p = step_place_at(a.step, a.ratio, b);
    const bool live = a.slots[b] >= 0;
    const int64_t row = a.cu_raw[b + 1] - p.count; /* of a live one */
    for (int64_t i = lane; i < p.count && p.row + i < a.tokens; i += lanes)
        a.raw_slots[p.row + i] = live ? row + i : -1;
    if (a.entry_slots == NULL) return;
    const int64_t first = a.made[b];
    for (int64_t i = lane; i < p.made && first + i < a.entries; i += lanes) {
        const int64_t e = p.whole + i, page = (uint32_t)e / (uint32_t)a.page;
        a.entry_slots[first + i] =
            live ? a.pages_of[b * a.pages_s[0] + page * a.pages_s[1]] * a.page + (e - page * a.page) : -1;
    }
}

__global__ void __launch_bounds__(THREADS) step_places(const __grid_constant__ places_kernel a)
{
    __shared__ int64_t parts[WARPS];
    const int64_t batch = a.step.batch;
    int64_t row = 0, entry = 0, tokens = 0, sum;
    if (batch > 0) {
        const step_place last = step_place_at(a.step, 0, batch - 1);
        tokens = last.row + last.count;
    }
    if (a.bad != NULL && a.inside) {
        int64_t made = 0, entries;
        for (int64_t b = threadIdx.x; b < batch; b += THREADS) {
            a.bad[b] = 0;
            made += step_place_at(a.step, a.ratio, b).made;
        }
        (void)sum_before(made, parts, entries);
        check_rows(a, threadIdx.x / 32, WARPS, tokens, entries);
        __syncthreads();
    }
    for (int64_t b0 = 0; b0 < batch; b0 += THREADS) {
        const int64_t b = b0 + threadIdx.x;
        step_place p = {};
        if (b < batch) p = step_place_at(a.step, a.ratio, b);
        if (p.live && a.bad != NULL && a.bad[b] != 0) {
            p.live = false;
            raise_status(a.status, QUERN_STATUS_NOT_FINITE);
            a.fault[p.slot * a.fault_s] |= QUERN_STATUS_NOT_FINITE;
        }
        const int64_t own = row + sum_before(old_rows(a, p) + (p.live ? p.count : 0), parts, sum);
        row += sum;
        if (a.entry_slots != NULL) {
            const int64_t first = entry + sum_before(p.made, parts, sum);
            if (b < batch) a.made[b] = (int32_t)first;
            entry += sum;
        }
        if (b < batch) put_sequence(a, p, b, own);
    }
    if (threadIdx.x == 0) a.cu_raw[0] = 0;
    __syncthreads();
    /* A warp a sequence, or of many tokens a sequence all threads. */
    const int64_t lanes = a.tokens > 32 * batch ? THREADS : 32;
    for (int64_t b = threadIdx.x / lanes; b < batch; b += THREADS / lanes)
        put_rows(a, b, threadIdx.x % lanes, lanes);
    for (int64_t t = tokens + threadIdx.x; t < a.tokens; t += THREADS) a.raw_slots[t] = -1;
    for (int64_t i = entry + threadIdx.x; a.entry_slots != NULL && i < a.entries; i += THREADS)
        a.entry_slots[i] = -1;
}

static checked_rows checked_of(const quern_tensor &t)
{
    checked_rows c = {};
    if (!present(t)) return c;
    c.p = (const float *)t.data;
    c.row_s = t.strides[0];
    c.count = t.shape[0];
    c.width = (int32_t)t.shape[1];
    c.wide = (c.width | c.row_s) % 4 == 0 && (uintptr_t)c.p % 16 == 0;
    return c;
}

static size_t workspace(const stage_exec *, const step_places_args *args)
{
    return room_for((size_t)(2 * args->step.slots.shape[0] + 1) * sizeof(int32_t));
}

static quern_status run(const stage_exec *exec, const step_places_args *args, void *memory)
{
    const quern_tensor *const checked[CHECKS] = {&args->rows, &args->entries, &args->keys};
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    places_kernel a = {};
    int64_t rows = 0, bytes = 0;
    a.step = step_view_of(args->step, args->raw_slots.shape[0]);
    a.ratio = args->ratio;
    a.page = args->page;
    a.ring = args->ring;
    a.window = args->window;
    a.raw_of = (const int32_t *)args->raw_of.data;
    if (present(args->pages_of)) {
        a.pages_of = (const int32_t *)args->pages_of.data;
        for (int i = 0; i < 2; i++) a.pages_s[i] = args->pages_of.strides[i];
    }
    for (int k = 0; k < CHECKS; k++) {
        a.check[k] = checked_of(*checked[k]);
        rows += a.check[k].count;
        bytes += a.check[k].count * a.check[k].width * (int64_t)sizeof(float);
    }
    a.inside = bytes <= FEW_BYTES;
    a.made = room_at<int32_t>(memory);
    if (present(args->fault)) {
        a.bad = a.made + a.step.batch;
        a.fault = (int32_t *)args->fault.data;
        a.fault_s = args->fault.strides[0];
    }
    a.slots = (int32_t *)args->slots.data;
    a.cu_raw = (int32_t *)args->cu_raw.data;
    a.raw_slots = (int64_t *)args->raw_slots.data;
    a.tokens = args->raw_slots.shape[0];
    a.old = (int64_t *)args->old.data;
    a.kept = (int64_t *)args->kept.data;
    if (present(args->returned)) a.returned = (int64_t *)args->returned.data;
    if (present(args->entry_slots)) {
        a.entry_slots = (int64_t *)args->entry_slots.data;
        a.entries = args->entry_slots.shape[0];
    }
    a.status = exec->status;
    if (a.bad != NULL && !a.inside && a.step.batch > 0) {
        const cudaError_t code = cudaMemsetAsync(a.bad, 0, (size_t)a.step.batch * sizeof(int32_t), stream);
        if (code != cudaSuccess) return cuda_report(code, "step_places' sequences");
        const int64_t blocks = (rows + WARPS - 1) / WARPS, most = 2 * exec->multiprocessors;
        check_places<<<(unsigned)(blocks < most ? blocks : most), THREADS, 0, stream>>>(a);
    }
    step_places<<<1, THREADS, 0, stream>>>(a);
    return LAUNCHED("places of a step's rows");
}

extern const variant<step_places_args> step_places_any = {"step_places_any", NULL, workspace, run};
