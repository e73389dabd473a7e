/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * places.cu - where the rows of a step go: one block, as a sequence's raw rows stand behind those of the
 * sequences before. Steps of a few tokens a sequence have a kernel in which a thread keeps its sequence's
 * numbers from the first read to the last write. Limit: latency.
 */
#include "common/launch.cuh"
#include "common/scan.cuh"
#include "step/params.cuh"
#include "variants.cuh"

/* Blocks are small: beside other kernels of a graph a large one would wait for a whole multiprocessor. */
enum { THREADS = 256, WARPS = THREADS / 32 };
enum { FEW_THREADS = 512, FEW_WARPS = FEW_THREADS / 32, FEW_TOKENS = 8 };

struct places_kernel {
    step_view step;
    int64_t ratio, page, ring, window;
    const int32_t *raw_of, *pages_of;
    int64_t pages_s[2];
    int32_t *slots, *cu_raw, *first_entry;
    int64_t *raw_slots, *entry_slots, *old, *kept, *returned;
    int64_t tokens, entries; /* that there is room for */
};

/* The sum over the block's threads before this one, and of all in `total`. */
__device__ __forceinline__ int64_t sum_before(int64_t x, int64_t (&parts)[WARPS], int64_t &total)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t sum = sum_to_lane(x);
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

__device__ __forceinline__ void set_run(int64_t *run, int64_t from, int64_t to, int64_t count)
{
    run[0] = from;
    run[1] = to;
    run[2] = count;
}

/* Rows [first, first + n) of a sequence between its ring, which begins at row `page`, and rows `row` on of
 * the call: two runs. */
__device__ __forceinline__ void ring_runs(const places_kernel &a, int64_t *runs, int64_t page, int64_t first,
                                          int64_t n, int64_t row, bool from_ring)
{
    const int64_t slot = (uint32_t)first % (uint32_t)a.ring, one = n < a.ring - slot ? n : a.ring - slot;
    set_run(runs, from_ring ? page + slot : row, from_ring ? row : page + slot, one);
    set_run(runs + 3, from_ring ? page : row + one, from_ring ? row + one : page, n - one);
}

/* Old rows of a sequence that the step's see. */
__device__ __forceinline__ int64_t old_rows(const places_kernel &a, const step_place &p)
{
    return !p.live ? 0 : p.first < a.window - 1 ? p.first : a.window - 1;
}

/* What takes a few numbers of sequence b, whose ring begins at row `page` and whose raw rows of the call at
 * `row`. */
__device__ __forceinline__ void put_sequence(const places_kernel &a, const step_place &p, int64_t b,
                                             int64_t page, int64_t row)
{
    const int64_t old = old_rows(a, p), count = p.live ? p.count : 0, last = count < a.ring ? count : a.ring;
    a.slots[b] = p.live ? (int32_t)p.slot : -1;
    a.cu_raw[b + 1] = (int32_t)(row + old + count);
    ring_runs(a, a.old + 6 * b, page, p.first - old, old, row, true);
    ring_runs(a, a.kept + 6 * b, page, p.first + p.count - last, last, row + old + count - last, false);
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
    const int64_t first = a.first_entry[b];
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
    for (int64_t b0 = 0; b0 < batch; b0 += THREADS) {
        const int64_t b = b0 + threadIdx.x;
        step_place p = {};
        if (b < batch) p = step_place_at(a.step, a.ratio, b);
        const int64_t own = row + sum_before(old_rows(a, p) + (p.live ? p.count : 0), parts, sum);
        row += sum;
        if (a.entry_slots != NULL) {
            const int64_t first = entry + sum_before(p.made, parts, sum);
            if (b < batch) a.first_entry[b] = (int32_t)first;
            entry += sum;
        }
        if (b < batch) put_sequence(a, p, b, a.raw_of[b] * a.ring, own);
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

/* ---- a few tokens a sequence ---- */

struct few_shared {
    int32_t parts[2][FEW_WARPS];
};

/* The sum over the block's threads before this one; `total`: of all. `turn`: of the parts. */
__device__ __forceinline__ int32_t few_before(few_shared &m, int turn, int32_t x, int32_t &total)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int32_t sum = sum_to_lane(x);
    if (lane == 31) m.parts[turn][warp] = sum;
    __syncthreads();
    const int32_t part = lane < FEW_WARPS ? m.parts[turn][lane] : 0;
    total = __reduce_add_sync(~0u, part);
    return __reduce_add_sync(~0u, lane < warp ? part : 0) + sum - x;
}

/* Up to FEW_THREADS sequences. */
__global__ void __launch_bounds__(FEW_THREADS) step_places_few(const __grid_constant__ places_kernel a)
{
    __shared__ few_shared m;
    const int32_t batch = (int32_t)a.step.batch, b = (int32_t)threadIdx.x;
    const step_place last = step_place_at(a.step, 0, batch - 1);
    const int32_t tokens = (int32_t)(last.row + last.count);
    const bool some = b < batch, stores = a.entry_slots != NULL;
    step_place p = {};
    int64_t page = 0, entry_page = 0;
    int32_t entries, sum;
    if (some) {
        p = step_place_at(a.step, a.ratio, b);
        page = a.raw_of[b] * a.ring;
    }
    const uint32_t column = stores ? (uint32_t)p.whole / (uint32_t)a.page : 0;
    if (some && p.live && stores && p.made > 0)
        entry_page = a.pages_of[b * a.pages_s[0] + column * a.pages_s[1]];
    const int32_t first = few_before(m, 0, (int32_t)p.made, entries);
    const int64_t old = old_rows(a, p), row = few_before(m, 1, p.live ? (int32_t)(old + p.count) : 0, sum);
    if (b == 0) a.cu_raw[0] = 0;
    if (some) put_sequence(a, p, b, page, row);
    if (some && stores) a.first_entry[b] = first;
    for (int64_t i = 0; i < p.count && p.row + i < a.tokens; i++)
        a.raw_slots[p.row + i] = p.live ? row + old + i : -1;
    for (int64_t i = 0; stores && i < p.made && first + i < a.entries; i++) {
        const uint32_t e = (uint32_t)(p.whole + i), c = e / (uint32_t)a.page;
        if (p.live && c != column) entry_page = a.pages_of[b * a.pages_s[0] + c * a.pages_s[1]];
        a.entry_slots[first + i] = p.live ? entry_page * a.page + (e - c * (uint32_t)a.page) : -1;
    }
    for (int64_t t = tokens + b; t < a.tokens; t += FEW_THREADS) a.raw_slots[t] = -1;
    for (int64_t i = entries + b; stores && i < a.entries; i += FEW_THREADS) a.entry_slots[i] = -1;
}

static quern_status run(const stage_exec *exec, const step_places_args *args, void *)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    places_kernel a = {};
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
        a.first_entry = (int32_t *)args->first_entry.data;
    }
    if (a.step.batch > 0 && a.step.batch <= FEW_THREADS && a.tokens <= FEW_TOKENS * a.step.batch) {
        step_places_few<<<1, FEW_THREADS, 0, stream>>>(a);
        return LAUNCHED("places of a few tokens' rows");
    }
    step_places<<<1, THREADS, 0, stream>>>(a);
    return LAUNCHED("places of a step's rows");
}

extern const variant<step_places_args> step_places_any = {"step_places_any", NULL, NULL, run};
