/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rows.cu - runs of rows from matrices to as many others, several blocks a run of each; and zeros in rows of
 * a step's results that belong to no sequence that runs, a block a sequence. Limit: the copy rate. */
#include "common/launch.cuh"
#include "common/step.cuh"
#include "step/params.cuh"
#include "variants.cuh"

enum { THREADS = 256, WARPS = THREADS / 32 };

/* A pair of matrices. */
struct runs_pair {
    const char *x;
    char *out;
    int64_t x_s, out_s;    /* bytes from row to row */
    divider units;         /* of a row */
    int32_t bytes, blocks; /* of a unit; that copy a run */
};

struct runs_kernel {
    const int64_t *runs;
    int64_t run_s;
    runs_pair pair[COPY_ROWS_PAIRS];
};

template <int BYTES>
__device__ __forceinline__ void copy_run(const runs_pair &a, int64_t from, int64_t to, int64_t rows)
{
    enum { AHEAD = 4 };
    typedef typename unit_of<BYTES>::type U;
    const int64_t count = rows * a.units.by, step = (int64_t)a.blocks * THREADS;
    for (int64_t i = (int64_t)blockIdx.y * THREADS + threadIdx.x; i < count; i += AHEAD * step) {
        U held[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t at = i + k * step, row = a.units.of(at), column = at - row * a.units.by;
            if (at < count) held[k] = *(const U *)(a.x + (from + row) * a.x_s + column * BYTES);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t at = i + k * step, row = a.units.of(at), column = at - row * a.units.by;
            if (at < count) *(U *)(a.out + (to + row) * a.out_s + column * BYTES) = held[k];
        }
    }
}

__global__ void __launch_bounds__(THREADS) step_copy_rows(const __grid_constant__ runs_kernel a)
{
    const runs_pair &pair = a.pair[blockIdx.z];
    const int64_t *const run = a.runs + blockIdx.x * a.run_s;
    if ((int)blockIdx.y >= pair.blocks) return;
    const int64_t from = run[0], to = run[1], rows = run[2];
    switch (pair.bytes) {
    case 16: copy_run<16>(pair, from, to, rows); break;
    case 8: copy_run<8>(pair, from, to, rows); break;
    case 4: copy_run<4>(pair, from, to, rows); break;
    case 2: copy_run<2>(pair, from, to, rows); break;
    default: copy_run<1>(pair, from, to, rows); break;
    }
}

/* The most bytes, up to 16, that rows can be copied at once by. */
static int unit_bytes(uint64_t of)
{
    int bytes = 16;
    while (of % (uint64_t)bytes != 0) bytes /= 2;
    return bytes;
}

/* `shares`: blocks of a run where its rows are long or many. */
static runs_pair pair_of(const quern_tensor &x, const quern_tensor &out, int64_t shares)
{
    const int64_t size = bytes_of(x.dtype), row = x.shape[1] * size;
    runs_pair p = {};
    p.x = (const char *)x.data;
    p.out = (char *)out.data;
    p.x_s = x.strides[0] * size;
    p.out_s = out.strides[0] * size;
    if (row == 0) return p;
    p.bytes = unit_bytes((uint64_t)(uintptr_t)p.x | (uint64_t)(uintptr_t)p.out | (uint64_t)p.x_s |
                         (uint64_t)p.out_s | (uint64_t)row);
    p.units = divider_by(row / p.bytes);
    const int64_t most = out.shape[0] * (row / p.bytes) / THREADS + 1;
    p.blocks = (int32_t)(shares < most ? shares : most);
    return p;
}

static quern_status copy_rows_run(const stage_exec *exec, const copy_rows_args *args, void *)
{
    const int64_t n = args->runs.shape[0];
    runs_kernel a = {};
    unsigned pairs = 0;
    int32_t blocks = 0;
    a.runs = (const int64_t *)args->runs.data;
    a.run_s = args->runs.strides[0];
    if (n == 0) return QUERN_OK;
    for (; pairs < COPY_ROWS_PAIRS && present(args->pair[pairs].x); pairs++) {
        a.pair[pairs] =
            pair_of(args->pair[pairs].x, args->pair[pairs].out, 4 * exec->multiprocessors / n + 1);
        if (a.pair[pairs].blocks > blocks) blocks = a.pair[pairs].blocks;
    }
    if (blocks == 0) return QUERN_OK;
    step_copy_rows<<<dim3((unsigned)n, (unsigned)blocks, pairs), THREADS, 0, (cudaStream_t)exec->stream>>>(a);
    return LAUNCHED("runs of rows");
}

struct clear_kernel {
    step_view step;
    int64_t ratio;
    char *out;
    int64_t rows, heads, row_s, head_s; /* distances in bytes */
    divider units;                      /* of a head's row */
};

/* A block's threads clear one row. */
template <int BYTES> __device__ __forceinline__ void clear_row(const clear_kernel &a, int64_t row)
{
    typedef typename unit_of<BYTES>::type U;
    for (int64_t i = threadIdx.x; i < a.heads * a.units.by; i += THREADS) {
        const int64_t head = a.units.of(i);
        *(U *)(a.out + row * a.row_s + head * a.head_s + (i - head * a.units.by) * BYTES) = {};
    }
}

template <int BYTES>
__global__ void __launch_bounds__(THREADS) step_clear_rows(const __grid_constant__ clear_kernel a)
{
    int64_t before = 0, total = 0;
    for (int64_t b = threadIdx.x; b < a.step.batch; b += THREADS) {
        const step_place p = step_place_at(a.step, a.ratio, b);
        const int64_t rows = a.ratio > 0 ? p.made : p.count;
        total += rows;
        if (b < blockIdx.x) before += rows;
    }
    const step_sums sums = add_threads<WARPS>(before, total);
    for (int64_t row = sums.total + blockIdx.x; row < a.rows; row += gridDim.x) clear_row<BYTES>(a, row);
    if (blockIdx.x >= a.step.batch) return;
    const step_place p = step_place_at(a.step, a.ratio, blockIdx.x);
    const int64_t own = p.live ? 0 : a.ratio > 0 ? p.made : p.count, left = a.rows - sums.before;
    for (int64_t i = 0; i < own && i < left; i++) clear_row<BYTES>(a, sums.before + i);
}

static quern_status clear_rows_run(const stage_exec *exec, const clear_rows_args *args, void *)
{
    const quern_tensor &t = args->out;
    const int64_t size = bytes_of(t.dtype), row = t.shape[2] * size;
    clear_kernel a = {};
    a.step = step_view_of(args->step, INT32_MAX);
    a.ratio = args->ratio;
    a.out = (char *)t.data;
    a.rows = t.shape[0];
    a.heads = t.shape[1];
    a.row_s = t.strides[0] * size;
    a.head_s = t.strides[1] * size;
    if (a.rows == 0 || a.heads == 0 || row == 0) return QUERN_OK;
    const int bytes =
        unit_bytes((uint64_t)(uintptr_t)a.out | (uint64_t)a.row_s | (uint64_t)a.head_s | (uint64_t)row);
    a.units = divider_by(row / bytes);
    const unsigned grid = a.step.batch > 0 ? (unsigned)a.step.batch : 1;
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    switch (bytes) {
    case 16: step_clear_rows<16><<<grid, THREADS, 0, stream>>>(a); break;
    case 8: step_clear_rows<8><<<grid, THREADS, 0, stream>>>(a); break;
    case 4: step_clear_rows<4><<<grid, THREADS, 0, stream>>>(a); break;
    case 2: step_clear_rows<2><<<grid, THREADS, 0, stream>>>(a); break;
    default: step_clear_rows<1><<<grid, THREADS, 0, stream>>>(a); break;
    }
    return LAUNCHED("rows of no sequence");
}

extern const variant<copy_rows_args> copy_rows_any = {"copy_rows_any", NULL, NULL, copy_rows_run};
extern const variant<clear_rows_args> clear_rows_any = {"clear_rows_any", NULL, NULL, clear_rows_run};
