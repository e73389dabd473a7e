/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the warpgroups that compute, and the kernel. GROUP: which of the two a warpgroup is. */
#ifndef QUERN_CUDA_ATTEND_MQA_SM90_BACKWARD_KERNEL_CUH
#define QUERN_CUDA_ATTEND_MQA_SM90_BACKWARD_KERNEL_CUH

#include "attend_mqa/sm90_backward/feed.cuh"
#include "hopper/epilogue.cuh"

namespace sm90_mqa_backward
{

enum { KEY_TILES = KEYS / 8, OWN_TILES = KEY_TILES / 2 };

/* s = rows K^T of a tile; the half of K that this warpgroup does not need again is given back. */
template <typename T, int GROUP>
__device__ __forceinline__ void multiply_keys(float (&s)[KEY_TILES][4], uint32_t rows, shared<T> &m,
                                              ring_place<HALVES> at)
{
    const ring_place<HALVES> first = at;
    const uint64_t a = wg_fresh(wg_tile(rows, 0));
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        m.keys.wait_full(at);
        wg_show();
        const uint64_t keys = wg_fresh(wg_tile(smem_address(m.k[half]), 0));
        wg_start();
#pragma unroll
        for (int i = 0; i < HALF * 4; i++) {
            const uint64_t x = wg_further(a, half * HALF * PANEL_BYTES + i / 4 * PANEL_BYTES + i % 4 * 32),
                           y = wg_further(keys, i / 4 * PANEL_BYTES + i % 4 * 32);
            if (half == 0 && i == 0) wgmma_ss<T, KEYS, false, false>(s, x, y);
            else wgmma_ss<T, KEYS, true, false>(s, x, y);
        }
        wg_commit();
        at.advance();
    }
    wg_wait<0>(s);
    at = first;
    if (GROUP == 0) at.advance();
    m.keys.give_back(at);
}

/* Of a thread's two rows. */
struct two_heads {
    float lse2[2], delta[2], scale[2];
};

/* P and dS of four tiles of keys, from S and dP of these, into shared memory. */
template <typename T>
__device__ __forceinline__ void put_weights(const mqa_backward &b, shared<T> &m, const two_heads &h,
                                            float (&s)[OWN_TILES][4], float (&dp)[OWN_TILES][4], int keys,
                                            int group)
{
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 % 4 * 16,
              column0 = group * (KEYS / 2) + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < OWN_TILES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const bool sees = column0 + i * 8 + c % 2 < keys;
            s[i][c] = sees ? exp2_fast(fmaf(s[i][c], b.of.scale2, -h.lse2[c / 2])) : 0.0f;
            dp[i][c] = sees ? s[i][c] * (dp[i][c] - h.delta[c / 2]) * h.scale[c / 2] : 0.0f;
        }
    const uint32_t p = smem_address(m.p), ds = smem_address(m.ds);
#pragma unroll
    for (int i = 0; i < OWN_TILES; i += 2) {
        store_columns<T, HEADS>(p, s[i], s[i + 1], row0, group * OWN_TILES + i);
        store_columns<T, HEADS>(ds, dp[i], dp[i + 1], row0, group * OWN_TILES + i);
    }
}

/* Exchanges halves of S and dP and makes P and dS of this warpgroup's keys. */
template <typename T, int GROUP>
__device__ __forceinline__ void make_weights(const mqa_backward &b, shared<T> &m, const two_heads &h,
                                             float (&own)[KEY_TILES][4], int keys, const ring_place<1> &here)
{
    const int thread = threadIdx.x % 128;
    constexpr int MINE = GROUP * OWN_TILES, OTHERS = (1 - GROUP) * OWN_TILES;
    float mine[OWN_TILES][4], other[OWN_TILES][4];
#pragma unroll
    for (int i = 0; i < OWN_TILES; i++) {
        const float(&x)[4] = own[OTHERS + i];
        m.exchange[GROUP][i][thread] = make_float4(x[0], x[1], x[2], x[3]);
#pragma unroll
        for (int c = 0; c < 4; c++) mine[i][c] = own[MINE + i][c];
    }
    m.exchanged.arrive(here);
    m.exchanged.wait(here);
#pragma unroll
    for (int i = 0; i < OWN_TILES; i++) {
        const float4 x = m.exchange[1 - GROUP][i][thread];
        other[i][0] = x.x;
        other[i][1] = x.y;
        other[i][2] = x.z;
        other[i][3] = x.w;
    }
    if (GROUP == 0) put_weights(b, m, h, mine, other, keys, GROUP);
    else put_weights(b, m, h, other, mine, keys, GROUP);
    wg_show();
    m.weights_made.arrive(here);
    m.weights_made.wait(here);
}

/* d_q += dS K in this warpgroup's columns. */
template <typename T>
__device__ __forceinline__ void multiply_gradients(float (&d_q)[32][4], shared<T> &m, int half)
{
    const uint64_t ds = wg_fresh(wg_tile(smem_address(m.ds), 0)),
                   k = wg_fresh(wg_tile(smem_address(m.k[half]), PANEL_BYTES));
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++) {
        wgmma_ss<T, 128, true, true>(*(float(*)[16][4])d_q, wg_further(ds, i * 32),
                                     wg_further(k, i * 16 * 128));
        wgmma_ss<T, 128, true, true>(*(float(*)[16][4])(d_q + 16), wg_further(ds, i * 32),
                                     wg_further(k, 2 * PANEL_BYTES + i * 16 * 128));
    }
    wg_commit();
}

/* P^T dO + dS^T Q in the 128 columns from panel `panel` on. */
template <typename T>
__device__ __forceinline__ void multiply_heads(float (&sums)[16][4], shared<T> &m, int panel)
{
    const uint64_t p = wg_fresh(wg_tile(smem_address(m.p), 0)), ds = wg_fresh(wg_tile(smem_address(m.ds), 0)),
                   d_o = wg_fresh(wg_tile(smem_address(m.d_o) + panel * PANEL_BYTES, PANEL_BYTES)),
                   q = wg_fresh(wg_tile(smem_address(m.q) + panel * PANEL_BYTES, PANEL_BYTES));
#pragma unroll
    for (int i = 0; i < HEADS / 16; i++) {
        const uint32_t further = i * 16 * 128;
        if (i == 0) wg_rows<T, 128, false>(sums, p, d_o);
        else wg_rows<T, 128, true>(sums, wg_further(p, further), wg_further(d_o, further));
    }
#pragma unroll
    for (int i = 0; i < HEADS / 16; i++)
        wg_rows<T, 128, true>(sums, wg_further(ds, i * 16 * 128), wg_further(q, i * 16 * 128));
    wg_commit();
}

template <typename T>
__device__ __forceinline__ void store_partials(const mqa_backward &b, const tile_info &info, int group,
                                               const float (&sums)[16][4], int column0)
{
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t partial = info.partial[row + h * 8];
        store_row((T *)b.partials + (partial * b.groups + group) * MQA_DIM + column0 + threadIdx.x % 4 * 8,
                  sums, h, partial >= 0, true);
    }
}

template <typename T, int GROUP>
__device__ __forceinline__ void compute(const mqa_backward &b, shared<T> &m, int items)
{
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    ring_place<HALVES> at;
    uint32_t tile = 0, turn = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
        const int query = item / b.groups, group = item - query * b.groups;
        m.heads_full.wait({0, turn});
        if (b.of.rotation.dim > 0) {
            mqa_rotate<T, HEADS>(b.of, (char *)m.d_o, b.of.queries[query].position, threadIdx.x - 128,
                                 COMPUTERS);
            wg_show();
            const ring_place<1> here = {0, turn};
            m.rotated.arrive(here);
            m.rotated.wait(here);
        }
        const mqa_head *const heads = m.heads;
        const two_heads h = {{heads[row].lse2, heads[row + 8].lse2},
                             {heads[row].delta, heads[row + 8].delta},
                             {heads[row].scale, heads[row + 8].scale}};
        float d_q[32][4];
#pragma unroll
        for (int i = 0; i < 32; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) d_q[i][c] = 0.0f;
        for (bool last = false; !last; tile ^= 1) {
            {
                float s[KEY_TILES][4];
                multiply_keys<T, GROUP>(s, GROUP == 0 ? smem_address(m.q) : smem_address(m.d_o), m, at);
                last = m.info[tile].last != 0;
                make_weights<T, GROUP>(b, m, h, s, m.info[tile].keys, {0, tile});
            }
            float sums[16][4];
            wg_start();
            multiply_gradients(d_q, m, GROUP);
            multiply_heads(sums, m, GROUP * HALF);
            wg_wait<1>(d_q);
            if (GROUP == 1) at.advance();
            m.keys.give_back(at);
            at.advance();
            if (GROUP == 0) at.advance();
            wg_wait<0>(sums);
            store_partials<T>(b, m.info[tile], group, sums, GROUP * 256);
            wg_start();
            multiply_heads(sums, m, GROUP * HALF + 2);
            wg_wait<0>(sums);
            if (last) m.heads_free.arrive({});
            store_partials<T>(b, m.info[tile], group, sums, GROUP * 256 + 128);
        }
        if (b.d_q.p == NULL) continue;
        const mqa_query &q = b.of.queries[query];
        const int head = group * HEADS + row;
        T *const to = (T *)b.d_q.p + q.sequence * b.d_q.s[0] + q.row * b.d_q.s[1] + head * b.d_q.s[2] +
                      GROUP * 256 + threadIdx.x % 4 * 8;
#pragma unroll
        for (int r = 0; r < 2; r++)
            store_row(to + r * 8 * b.d_q.s[2], d_q, r, head + r * 8 < b.of.heads, b.d_q_wide);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    attend_mqa_backward_sm90(const __grid_constant__ mqa_backward b, const int items)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<T> &m = *(shared<T> *)memory;
    if (threadIdx.x == 0) {
        m.keys.init(2 * 128, COMPUTERS);
        m.heads_full.init(2 * 128);
        m.rotated.init(COMPUTERS);
        m.exchanged.init(COMPUTERS);
        m.weights_made.init(COMPUTERS);
        m.heads_free.init(COMPUTERS);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == 0) {
        registers_down<FEED_REGISTERS>();
        feed<T>(b, m, items);
    } else {
        registers_up<COMPUTE_REGISTERS>();
        if (group == 1) compute<T, 0>(b, m, items);
        else compute<T, 1>(b, m, items);
    }
#endif
}

template <typename T> static quern_status launch(const stage_exec *exec, const mqa_backward &b)
{
    const int items = b.of.rows * b.groups;
    const unsigned grid = (unsigned)(items < exec->multiprocessors ? items : exec->multiprocessors);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, attend_mqa_backward_sm90<T>, dim3(grid), THREADS,
                         sizeof(shared<T>), "backward of attention over entries", b, items);
}

} // namespace sm90_mqa_backward

#endif
