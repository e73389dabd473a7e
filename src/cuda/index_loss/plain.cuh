/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plain.cuh - items of the block indexer's loss for any dtype, width and address: a thread a key, on the f32
 * cores, one query after another; operands come from L1 and L2. Products leave out what a query does not see,
 * so nothing that is not finite passes a mask. Limit: the f32 cores.
 */
#ifndef QUERN_CUDA_INDEX_LOSS_PLAIN_CUH
#define QUERN_CUDA_INDEX_LOSS_PLAIN_CUH

#include "index_loss/params.cuh"

namespace index_loss
{

enum { PLAIN_WARPS = KEYS / 32 };

struct plain_shared {
    float parts[2][PLAIN_WARPS];
    float gradient[KEYS];
};

template <typename T> static __device__ __forceinline__ float dot(const T *a, const T *b, int n)
{
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 0; i < n; i++) sum = fmaf(to_float(a[i]), to_float(b[i]), sum);
    return sum;
}

/* x and y added up over the block's threads, in all of them. */
static __device__ __forceinline__ float2 add_block(plain_shared &m, float x, float y)
{
    for (int by = 16; by > 0; by /= 2) {
        x += __shfl_xor_sync(~0u, x, by);
        y += __shfl_xor_sync(~0u, y, by);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        m.parts[0][threadIdx.x / 32] = x;
        m.parts[1][threadIdx.x / 32] = y;
    }
    __syncthreads();
    float2 sum = make_float2(0.0f, 0.0f);
    for (int w = 0; w < PLAIN_WARPS; w++) {
        sum.x += m.parts[0][w];
        sum.y += m.parts[1][w];
    }
    return sum;
}

/* Maximum and sum of powers of 2, in all threads. */
static __device__ __forceinline__ float2 weigh_block(plain_shared &m, float score, bool seen)
{
    float most = seen ? score : -INFINITY;
    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, by));
    __syncthreads();
    if (threadIdx.x % 32 == 0) m.parts[0][threadIdx.x / 32] = most;
    __syncthreads();
    for (int w = 0; w < PLAIN_WARPS; w++) most = fmaxf(most, m.parts[0][w]);
    const float from = most == -INFINITY ? 0.0f : most;
    const float2 sum = add_block(m, seen ? exp2f(score - from) : 0.0f, 0.0f);
    return make_float2(most, sum.x);
}

/* A query, and the thread's key. */
template <typename T> struct plain_pair {
    const T *q_index, *key_index, *key;
    int32_t query, seen;
    int64_t part;
    bool sees;
};

template <typename T>
static __device__ __forceinline__ void plain_weigh(const params &p, const item &x, plain_shared &m,
                                                   const plain_pair<T> &at)
{
    const float2 own = weigh_block(
        m, at.sees ? dot(at.q_index, at.key_index, p.width) * p.scale_index2 : 0.0f, at.sees);
    if (threadIdx.x == 0) p.student[at.part] = own;
    for (int64_t h = 0; h < p.group; h++) {
        const int64_t head = x.list * p.group + h;
        float lse;
        if (given_lse(p, p.first + at.query, head, &lse)) continue;
        const T *const q = query_row<T>(p, p.q, x, at.query, head);
        const float2 of = weigh_block(m, at.sees ? dot(q, at.key, p.dim) * p.scale2 : 0.0f, at.sees);
        if (threadIdx.x == 0) p.teacher[at.part * p.group + h] = of;
    }
}

template <typename T>
static __device__ __forceinline__ void plain_run(const params &p, const item &x, plain_shared &m,
                                                 const plain_pair<T> &at)
{
    const int64_t row = x.list * p.queries + at.query;
    float teacher = 0.0f, gradient = 0.0f, term = 0.0f;
    if (at.sees) {
        for (int64_t h = 0; h < p.group; h++) {
            const T *const q = query_row<T>(p, p.q, x, at.query, x.list * p.group + h);
            teacher += exp2f(dot(q, at.key, p.dim) * p.scale2 - p.lse2[row * p.group + h]);
        }
        teacher /= (float)p.group;
        const float log2_p = dot(at.q_index, at.key_index, p.width) * p.scale_index2 - p.lse_index[row];
        gradient = exp2f(log2_p) - teacher;
        term = teacher * (logf(fmaxf(teacher, 1e-10f)) - log2_p * 0.69314718f);
    }
    const float2 sums = add_block(m, term, teacher);
    m.gradient[threadIdx.x] = gradient;
    if (threadIdx.x == 0) p.terms[at.part] = sums;
    __syncthreads();
    const int64_t head = p.shared ? 0 : x.list;
    for (int d = threadIdx.x; p.d_q != NULL && d < p.width; d += KEYS) {
        float sum = 0.0f;
        for (int s = 0; s < at.seen; s++)
            sum = fmaf(m.gradient[s], to_float(key_row<T>(p.key_index, x, s, head)[d]), sum);
        p.d_q[at.part * p.width + d] = sum;
    }
    if (p.d_keys == NULL || !at.sees) return;
    float *const to = sums_row(p, x, threadIdx.x);
    for (int d = 0; d < p.width; d++) to[d] = fmaf(gradient, to_float(at.q_index[d]), to[d]);
}

template <typename T, bool WEIGHS>
static __global__ void __launch_bounds__(KEYS) index_loss_plain(const __grid_constant__ params p)
{
    __shared__ plain_shared m;
    item x;
    if (!item_at(p, blockIdx.x, &x)) return;
    const int key = (int)threadIdx.x < x.keys ? (int)threadIdx.x : 0;
    plain_pair<T> at;
    for (int i = 0; i < x.count; i++) {
        const int32_t entry = x.entries[i];
        at.query = (int32_t)(entry / p.k);
        at.part = part_of(p, x.list, entry, x.sub);
        at.seen = item_seen(p, x, at.query);
        if (!WEIGHS && p.idle[x.list * p.queries + at.query]) at.seen = 0;
        at.sees = (int)threadIdx.x < at.seen;
        at.q_index = query_row<T>(p, p.q_index, x, at.query, x.list);
        at.key_index = key_row<T>(p.key_index, x, key, p.shared ? 0 : x.list);
        at.key = key_row<T>(p.key, x, key, x.list);
        if (WEIGHS) plain_weigh(p, x, m, at);
        else plain_run(p, x, m, at);
        __syncthreads();
    }
}

template <typename T> static quern_status plain(const params &p, bool weighs, cudaStream_t stream)
{
    const unsigned items = (unsigned)(p.lists * p.blocks * p.subs);
    if (weighs) index_loss_plain<T, true><<<items, KEYS, 0, stream>>>(p);
    else index_loss_plain<T, false><<<items, KEYS, 0, stream>>>(p);
    return LAUNCHED("index_loss, items");
}

} // namespace index_loss

#endif
