/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * permute.cu - rows to other places. A warp moves up to 128 pieces of a row, of 16 bytes where aligned,
 * four loads a thread at once. An entry that is no slot gives a row of zeros.
 *
 * Tokens of several slots are read once, and written to all of their rows: sorted rows, were each to look for
 * its token, would read the tokens again for every expert, and L2 does not hold them all. For that the
 * permutation is inverted first. Limit: rows are read and written once.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256, PIECES = 4, FEW = 1024 /* rows that inverting would not pay for */ };

struct permute_params {
    rows_view x, out; /* strides in bytes */
    const int32_t *permutation;
    int64_t rows, x_rows, pieces, per;
    int32_t *row_of; /* [rows]: of each slot, in the workspace */
};

/* Rows of no slot, which are zeros, are written here. */
template <typename W>
__global__ void __launch_bounds__(THREADS) invert(const __grid_constant__ permute_params a)
{
    const int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= a.rows) return;
    const int32_t slot = __ldg(a.permutation + row);
    if (slot >= 0 && slot < a.rows && slot / (int32_t)a.per < a.x_rows) {
        a.row_of[slot] = (int32_t)row;
        return;
    }
    W *out = (W *)a.out.row<char>(row);
    for (int64_t i = 0; i < a.pieces; i++) out[i] = W{};
}

/* The row of a slot; -1 where there is none: the workspace then holds what it held before. */
__device__ __forceinline__ int32_t row_of_slot(const permute_params &a, int64_t slot)
{
    const int32_t row = a.row_of[slot];
    return row >= 0 && row < a.rows && __ldg(a.permutation + row) == slot ? row : -1;
}

template <typename W>
__global__ void __launch_bounds__(THREADS) spread(const __grid_constant__ permute_params a)
{
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32,
                  across = (a.pieces + 32 * PIECES - 1) / (32 * PIECES), token = warp / across,
                  c = (warp - token * across) * 32 * PIECES + threadIdx.x % 32;
    if (token >= a.x_rows) return;
    const W *in = (const W *)a.x.row<const char>(token);
    W x[PIECES] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (c + i * 32 < a.pieces) x[i] = __ldcs(in + c + i * 32);
    for (int64_t j0 = 0; j0 < a.per; j0 += 32) {
        const int64_t j = j0 + threadIdx.x % 32;
        const int32_t own = j < a.per ? row_of_slot(a, token * a.per + j) : -1;
        for (int64_t n = 0; n < 32 && j0 + n < a.per; n++) {
            const int32_t row = __shfl_sync(~0u, own, (int)n);
            if (row < 0) continue;
            W *out = (W *)a.out.row<char>(row);
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                if (c + i * 32 < a.pieces) __stcs(out + c + i * 32, x[i]);
        }
    }
}

template <typename W>
__global__ void __launch_bounds__(THREADS) permute(const __grid_constant__ permute_params a)
{
    wait_for_before();
    let_next_start();
    const int64_t warp = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32,
                  across = (a.pieces + 32 * PIECES - 1) / (32 * PIECES), row = warp / across,
                  c = (warp - row * across) * 32 * PIECES + threadIdx.x % 32;
    if (row >= a.rows) return;
    int64_t from = row;
    if (a.permutation != NULL) {
        const int32_t slot = __ldg(a.permutation + row);
        from = slot < 0 ? (int64_t)-1 : slot / (int32_t)a.per;
    }
    const W *in = (const W *)a.x.row<const char>(from < 0 || from >= a.x_rows ? 0 : from);
    W *out = (W *)a.out.row<char>(row);
    W x[PIECES] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (from >= 0 && from < a.x_rows && c + i * 32 < a.pieces) x[i] = in[c + i * 32];
#pragma unroll
    for (int i = 0; i < PIECES; i++)
        if (c + i * 32 < a.pieces) out[c + i * 32] = x[i];
}

static rows_view in_bytes(const quern_tensor &t)
{
    rows_view v = rows_view_of(t);
    for (int i = 0; i < v.ndim; i++) v.stride[i] *= bytes_of(t.dtype);
    return v;
}

static bool spreads(const permute_args *args)
{
    return present(args->permutation) && args->per > 1 && rows_of(args->out) == rows_of(args->x) * args->per;
}

static size_t permute_any_bytes(const stage_exec *, const permute_args *args)
{
    return spreads(args) ? room_for((size_t)rows_of(args->out) * sizeof(int32_t)) : 0;
}

static quern_status permute_any_run(const stage_exec *exec, const permute_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t bytes = columns_of(args->out) * bytes_of(args->out.dtype);
    int64_t piece = 16;
    while (piece > 1 &&
           (bytes % piece != 0 || !rows_aligned(args->x, piece) || !rows_aligned(args->out, piece)))
        piece /= 2;
    const permute_params a = {in_bytes(args->x),
                              in_bytes(args->out),
                              present(args->permutation) ? (const int32_t *)args->permutation.data : NULL,
                              rows_of(args->out),
                              rows_of(args->x),
                              bytes / piece,
                              args->per > 0 ? args->per : 1,
                              room_at<int32_t>(workspace)};
    const bool spread_rows = piece == 16 && spreads(args) && a.rows > FEW;
    const int64_t n = (spread_rows ? a.x_rows : a.rows) * ((a.pieces + 32 * PIECES - 1) / (32 * PIECES)) * 32;
    if (n == 0) return QUERN_OK;
    const unsigned grid = blocks_for(n, THREADS);
    if (spread_rows) {
        invert<uint4><<<blocks_for(a.rows, THREADS), THREADS, 0, stream>>>(a);
        spread<uint4><<<grid, THREADS, 0, stream>>>(a);
    } else if (piece == 16)
        return launch_behind(stream, permute<uint4>, dim3(grid), THREADS, 0, "permute", a);
    else if (piece == 8) permute<uint2><<<grid, THREADS, 0, stream>>>(a);
    else if (piece == 4) permute<uint1><<<grid, THREADS, 0, stream>>>(a);
    else if (piece == 2) permute<ushort1><<<grid, THREADS, 0, stream>>>(a);
    else permute<uchar1><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("permute");
}

extern const variant<permute_args> permute_any = {"permute_any", NULL, permute_any_bytes, permute_any_run};
