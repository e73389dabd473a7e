/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * delta.cu - delta anew for rows that see few compressed entries. Their values are means and often
 * overlap, so dP - delta is small beside delta, and a delta from an o rounded to 16 bits is off by as much.
 * These rows, the first of each sequence, take row_scale times the mean of dP under P, in f32.
 *
 * A warp owns a row: each lane 8 consecutive elements, the entries one after another. Limit: the latency of
 * an entry's two sums over the warp; there are some 3 l rows a sequence and head.
 */
#include "attend/backward/params.cuh"
#include "common/chunk.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, BLOCKS = 4096 };

/* The sum over a warp, the same in each lane. */
__device__ __forceinline__ float warp_dot(const chunk &x, const chunk &y)
{
    float sum = dot_of(x, y);
    for (int w = 16; w > 0; w /= 2) sum += __shfl_xor_sync(~0u, sum, w);
    return sum;
}

/* `shares` blocks walk a sequence's rows, the heads of a query together, while these see at most `few`. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    attend_delta(const __grid_constant__ attend_kernel a, int few, int shares)
{
    const int b = blockIdx.x / shares, share = blockIdx.x - b * shares;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, c = lane * CHUNK;
    const sequence seq = sequence_at(a.sq, b);
    const bool in_k = c < a.dim_k, in_v = c < a.dim_v;
    const chunk zeros = {};
    const int64_t rows = seq.nq * a.heads, step = (int64_t)shares * WARPS;
    for (int64_t row = (int64_t)share * WARPS + warp; row < rows; row += step) {
        const int64_t query = row / a.heads, n = seq.q0 + query;
        const int64_t head = row - query * a.heads, kv_head = head / a.group;
        int lo, hi;
        row_keys(a, seq, query, &lo, &hi);
        if (hi - lo > few) return; /* later queries see no less */
        float lse2, delta, row_scale, sum = 0.0f, weight = 0.0f;
        row_statistics(a, seq, n, head, &lse2, &delta, &row_scale);
        if (hi == lo || lse2 == INFINITY) continue;
        const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + n * a.q.s[1] + head * a.q.s[2] + c;
        const T *d_o = (const T *)a.d_o.p + seq.view_b * a.d_o.s[0] + n * a.d_o.s[1] + head * a.d_o.s[2] + c;
        const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + kv_head * a.k.s[2] + c;
        const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + kv_head * a.v.s[2] + c;
        const chunk own_q = in_k ? load_chunk(q, a.vec_q) : zeros;
        const chunk own_d_o = in_v ? load_chunk(d_o, a.vec_do) : zeros;
        for (int key = lo; key < hi; key++) {
            const chunk key_k = in_k ? load_chunk(k + key * a.k.s[1], a.vec_k) : zeros;
            const chunk key_v = in_v ? load_chunk(v + key * a.v.s[1], a.vec_v) : zeros;
            const float p = exp2f(fmaf(warp_dot(own_q, key_k), a.scale_log2, -lse2));
            sum = fmaf(p, warp_dot(own_d_o, key_v), sum);
            weight += p;
        }
        const int64_t at = seq.view_b * a.delta.s[0] + head * a.delta.s[1] + n * a.delta.s[2];
        if (lane == 0) a.delta.p[at] = row_scale * (sum / weight);
    }
}

/* The most queries of a sequence that see at most `few` entries, as far as is known here. */
static int64_t queries_at_most(const attend_args *args, int64_t few)
{
    const int64_t n = args->seqs.n_q;
    if (args->seqs.cu_q.data == NULL && args->seqs.n_kv <= few) return n;
    if (!args->causal) return args->seqs.cu_q.data == NULL ? 0 : n;
    const int64_t first = args->block_size + few * args->stride;
    return first < n ? first : n;
}

template <typename T>
static quern_status launch(const attend_kernel &a, int few, int64_t shares, cudaStream_t stream)
{
    attend_delta<T><<<(unsigned)(shares * a.sq.batch), THREADS, 0, stream>>>(a, few, (int)shares);
    return LAUNCHED("attend_backward: delta of few entries");
}

quern_status attend_backward_delta(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    const int64_t few = attend_few_keys(args);
    if (few == 0) return QUERN_OK;
    const attend_kernel &a = l.kernel;
    const int64_t rows = queries_at_most(args, few) * a.heads;
    if (rows == 0 || a.sq.batch == 0 || a.kv_heads == 0) return QUERN_OK;
    int64_t shares = BLOCKS / a.sq.batch < 1 ? 1 : BLOCKS / a.sq.batch;
    if (shares > (rows + WARPS - 1) / WARPS) shares = (rows + WARPS - 1) / WARPS;
    const int most = few < INT32_MAX ? (int)few : INT32_MAX;
    if (l.dtype == QUERN_F32) return launch<float>(a, most, shares, stream);
    if (l.dtype == QUERN_BF16) return launch<bf16>(a, most, shares, stream);
    return launch<f16>(a, most, shares, stream);
}
