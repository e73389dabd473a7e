/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* permute.cu - rows to other places. A thread moves up to 16 bytes. An entry of the permutation that is no
 * slot gives a row of zeros. Limit: rows read and written once. */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

struct permute_params {
    rows_view x, out; /* strides in bytes */
    const int32_t *permutation;
    int64_t rows, x_rows, pieces, per;
};

template <typename W>
__global__ void __launch_bounds__(THREADS) permute(const __grid_constant__ permute_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * a.pieces) return;
    const int64_t row = i / a.pieces, c = i - row * a.pieces;
    int64_t from = row;
    if (a.permutation != NULL) {
        const int32_t slot = __ldg(a.permutation + row);
        from = slot < 0 ? (int64_t)-1 : slot / (int32_t)a.per;
    }
    W x = {};
    if (from >= 0 && from < a.x_rows) x = ((const W *)a.x.row<const char>(from))[c];
    ((W *)a.out.row<char>(row))[c] = x;
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
    const int64_t n = a.rows * a.pieces;
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
