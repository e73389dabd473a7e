/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* convert.cu - the convert stage. Limit: bytes moved over the copy rate. */
#include "common/chunk.cuh"
#include "common/launch.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

struct convert_kernel {
    view4 in, out;
    int64_t n, heads, dim, rows; /* rows: batch views * n * heads */
    const int32_t *cu;
    int64_t last;
    bool vec_in, vec_out;
};

template <typename A, typename B>
__global__ void __launch_bounds__(THREADS) convert(const __grid_constant__ convert_kernel a)
{
    const int64_t per = (a.dim + CHUNK - 1) / CHUNK, i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.rows * per) return;
    const int64_t row = i / per, c = i % per * CHUNK, h = row % a.heads, n = row / a.heads % a.n,
                  b = row / a.heads / a.n;
    const A *const from = (const A *)a.in.p + b * a.in.s[0] + n * a.in.s[1] + h * a.in.s[2] + c;
    B *const to = (B *)a.out.p + b * a.out.s[0] + n * a.out.s[1] + h * a.out.s[2] + c;
    const bool live = a.cu == NULL || n < cu_seqlens_at(a.cu, a.last, a.n);
    if (c + CHUNK > a.dim) { /* the row's end */
        for (int64_t k = 0; c + k < a.dim; k++) to[k] = from_float<B>(live ? to_float<A>(from[k]) : 0.0f);
        return;
    }
    chunk x = {};
    if (live) x = load_chunk(from, a.vec_in);
    store_chunk(to, x, a.vec_out);
}

template <typename A>
static quern_status convert_to(const convert_kernel &a, quern_dtype to, cudaStream_t stream)
{
    const int64_t n = a.rows * ((a.dim + CHUNK - 1) / CHUNK);
    if (n == 0) return QUERN_OK;
    if (to == QUERN_F32) convert<A, float><<<blocks_for(n, THREADS), THREADS, 0, stream>>>(a);
    else if (to == QUERN_BF16) convert<A, bf16><<<blocks_for(n, THREADS), THREADS, 0, stream>>>(a);
    else convert<A, f16><<<blocks_for(n, THREADS), THREADS, 0, stream>>>(a);
    return LAUNCHED("convert");
}

static quern_status convert_run(const stage_exec *exec, const convert_args *args, void *)
{
    const quern_tensor &t = args->in;
    const convert_kernel a = {view4_of(t),
                              view4_of(args->out),
                              t.shape[1],
                              t.shape[2],
                              t.shape[3],
                              t.shape[0] * t.shape[1] * t.shape[2],
                              (const int32_t *)args->seqs.cu_q.data,
                              args->seqs.batch,
                              rows_aligned16(t),
                              rows_aligned16(args->out)};
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (t.dtype == QUERN_F32) return convert_to<float>(a, args->out.dtype, stream);
    return t.dtype == QUERN_BF16 ? convert_to<bf16>(a, args->out.dtype, stream)
                                 : convert_to<f16>(a, args->out.dtype, stream);
}

extern const variant<convert_args> convert_any = {"convert_any", NULL, NULL, convert_run};
