/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* statistics.cu - lse', delta and the share of dsink of every head of a slice's queries, a warp each, and the
 * sums of these shares, a block a head. Limit: O and dO are read once. */
#include "attend_mqa/backward/backward.cuh"

enum { WARPS = 8, SUMMERS = 256 };

/* The sum of products of eight elements. */
template <typename T> __device__ __forceinline__ float dot_eight(const T *x, const T *y, bool wide, float sum)
{
    if (!wide) {
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(to_float<T>(x[i]), to_float<T>(y[i]), sum);
        return sum;
    }
    const uint4 p = __ldcs((const uint4 *)x), q = __ldcs((const uint4 *)y);
    const uint32_t a[4] = {p.x, p.y, p.z, p.w}, b[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = unpack2<T>(a[i]), v = unpack2<T>(b[i]);
        sum = fmaf(u.y, v.y, fmaf(u.x, v.x, sum));
    }
    return sum;
}

template <typename T>
__global__ void __launch_bounds__(WARPS * 32) mqa_statistics(const __grid_constant__ mqa_backward b)
{
    const mqa_kernel &a = b.of;
    const int at = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (at >= a.rows * a.heads) return;
    const int query = at / a.heads, head = at - query * a.heads;
    const mqa_query q = a.queries[query];
    const int64_t n = q.sequence, row = q.row;
    const T *const o = (const T *)a.o.p + n * a.o.s[0] + row * a.o.s[1] + head * a.o.s[2],
                   *const d_o = (const T *)b.d_o.p + n * b.d_o.s[0] + row * b.d_o.s[1] + head * b.d_o.s[2];
    float delta = 0.0f;
    for (int c = lane * 8; c < a.dim; c += 256)
        delta = dot_eight<T>(o + c, d_o + c, a.o_wide && b.d_o_wide, delta);
    for (int w = 16; w > 0; w /= 2) delta += __shfl_xor_sync(~0u, delta, w);
    if (lane != 0) return;
    const int keys = q.raw + q.entries;
    const float lse = a.lse.p[n * a.lse.s[0] + head * a.lse.s[1] + row * a.lse.s[2]],
                sink = a.sink != NULL ? a.sink[head] : -INFINITY;
    mqa_head x = {INFINITY, 0.0f, 0.0f, 0.0f};
    if (keys > 0 && lse != -INFINITY && sink != INFINITY) {
        const float most = fmaxf(lse, sink), all = most + log1pf(expf(fminf(lse, sink) - most));
        x = {(sink == -INFINITY ? lse : all) * 1.44269504089f, delta,
             keys == 1 && sink == -INFINITY ? 0.0f : a.scale, delta / (1.0f + expf(lse - sink))};
    }
    b.heads[at] = x;
}

__global__ void __launch_bounds__(SUMMERS)
    mqa_sink(const __grid_constant__ mqa_backward b, double *sums, float *d_sink, bool begins, bool ends)
{
    __shared__ double shares[SUMMERS];
    const int head = blockIdx.x;
    double sum = 0.0;
    for (int i = threadIdx.x; i < b.of.rows; i += SUMMERS)
        sum += (double)b.heads[(int64_t)i * b.of.heads + head].sink;
    shares[threadIdx.x] = sum;
    __syncthreads();
    for (int w = SUMMERS / 2; w > 0; w /= 2) {
        if ((int)threadIdx.x < w) shares[threadIdx.x] += shares[threadIdx.x + w];
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    sum = begins ? shares[0] : sums[head] + shares[0];
    if (ends) d_sink[head] = (float)-sum;
    else sums[head] = sum;
}

quern_status mqa_head_statistics(cudaStream_t stream, const mqa_backward &b, quern_dtype dtype)
{
    const unsigned blocks = blocks_for((int64_t)b.of.rows * b.of.heads, WARPS);
    if (blocks == 0) return QUERN_OK;
    if (dtype == QUERN_BF16) mqa_statistics<bf16><<<blocks, WARPS * 32, 0, stream>>>(b);
    else mqa_statistics<f16><<<blocks, WARPS * 32, 0, stream>>>(b);
    return LAUNCHED("statistics of heads");
}

quern_status mqa_sink_sums(cudaStream_t stream, const mqa_backward &b, double *sums, float *d_sink,
                           bool begins, bool ends)
{
    if (b.of.heads == 0) return QUERN_OK;
    mqa_sink<<<b.of.heads, SUMMERS, 0, stream>>>(b, sums, d_sink, begins, ends);
    return LAUNCHED("gradient of sinks");
}
