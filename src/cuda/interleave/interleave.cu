/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * interleave.cu - gate and up between two halves of a row and runs that alternate. A thread moves up to 16
 * bytes, as many as runs, halves and alignment let one chunk have. Limit: bytes read and written once.
 */
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

/* In chunks of W bytes. */
struct interleave_params {
    rows_view in, out; /* strides in bytes */
    int64_t rows, out_pieces, width, run;
    bool inverse;
};

template <typename W>
__global__ void __launch_bounds__(THREADS) interleave(const __grid_constant__ interleave_params a)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * a.out_pieces) return;
    const int64_t row = i / a.out_pieces, c = i - row * a.out_pieces;
    const W *in = (const W *)a.in.row<const char>(row);
    W *out = (W *)a.out.row<char>(row);
    W x = {};
    if (a.inverse) {
        const int64_t part = c >= a.width, at = c - part * a.width;
        x = in[at / a.run * 2 * a.run + at % a.run + part * a.run];
    } else {
        const int64_t pair = c / (2 * a.run), in_pair = c - pair * 2 * a.run, part = in_pair >= a.run;
        const int64_t at = pair * a.run + in_pair - part * a.run;
        if (at < a.width) x = in[part * a.width + at];
    }
    out[c] = x;
}

static rows_view in_bytes(const quern_tensor &t)
{
    rows_view v = rows_view_of(t);
    for (int i = 0; i < v.ndim; i++) v.stride[i] *= bytes_of(t.dtype);
    return v;
}

static quern_status interleave_any_run(const stage_exec *exec, const interleave_args *args, void *)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const int64_t size = bytes_of(args->in.dtype),
                  width = columns_of(args->inverse ? args->out : args->in) / 2 * size,
                  run = args->granularity * size, row = columns_of(args->out) * size;
    int64_t chunk = 16;
    while (chunk > 1 && (width % chunk != 0 || run % chunk != 0 || !rows_aligned(args->in, chunk) ||
                         !rows_aligned(args->out, chunk)))
        chunk /= 2;
    const interleave_params a = {in_bytes(args->in), in_bytes(args->out), rows_of(args->in), row / chunk,
                                 width / chunk,      run / chunk,         args->inverse};
    const int64_t n = a.rows * a.out_pieces;
    if (n == 0) return QUERN_OK;
    const unsigned grid = blocks_for(n, THREADS);
    if (chunk == 16) interleave<uint4><<<grid, THREADS, 0, stream>>>(a);
    else if (chunk == 8) interleave<uint2><<<grid, THREADS, 0, stream>>>(a);
    else if (chunk == 4) interleave<uint1><<<grid, THREADS, 0, stream>>>(a);
    else if (chunk == 2) interleave<ushort1><<<grid, THREADS, 0, stream>>>(a);
    else interleave<uchar1><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("interleave");
}

extern const variant<interleave_args> interleave_any = {"interleave_any", NULL, NULL, interleave_any_run};
