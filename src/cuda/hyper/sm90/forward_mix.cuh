/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_mix.cuh - a mix block. Three warps make weights, eight tokens at a time, of whichever come next;
 * one asks for the rows of the block's tokens, block, block + blocks, ..., once their weights are there; a
 * warpgroup makes a token's input and new copies. The sum blocks read x just before: some of it is in L2.
 */
#ifndef QUERN_CUDA_HYPER_SM90_FORWARD_MIX_CUH
#define QUERN_CUDA_HYPER_SM90_FORWARD_MIX_CUH

#include "hyper/sm90/forward.cuh"
#include "hyper/sm90/weights.cuh"

namespace sm90_hyper_forward
{

/* A block's tokens: first, first + stride, ... */
struct mix_walk {
    int64_t first, stride;
    int count;
    __device__ __forceinline__ int64_t token(int k) const { return first + k * stride; }
};

__device__ __forceinline__ mix_walk mix_walk_of(const forward_params &p, int block, int blocks)
{
    mix_walk w;
    w.first = block;
    w.stride = blocks;
    w.count = block < p.tokens ? (int)((p.tokens - block + blocks - 1) / blocks) : 0;
    return w;
}

__device__ __forceinline__ float sum_row(const forward_params &p, int64_t token, int row,
                                         float (&sum)[ROW_WEIGHTS])
{
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < ROW_WEIGHTS; j++) sum[j] = 0.0f;
#pragma unroll 4
    for (int s = 0; s < p.panels; s++)
#pragma unroll
        for (int j = 0; j < ROW_WEIGHTS; j++)
            sum[j] += __ldcg(p.sums + ((int64_t)s * COLUMNS + row_column(row, j)) * p.padded + token);
    for (int s = row; s < p.panels; s += COPIES)
        square += __ldcg(p.sums + ((int64_t)s * COLUMNS + WEIGHTS) * p.padded + token);
    square += __shfl_xor_sync(~0u, square, 1);
    return square + __shfl_xor_sync(~0u, square, 2);
}

/* A unit's weights: four lanes have a token, each a row of its matrix. */
__device__ __forceinline__ void weigh_unit(const forward_params &p, int unit)
{
    const int row = threadIdx.x % COPIES;
    const int64_t token = (int64_t)unit * UNIT + threadIdx.x % 32 / COPIES;
    float sum[ROW_WEIGHTS];
    row_weights w;
    const float square = sum_row(p, token, row, sum);
    make_weights(p, row_bases{p.scale, p.base, row}, square, sum, w);
    if (token < p.tokens) {
        give_weights(p, token, row, w);
        float *const to = p.weights + token * WEIGHTS;
        to[row] = w.pre;
        to[COPIES + row] = w.post;
        *(float4 *)(to + COMB + row * COPIES) = make_float4(w.comb[0], w.comb[1], w.comb[2], w.comb[3]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_release(p.weighed + unit, 1);
}

__device__ __forceinline__ void weigh_units(const forward_params &p)
{
    for (;;) {
        int unit = 0;
        if (threadIdx.x % 32 == 0) unit = atomicAdd(p.units, 1);
        unit = __shfl_sync(~0u, unit, 0);
        if (unit >= p.tiles * TILE_UNITS) return;
        wait_count(p.summed + unit / TILE_UNITS, p.panels);
        __syncwarp();
        weigh_unit(p, unit);
    }
}

/* How many of the walk's tokens from k on have weights, up to 32; at least one. */
__device__ __forceinline__ int wait_weighed(const forward_params &p, const mix_walk &walk, int k)
{
    const int at = k + threadIdx.x % 32;
    for (;;) {
        const bool there = at < walk.count && load_acquire(p.weighed + (int)(walk.token(at) / UNIT)) != 0;
        const uint32_t missing = ~__ballot_sync(~0u, there);
        if ((missing & 1) == 0) {
            __syncwarp();
            return missing != 0 ? __ffs((int)missing) - 1 : 32;
        }
        __nanosleep(50);
    }
}

__device__ __forceinline__ bf16 *row_at(const token_rows &r, int64_t token, int copy, int channel)
{
    return (bf16 *)r.p + token * r.token + copy * r.copy + channel;
}

template <int EACH, bool OUT>
__device__ __forceinline__ void feed_tokens(const forward_params &p, mix_shared<EACH, OUT> &m,
                                            const mix_walk &walk)
{
    enum { ROWS = COPIES + OUT, STAGES = mix_shared<EACH, OUT>::STAGES };
    const int lane = threadIdx.x % 32, bytes = p.width * 2;
    int known = 0;
    for (int k = 0; k < walk.count; k++, known--) {
        const int64_t token = walk.token(k);
        const ring_place<STAGES> at = m.tokens.free_at(k);
        auto &t = m.stage[at.stage];
        if (known == 0) known = wait_weighed(p, walk, k);
        m.tokens.free.wait_before(at);
        if (lane < WEIGHTS / 4) {
            cp_async16(smem_address(t.weights + lane * 4), p.weights + token * WEIGHTS + lane * 4, true);
            m.tokens.full.arrive_copies(m.tokens.full_at(k));
        }
        if (lane == 0) {
            const uint32_t bar = m.tokens.full.expect(m.tokens.full_at(k), ROWS * bytes);
            for (int i = 0; i < COPIES; i++)
                bulk_load(smem_address(t.row[i]), row_at(p.x, token, i, 0), bytes, bar);
            if (OUT) bulk_load(smem_address(t.row[ROWS - 1]), row_at(p.f, token, 0, 0), bytes, bar);
        }
        __syncwarp();
    }
}

/* A token's weights as a thread of a group holds them. */
struct mix_weights {
    float pre[COPIES], post[COPIES], comb[COPIES][COPIES];
};

__device__ __forceinline__ mix_weights load_weights(const float *from)
{
    mix_weights w;
    float all[WEIGHTS];
#pragma unroll
    for (int j = 0; j < WEIGHTS; j += 4) {
        const float4 x = *(const float4 *)(from + j);
        all[j] = x.x, all[j + 1] = x.y, all[j + 2] = x.z, all[j + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        w.pre[i] = all[i], w.post[i] = all[COPIES + i];
#pragma unroll
        for (int k = 0; k < COPIES; k++) w.comb[i][k] = all[COMB + i * COPIES + k];
    }
    return w;
}

/* Eight channels: the sum of copies to c, its square added, and the new copies stored. */
template <bool OUT>
__device__ __forceinline__ void mix_chunk(const forward_params &p, const uint4 *row, int stride,
                                          const mix_weights &w, int64_t token, int channel, float (&c)[CHUNK],
                                          float &square)
{
    uint4 x[COPIES], f = {};
    uint32_t out[COPIES][4];
#pragma unroll
    for (int i = 0; i < COPIES; i++) x[i] = row[i * stride];
    if (OUT) f = row[COPIES * stride];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 of_f = unpack2<bf16>(word_of(f, e));
        float2 sum = {}, here[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            here[i] = unpack2<bf16>(word_of(x[i], e));
            sum.x = fmaf(w.pre[i], here[i].x, sum.x);
            sum.y = fmaf(w.pre[i], here[i].y, sum.y);
        }
        c[2 * e] = sum.x, c[2 * e + 1] = sum.y;
        square = fmaf(sum.x, sum.x, square);
        square = fmaf(sum.y, sum.y, square);
#pragma unroll
        for (int k = 0; OUT && k < COPIES; k++) {
            float2 to = {w.post[k] * of_f.x, w.post[k] * of_f.y};
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                to.x = fmaf(w.comb[i][k], here[i].x, to.x);
                to.y = fmaf(w.comb[i][k], here[i].y, to.y);
            }
            out[k][e] = pack2<bf16>(to.x, to.y);
        }
    }
#pragma unroll
    for (int k = 0; OUT && k < COPIES; k++)
        __stcs((uint4 *)row_at(p.out, token, k, channel),
               make_uint4(out[k][0], out[k][1], out[k][2], out[k][3]));
}

/* The sum over a group; `parts`: a float a warp, other ones than the time before. */
__device__ __forceinline__ float group_sum(float x, float *parts)
{
#pragma unroll
    for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(~0u, x, by);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32 % 4] = x;
    named_sync(2 + group_of_thread(), GROUP_THREADS);
    const float4 all = *(const float4 *)parts;
    return (all.x + all.y) + (all.z + all.w);
}

__device__ __forceinline__ void store_input(const forward_params &p, const float *norm, int64_t token,
                                            int channel, const float (&c)[CHUNK], float scale)
{
    const chunk n = load_shared(norm + channel);
    uint32_t h[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
        h[e] = pack2<bf16>(c[2 * e] * scale * n.x[2 * e], c[2 * e + 1] * scale * n.x[2 * e + 1]);
    __stcs((uint4 *)row_at(p.h, token, 0, channel), make_uint4(h[0], h[1], h[2], h[3]));
}

template <int EACH, bool OUT>
__device__ __forceinline__ void mix_tokens(const forward_params &p, mix_shared<EACH, OUT> &m,
                                           const mix_walk &walk)
{
    enum { STAGES = mix_shared<EACH, OUT>::STAGES };
    const int group = group_of_thread(), thread = threadIdx.x % GROUP_THREADS;
    for (int k = group, turn = 0; k < walk.count; k += GROUPS, turn ^= 1) {
        const ring_place<STAGES> at = m.tokens.free_at(k);
        const int64_t token = walk.token(k);
        float c[EACH][CHUNK], square = 0.0f;
        m.tokens.full.wait(m.tokens.full_at(k));
        const auto &t = m.stage[at.stage];
        const mix_weights w = load_weights(t.weights);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int chunk = e * GROUP_THREADS + thread;
            if (chunk * CHUNK < p.width)
                mix_chunk<OUT>(p, &t.row[0][chunk], EACH * GROUP_THREADS, w, token, chunk * CHUNK, c[e],
                               square);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) m.tokens.free.arrive(at);
        const float sum = group_sum(square, m.parts[group][turn]),
                    scale = 1.0f / sqrtf(sum / (float)p.width + p.rms_eps);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int channel = (e * GROUP_THREADS + thread) * CHUNK;
            if (channel < p.width) store_input(p, m.norm, token, channel, c[e], scale);
        }
        if (thread == 0) atomicAdd(p.mixed + token / TOKENS, 1);
    }
}

template <int EACH, bool OUT>
__device__ __forceinline__ void mix_block(const forward_params &p, mix_shared<EACH, OUT> &m, int block,
                                          int blocks)
{
    const mix_walk walk = mix_walk_of(p, block, blocks);
    if (threadIdx.x == 0) {
        m.tokens.init(1 + WEIGHTS / 4, GROUP_THREADS / 32);
        mbar_init_done();
    }
    for (int i = threadIdx.x; i < p.width; i += THREADS) m.norm[i] = p.norm.at(i);
    __syncthreads();
    if (threadIdx.x < 32) feed_tokens<EACH, OUT>(p, m, walk);
    else if (threadIdx.x < GROUP_THREADS) weigh_units(p);
    else mix_tokens<EACH, OUT>(p, m, walk);
}

} // namespace sm90_hyper_forward

#endif
