/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * rows.cuh - gradients of rows that stand in shared memory: a thread has eight rows of four channels.
 *
 * The weights of the rows, exp(logit - max), stay in registers from the sums to the gradients, so each takes
 * one exp2. Gradients take the place of their rows, from which the copy engine stores them. A value whose
 * logit is -inf becomes 0 before it is used: its weight is 0.
 */
#ifndef QUERN_CUDA_POOL_SM90_ROWS_CUH
#define QUERN_CUDA_POOL_SM90_ROWS_CUH

#include "pool/sm90/params.cuh"
#include "common/mma.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"

/* Until the copy engine has read what was committed, but for the last commit. */
__device__ __forceinline__ void wait_read_but_last()
{
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

template <typename T> __device__ __forceinline__ channels unpack4(uint2 x)
{
    const float2 low = unpack2<T>(x.x), high = unpack2<T>(x.y);
    return {{low.x, low.y, high.x, high.y}};
}

template <typename T> __device__ __forceinline__ uint2 pack4(const channels &v)
{
    return make_uint2(pack2<T>(v.x[0], v.x[1]), pack2<T>(v.x[2], v.x[3]));
}

template <typename T> __device__ __forceinline__ bool has_none(uint32_t least)
{
    return (least & 0xffff) == pairs_of<T>::NONE || least >> 16 == pairs_of<T>::NONE;
}

/* A thread's rows: their weights, the largest logit, sums of the weights and of the weighted values. */
struct weighted_rows {
    channels weight[ROWS], most, sum, weighted;
};

/* Where a thread's rows stand: values and logits `STEP` bytes from row to row, biases one row of `LANES`
 * threads from row to row. */
template <typename T, int STEP, int LANES> struct thread_rows {
    char *value, *logit;
    const float4 *bias;
    bool no_bias; /* some bias is -inf */

    __device__ __forceinline__ uint2 values(int u) const { return *(const uint2 *)(value + u * STEP); }
    __device__ __forceinline__ uint2 logits(int u) const { return *(const uint2 *)(logit + u * STEP); }
};

/* Values without weight become 0. */
template <typename T, int FIRST, int END, int STEP, int LANES>
__device__ __forceinline__ void clear_values(const thread_rows<T, STEP, LANES> &rows)
{
#pragma unroll 1
    for (int u = FIRST; u < END; u++) {
        const channels x = unpack4<T>(rows.logits(u));
        const float4 bias = rows.bias[u * LANES];
        channels v = unpack4<T>(rows.values(u));
        const float own[] = {bias.x, bias.y, bias.z, bias.w};
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++)
            if (x.x[i] + own[i] == -INFINITY) v.x[i] = 0.0f;
        *(uint2 *)(rows.value + u * STEP) = pack4<T>(v);
    }
}

/* Logits of rows FIRST ... END - 1, and the largest. */
template <typename T, int FIRST, int END, int STEP, int LANES>
__device__ __forceinline__ void take_logits(weighted_rows &w, const thread_rows<T, STEP, LANES> &rows)
{
    uint32_t least = 0;
#pragma unroll
    for (int u = FIRST; u < END; u++) {
        const uint2 raw = rows.logits(u);
        const float4 bias = rows.bias[u * LANES];
        const channels x = unpack4<T>(raw);
        const float own[] = {bias.x, bias.y, bias.z, bias.w};
        least = least2<T>(least, least2<T>(raw.x, raw.y));
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            w.weight[u].x[i] = x.x[i] + own[i];
            w.most.x[i] = fmaxf(w.most.x[i], w.weight[u].x[i]);
        }
    }
    if (rows.no_bias || has_none<T>(least)) clear_values<T, FIRST, END>(rows);
}

/* Logits become weights. */
template <typename T, int FIRST, int END, int STEP, int LANES>
__device__ __forceinline__ void take_sums(weighted_rows &w, const thread_rows<T, STEP, LANES> &rows)
{
    const float log2_e = 1.44269504089f;
#pragma unroll
    for (int u = FIRST; u < END; u++) {
        const channels v = unpack4<T>(rows.values(u));
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            const float weight = exp2_fast(fmaf(w.weight[u].x[i], log2_e, w.most.x[i] * -log2_e));
            w.weight[u].x[i] = weight;
            w.sum.x[i] += weight;
            w.weighted.x[i] = fmaf(weight, v.x[i], w.weighted.x[i]);
        }
    }
}

__device__ __forceinline__ void begin_rows(weighted_rows &w)
{
#pragma unroll
    for (int i = 0; i < GROUP_CHANNELS; i++) {
        w.most.x[i] = -1e38f; /* times log2(e) it is finite */
        w.sum.x[i] = w.weighted.x[i] = 0.0f;
    }
}

/* Gradients in the rows' places; adds those of logits to `bias`. scale: of a weight, so that it is p d. */
template <typename T, int FIRST, int END, int STEP, int LANES>
__device__ __forceinline__ void spread_rows(const weighted_rows &w, const thread_rows<T, STEP, LANES> &rows,
                                            const channels &pooled, const channels &scale,
                                            channels (&bias)[ROWS])
{
#pragma unroll
    for (int u = FIRST; u < END; u++) {
        const channels v = unpack4<T>(rows.values(u));
        channels d_value, d_logit;
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) {
            d_value.x[i] = w.weight[u].x[i] * scale.x[i];
            d_logit.x[i] = d_value.x[i] * (v.x[i] - pooled.x[i]);
            bias[u].x[i] += d_logit.x[i];
        }
        *(uint2 *)(rows.value + u * STEP) = pack4<T>(d_value);
        *(uint2 *)(rows.logit + u * STEP) = pack4<T>(d_logit);
    }
}

__device__ __forceinline__ float4 float4_of(const channels &v)
{
    return make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
}

__device__ __forceinline__ channels channels_of(const float4 &v)
{
    return {{v.x, v.y, v.z, v.w}};
}

#endif
