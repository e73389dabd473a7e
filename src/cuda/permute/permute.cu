/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* permute.cu - rows to other places. A warp moves up to 128 pieces of a row, of 16 bytes where aligned,
 * four loads a thread at once. An entry that is no slot gives a row of zeros. Limit: rows are read
 * and written once. */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256, PIECES = 4 };

struct permute_params {
    rows_view x, out; /* strides in bytes */
    const int32_t *permutation;
    int64_t rows, x_rows, pieces, per;
};

template <typename W>
__global__ void __launch_bounds__(THREADS) permute(const __grid_constant__ permute_params a)
{
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

static quern_status permute_any_run(const stage_exec *exec, const permute_args *args, void *)
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
                              args->per > 0 ? args->per : 1};
    const int64_t n = a.rows * ((a.pieces + 32 * PIECES - 1) / (32 * PIECES)) * 32;
    if (n == 0) return QUERN_OK;
    const unsigned grid = blocks_for(n, THREADS);
    if (piece == 16) permute<uint4><<<grid, THREADS, 0, stream>>>(a);
    else if (piece == 8) permute<uint2><<<grid, THREADS, 0, stream>>>(a);
    else if (piece == 4) permute<uint1><<<grid, THREADS, 0, stream>>>(a);
    else if (piece == 2) permute<ushort1><<<grid, THREADS, 0, stream>>>(a);
    else permute<uchar1><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("permute");
}

extern const variant<permute_args> permute_any = {"permute_any", NULL, NULL, permute_any_run};
