/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plan.cu - the arguments of the pooling kernels, and the sequences of calls whose lengths or starts stand on
 * the device: one block makes a record of each, once a call. */
#include "pool/params.cuh"

enum { PLAN_THREADS = 256 };

static bool aligned(const quern_tensor &t, int64_t bytes)
{
    return !present(t) || rows_aligned(t, bytes);
}

/* Whether all rows can be read four channels at a time. */
static bool is_wide(const pool_args *args)
{
    const int64_t channels = GROUP_CHANNELS;
    return args->width % channels == 0 && aligned(args->proj, channels * bytes_of(args->proj.dtype)) &&
           aligned(args->bias_a, channels * bytes_of(args->bias_a.dtype)) &&
           aligned(args->bias_b, channels * bytes_of(args->bias_a.dtype)) &&
           aligned(args->d_proj, channels * bytes_of(args->d_proj.dtype));
}

pool_kernel pool_kernel_of(const stage_exec *exec, const pool_args *args)
{
    pool_kernel a = {};
    const quern_tensor &entries = present(args->out)      ? args->out
                                  : present(args->pooled) ? args->pooled
                                                          : args->d_out;
    a.ratio = args->ratio;
    a.batch = args->batch;
    a.rows = args->proj.shape[1];
    a.entries = entries.shape[1];
    a.start = args->start_token;
    a.position = args->start_position;
    const int64_t left = a.rows > a.start ? a.rows - a.start : 0;
    a.blocks = args->blocks > 0 ? args->blocks : left / a.ratio;
    a.width = (int)args->width;
    a.overlap = args->overlap;
    a.continued = args->continued;
    a.followed = args->followed;
    a.rope_last = args->entry.rope_last;
    a.wide = is_wide(args);
    a.cu = (const int32_t *)args->cu_seqlens.data;
    a.starts = (const int32_t *)args->start_tokens.data;
    a.positions = (const int32_t *)args->start_positions.data;
    a.counts = (const int32_t *)args->block_counts.data;
    a.has_prev = (const int32_t *)args->has_prev.data;
    a.starts_row = args->start_tokens.strides[0];
    a.positions_row = args->start_positions.strides[0];
    a.counts_row = args->block_counts.strides[0];
    a.has_prev_row = args->has_prev.strides[0];
    a.cu_entries = (int32_t *)args->cu_entries.data;
    a.proj = args->proj.data;
    a.proj_b = args->proj.strides[0];
    a.proj_row = args->proj.strides[1];
    a.bias_a = args->bias_a.data;
    a.bias_a_row = args->bias_a.strides[0];
    a.bias_b = args->bias_b.data;
    a.bias_b_row = args->bias_b.strides[0];
    if (present(args->prev_b)) {
        a.prev = args->prev_b.data;
        a.prev_dtype = args->prev_b.dtype;
        a.prev_b = args->prev_b.strides[0];
        a.prev_row = args->prev_b.strides[1];
    }
    a.entry = entry_kernel_of(args->entry, args->width, args->ratio);
    a.pooled = (float *)args->pooled.data;
    a.pooled_b = args->pooled.strides[0];
    a.pooled_row = args->pooled.strides[1];
    a.out = args->out.data;
    a.out_dtype = args->out.dtype;
    a.out_b = args->out.strides[0];
    a.out_row = args->out.strides[1];
    a.status = exec->status;
    a.d_out = args->d_out.data;
    a.d_out_dtype = args->d_out.dtype;
    a.d_out_b = args->d_out.strides[0];
    a.d_out_row = args->d_out.strides[1];
    a.d_proj = args->d_proj.data;
    a.d_proj_b = args->d_proj.strides[0];
    a.d_proj_row = args->d_proj.strides[1];
    a.d_prev = args->d_prev_b.data;
    a.d_prev_dtype = args->d_prev_b.dtype;
    a.d_prev_b = args->d_prev_b.strides[0];
    a.d_prev_row = args->d_prev_b.strides[1];
    return a;
}

bool pool_needs_plan(const pool_args *args)
{
    return present(args->cu_seqlens) || present(args->start_tokens) || present(args->start_positions) ||
           present(args->block_counts) || present(args->has_prev);
}

size_t pool_plan_bytes(const pool_args *args)
{
    return pool_needs_plan(args) ? (size_t)args->batch * sizeof(pool_place) : 0;
}

/* What the call says of sequence b, held within its bounds; entry0 is left out. */
__device__ static pool_place place_of(const pool_kernel &a, int64_t b)
{
    pool_place s = {b, 0, a.rows, 0, 0, a.entries, 0, 0, a.prev != NULL};
    int32_t bad = 0;
    if (a.cu != NULL) {
        const int64_t first = cu_seqlens_at(a.cu, b, a.rows), end = cu_seqlens_at(a.cu, b + 1, a.rows);
        if (first != a.cu[b] || end != a.cu[b + 1] || end < first || (b == 0 && first != 0))
            bad |= QUERN_STATUS_BAD_OFFSETS;
        s.view_b = 0;
        s.row0 = first;
        s.rows = end > first ? end - first : 0;
        s.entries = s.rows / a.ratio;
    }
    const int64_t start = pool_value(a.starts, a.starts_row, b, a.start),
                  whole = start >= 0 && start <= s.rows ? (s.rows - start) / a.ratio : -1;
    s.token0 = s.row0 + start;
    s.position = pool_value(a.positions, a.positions_row, b, a.position);
    s.blocks = pool_value(a.counts, a.counts_row, b, a.cu != NULL || a.blocks > whole ? whole : a.blocks);
    s.prev = s.prev && pool_value(a.has_prev, a.has_prev_row, b, 1) != 0;
    if (s.blocks < 0 || s.blocks > whole || s.position < 0 || (!a.rope_last && s.position % a.ratio != 0)) {
        bad |= QUERN_STATUS_BAD_POSITION;
        s.blocks = 0;
        s.token0 = s.row0;
    }
    if (bad != 0) raise_status(a.status, bad);
    return s;
}

/* Entries of the sequences before: a scan of one block. */
__global__ void __launch_bounds__(PLAN_THREADS) pool_plan(const __grid_constant__ pool_kernel a)
{
    __shared__ int64_t warps[PLAN_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t before = 0;
    for (int64_t first = 0; first < a.batch; first += PLAN_THREADS) {
        const int64_t b = first + threadIdx.x;
        pool_place s = {};
        if (b < a.batch) s = place_of(a, b);
        int64_t sum = s.entries;
        for (int by = 1; by < 32; by *= 2) {
            const int64_t other = __shfl_up_sync(~0u, sum, by);
            if (lane >= by) sum += other;
        }
        if (lane == 31) warps[warp] = sum;
        __syncthreads();
        int64_t all = 0;
        for (int w = 0; w < PLAN_THREADS / 32; w++) {
            if (w == warp) sum += all;
            all += warps[w];
        }
        if (b < a.batch) {
            s.entry0 = before + sum - s.entries;
            a.plan[b] = s;
            if (a.cu_entries != NULL) {
                a.cu_entries[b + 1] = (int32_t)(before + sum);
                if (b == 0) a.cu_entries[0] = 0;
            }
        }
        before += all;
        __syncthreads();
    }
}

quern_status pool_plan_run(const pool_kernel &a, cudaStream_t stream)
{
    if (a.plan == NULL || a.batch == 0) return QUERN_OK;
    pool_plan<<<1, PLAN_THREADS, 0, stream>>>(a);
    return LAUNCHED("pool's sequences");
}

/* Where the sequences differ or not. */
__device__ static pool_place sequence_of(const pool_kernel &a, int64_t b)
{
    if (a.plan != NULL) return a.plan[b];
    return {b, 0, a.rows, a.start, 0, a.entries, a.blocks, a.position, a.prev != NULL};
}

struct clear_range {
    char *rows;
    int64_t row, bytes; /* from row to row; of a row */
};

__device__ static void clear_rows(const clear_range &r, int64_t first, int64_t end)
{
    for (int64_t n = first + blockIdx.y; n < end; n += gridDim.y)
        for (int64_t i = 2 * (int64_t)threadIdx.x; i < r.bytes; i += 2 * blockDim.x)
            *(uint16_t *)(r.rows + n * r.row + i) = 0;
}

/* Block x is sequence x; the one after the last has the rows past all sequences. */
__global__ void pool_clear(const __grid_constant__ pool_kernel a, int size)
{
    const int64_t columns = (a.overlap ? 4 : 2) * (int64_t)a.width, b = blockIdx.x;
    const int64_t view_b = a.cu != NULL ? 0 : b;
    const clear_range d_proj = {(char *)a.d_proj + view_b * a.d_proj_b * size, a.d_proj_row * size,
                                columns * size};
    const bool whole = a.d_proj != NULL && !a.continued && !a.followed;
    if (b == a.batch) {
        if (whole) clear_rows(d_proj, cu_seqlens_at(a.cu, b, a.rows), a.rows);
        return;
    }
    const pool_place s = sequence_of(a, b);
    if (a.d_prev != NULL && (!s.prev || s.blocks == 0)) {
        const int64_t own = a.d_prev_dtype == QUERN_F32 ? 4 : 2;
        const clear_range d_prev = {(char *)a.d_prev + b * a.d_prev_b * own, a.d_prev_row * own,
                                    2 * own * a.width};
        clear_rows(d_prev, 0, a.ratio);
    }
    if (!whole) return;
    clear_rows(d_proj, s.row0, s.token0);
    clear_rows(d_proj, s.token0 + s.blocks * a.ratio, s.row0 + s.rows);
}

quern_status pool_clear_run(const pool_kernel &a, quern_dtype proj, cudaStream_t stream)
{
    enum { SHARES = 16, THREADS = 128 };
    const int64_t sequences = a.batch + (a.cu != NULL ? 1 : 0);
    const bool all_are_written = a.plan == NULL && a.start == 0 && a.blocks * a.ratio == a.rows,
               has_prev = a.d_prev == NULL || (a.prev != NULL && a.blocks > 0);
    if (sequences == 0 || (all_are_written && has_prev)) return QUERN_OK;
    pool_clear<<<dim3((unsigned)sequences, SHARES), THREADS, 0, stream>>>(a, proj == QUERN_F32 ? 4 : 2);
    return LAUNCHED("pool's rows without a block");
}
