/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * permute.cu - copies rows to other places: output row r is the row of token permutation[r] / per. A slot is
 * one of a token's `per` experts; the permutation names the slot of each output row. An entry that is no slot
 * gives a row of zeros. A warp copies up to 128 vectors of a row, of 16 bytes where rows are aligned, and
 * issues four loads a thread before the first store.
 *
 * permute reads a token once per slot. Rows are sorted by expert, so a token's reads are far from each other
 * and miss L2. Where tokens have several slots, permute_by_token reads each token once and writes all of its
 * rows; permute_invert finds them first. Limit: the copy rate, every row read and written once.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256, VECTORS = 4, FEW = 1024 /* rows up to which inverting costs more than it saves */ };

struct permute_params {
    rows_view x, out; /* strides in bytes */
    const int32_t *permutation;
    int64_t rows, x_rows, vectors, per;
    int32_t *row_of; /* [rows]: the output row of each slot, in the workspace */
};

/* Fills row_of, and writes the rows of zeros. */
template <typename W>
__global__ void __launch_bounds__(THREADS) permute_invert(const __grid_constant__ permute_params a)
{
    const int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= a.rows) return;
    const int32_t slot = __ldg(a.permutation + row);
    if (slot >= 0 && slot < a.rows && slot / (int32_t)a.per < a.x_rows) {
        a.row_of[slot] = (int32_t)row;
        return;
    }
    W *out = (W *)a.out.row<char>(row);
    for (int64_t i = 0; i < a.vectors; i++) out[i] = W{};
}

/* The row of a slot, or -1: row_of of a slot without a row was never written. */
__device__ __forceinline__ int32_t row_of_slot(const permute_params &a, int64_t slot)
{
    const int32_t row = a.row_of[slot];
    return row >= 0 && row < a.rows && __ldg(a.permutation + row) == slot ? row : -1;
}

template <typename W>
__global__ void __launch_bounds__(THREADS) permute_by_token(const __grid_constant__ permute_params a)
{
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32,
                  warps_a_row = (a.vectors + 32 * VECTORS - 1) / (32 * VECTORS), token = warp / warps_a_row,
                  c = (warp - token * warps_a_row) * 32 * VECTORS + threadIdx.x % 32;
    if (token >= a.x_rows) return;
    const W *in = (const W *)a.x.row<const char>(token);
    W x[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (c + i * 32 < a.vectors) x[i] = __ldcs(in + c + i * 32);
    for (int64_t j0 = 0; j0 < a.per; j0 += 32) {
        const int64_t j = j0 + threadIdx.x % 32;
        const int32_t own = j < a.per ? row_of_slot(a, token * a.per + j) : -1;
        for (int64_t n = 0; n < 32 && j0 + n < a.per; n++) {
            const int32_t row = __shfl_sync(~0u, own, (int)n);
            if (row < 0) continue;
            W *out = (W *)a.out.row<char>(row);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                if (c + i * 32 < a.vectors) __stcs(out + c + i * 32, x[i]);
        }
    }
}

template <typename W>
__global__ void __launch_bounds__(THREADS) permute(const __grid_constant__ permute_params a)
{
    wait_for_before();
    let_next_start();
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32,
                  warps_a_row = (a.vectors + 32 * VECTORS - 1) / (32 * VECTORS), row = warp / warps_a_row,
                  c = (warp - row * warps_a_row) * 32 * VECTORS + threadIdx.x % 32;
    if (row >= a.rows) return;
    int64_t from = row;
    if (a.permutation != NULL) {
        const int32_t slot = __ldg(a.permutation + row);
        from = slot < 0 ? (int64_t)-1 : slot / (int32_t)a.per;
    }
    const W *in = (const W *)a.x.row<const char>(from < 0 || from >= a.x_rows ? 0 : from);
    W *out = (W *)a.out.row<char>(row);
    W x[VECTORS] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (from >= 0 && from < a.x_rows && c + i * 32 < a.vectors) x[i] = in[c + i * 32];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (c + i * 32 < a.vectors) out[c + i * 32] = x[i];
}

static rows_view in_bytes(const quern_tensor &t)
{
    rows_view v = rows_view_of(t);
    for (int i = 0; i < v.ndim; i++) v.stride[i] *= bytes_of(t.dtype);
    return v;
}

static bool goes_by_token(const permute_args *args)
{
    return present(args->permutation) && args->per > 1 && rows_of(args->out) == rows_of(args->x) * args->per;
}

static size_t permute_any_bytes(const stage_exec *, const permute_args *args)
{
    return goes_by_token(args) ? room_for((size_t)rows_of(args->out) * sizeof(int32_t)) : 0;
}

static quern_status permute_any_run(const stage_exec *exec, const permute_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t bytes = columns_of(args->out) * bytes_of(args->out.dtype);
    int64_t width = 16;
    while (width > 1 &&
           (bytes % width != 0 || !rows_aligned(args->x, width) || !rows_aligned(args->out, width)))
        width /= 2;
    const permute_params a = {in_bytes(args->x),
                              in_bytes(args->out),
                              present(args->permutation) ? (const int32_t *)args->permutation.data : NULL,
                              rows_of(args->out),
                              rows_of(args->x),
                              bytes / width,
                              args->per > 0 ? args->per : 1,
                              room_at<int32_t>(workspace)};
    const bool by_token = width == 16 && goes_by_token(args) && a.rows > FEW;
    const int64_t n = (by_token ? a.x_rows : a.rows) * ((a.vectors + 32 * VECTORS - 1) / (32 * VECTORS)) * 32;
    if (n == 0) return QUERN_OK;
    const unsigned grid = blocks_for(n, THREADS);
    if (by_token) {
        permute_invert<uint4><<<blocks_for(a.rows, THREADS), THREADS, 0, stream>>>(a);
        permute_by_token<uint4><<<grid, THREADS, 0, stream>>>(a);
    } else if (width == 16)
        return launch_behind(stream, permute<uint4>, dim3(grid), THREADS, 0, "permute", a);
    else if (width == 8) permute<uint2><<<grid, THREADS, 0, stream>>>(a);
    else if (width == 4) permute<uint1><<<grid, THREADS, 0, stream>>>(a);
    else if (width == 2) permute<ushort1><<<grid, THREADS, 0, stream>>>(a);
    else permute<uchar1><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("permute");
}

extern const variant<permute_args> permute_any = {"permute_any", NULL, permute_any_bytes, permute_any_run};
