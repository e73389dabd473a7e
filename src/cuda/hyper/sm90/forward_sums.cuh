/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_sums.cuh - a sum block: of every token of its share of the tiles the products of a panel's channels
 * with fn, and their squares. fn in two bf16 stays in shared memory, 96 KB; x comes in boxes of 64 tokens by
 * 64 channels, two at once, 128 KB of them on their way. A warpgroup has a tile: 64 rows of x times 48 of fn,
 * and while that product runs each warp the squares of 16 tokens, by products of a warp.
 */
#ifndef QUERN_CUDA_HYPER_SM90_FORWARD_SUMS_CUH
#define QUERN_CUDA_HYPER_SM90_FORWARD_SUMS_CUH

#include "hyper/sm90/forward.cuh"

namespace sm90_hyper_forward
{

/* A block's tiles: share, share + shares, ... */
struct sum_walk {
    int panel, share, count;
};

__device__ __forceinline__ sum_walk sum_walk_of(const forward_params &p, int block)
{
    sum_walk w;
    w.panel = block % p.panels;
    w.share = block / p.panels;
    w.count = w.share < p.tiles ? (p.tiles - w.share + p.shares - 1) / p.shares : 0;
    return w;
}

/* A panel of fn, and what bf16 leaves of it, as tiles of 48 rows that the products read. */
__device__ __forceinline__ void load_fn(const forward_params &p, sum_shared &m, int panel)
{
    const float *const first = p.fn + (int64_t)panel * PANEL_CHANNELS;
    enum { COMPUTING = GROUPS * GROUP_THREADS };
    static_assert(WEIGHTS * BOXES * 8 % COMPUTING == 0, "as many chunks a thread");
#pragma unroll
    for (int n = 0; n < WEIGHTS * BOXES * 8 / COMPUTING; n++) {
        const int i = n * COMPUTING + (int)threadIdx.x - GROUP_THREADS, chunk = i % 8, box = i / 8 % BOXES,
                  j = i / (8 * BOXES);
        const float *const from = first + j * p.fn_row + box * BOX + chunk * 8;
        const float4 a = __ldg((const float4 *)from), b = __ldg((const float4 *)from + 1);
        const float x[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int part = 0; part < FN_PARTS; part++) {
            uint32_t words[4];
#pragma unroll
            for (int w = 0; w < 4; w++) words[w] = pack_two(x[2 * w], x[2 * w + 1], part);
            *(uint4 *)(m.fn[box] + (part * WEIGHTS + j) * BOX * 2 + ((chunk ^ j) & 7) * 16) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

/* Lets the mix blocks come closer, so that their x is still in L2. They may not run yet, and nothing but
 * speed depends on it: false where it took too long. */
__device__ __forceinline__ bool wait_mixed(const forward_params &p, int tile)
{
    if (tile < p.lag) return true;
    for (int i = 0; i < 400; i++) {
        if (load_acquire(p.mixed + tile - p.lag) >= TOKENS) return true;
        __nanosleep(200);
    }
    return false;
}

__device__ __forceinline__ void feed_sums(const forward_params &p, const CUtensorMap &x, sum_shared &m,
                                          const sum_walk &walk)
{
    const int copy_boxes = p.width / BOX, first = walk.panel * BOXES;
    bool waits = true;
    for (int i = 0; i < walk.count; i++) {
        const int tile = walk.share + i * p.shares;
        int copy = first / copy_boxes, box = first % copy_boxes;
        if (waits) waits = wait_mixed(p, tile);
        for (int s = 0; s < STAGES && threadIdx.x == 0; s++) {
            m.free.wait_before(free_at(i, s));
            tma_load(smem_address(m.x[s]), x, m.full.expect(full_at(i, s), AT_ONCE * BOX_BYTES), 0, copy,
                     tile * TOKENS, box);
            box += AT_ONCE;
            if (box == copy_boxes) box = 0, copy++;
        }
        __syncwarp();
    }
}

/* Adds the squares of a warp's 16 tokens of a box: each eight tokens' products with themselves, of which the
 * diagonal counts. An operand's rows of eight tokens are another one's columns. */
__device__ __forceinline__ void add_squares(uint32_t box, float (&low)[4], float (&high)[4])
{
    const int lane = threadIdx.x % 32, token = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < BOX / 16; k++) {
        uint32_t x[4];
        ldmatrix4(x, box + token * BOX * 2 + ((k * 2 + lane / 16) ^ (token & 7)) * 16);
        mma16816<bf16>(low, x, x[0], x[2]);
        mma16816<bf16>(high, x, x[1], x[3]);
    }
}

/* Writes a tile's sums: a thread has columns 8 n + 2 (lane % 4) and the next of rows lane / 4 and 8 more. */
__device__ __forceinline__ void store_sums(const forward_params &p, int panel, int tile,
                                           const float (&acc)[FN_ROWS / 8][4], const float (&low)[4],
                                           const float (&high)[4])
{
    const int lane = threadIdx.x % 32, row = lane / 4, token = threadIdx.x / 32 % 4 * 16 + row;
    float *const to = p.sums + (int64_t)panel * COLUMNS * p.padded + (int64_t)tile * TOKENS + token;
#pragma unroll
    for (int n = 0; n < WEIGHTS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[(n * 8 + lane % 4 * 2 + e % 2) * p.padded + e / 2 * 8] = acc[n][e] + acc[n + WEIGHTS / 8][e];
    if (row / 2 != lane % 4) return; /* not on the diagonal */
    to[WEIGHTS * p.padded] = row % 2 == 0 ? low[0] : low[1];
    to[WEIGHTS * p.padded + 8] = row % 2 == 0 ? high[2] : high[3];
}

__device__ __forceinline__ void sum_tiles(const forward_params &p, sum_shared &m, const sum_walk &walk)
{
#ifdef QUERN_WGMMA
    const int group = group_of_thread();
    const uint64_t fn = wg_tile(smem_address(m.fn), FN_BOX_BYTES);
    for (int i = group; i < walk.count; i += GROUPS) {
        const int tile = walk.share + i * p.shares;
        float acc[FN_ROWS / 8][4] = {}, low[4] = {}, high[4] = {};
#pragma unroll 1
        for (int s = 0; s < STAGES; s++) {
            const uint32_t stage = stage_address(m.x, s);
            m.full.wait(full_at(i, s));
            wg_start();
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++)
#pragma unroll
                for (int k = 0; k < BOX / 16; k++)
                    wg_ss_wide<bf16, FN_ROWS, true>(
                        acc, wg_further(wg_tile(stage, BOX_BYTES), b * BOX_BYTES + k * 32),
                        wg_further(fn, (s * AT_ONCE + b) * FN_BOX_BYTES + k * 32));
            wg_commit();
#pragma unroll
            for (int b = 0; b < AT_ONCE; b++) add_squares(stage + b * BOX_BYTES, low, high);
            wg_wait<0>(acc);
            __syncwarp();
            if (threadIdx.x % 32 == 0) m.free.arrive(free_at(i, s));
        }
        store_sums(p, walk.panel, tile, acc, low, high);
        named_sync(2 + group, GROUP_THREADS);
        if (threadIdx.x % GROUP_THREADS == 0) add_release(p.summed + tile, 1);
    }
#endif
}

__device__ __forceinline__ void sum_block(const forward_params &p, const CUtensorMap &x, sum_shared &m,
                                          int block)
{
    const sum_walk walk = sum_walk_of(p, block);
    if (threadIdx.x == 0) {
        m.full.init(1);
        m.free.init(GROUP_THREADS / 32);
        mbar_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 32) feed_sums(p, x, m, walk);
    if (threadIdx.x < GROUP_THREADS) return;
    load_fn(p, m, walk.panel);
    async_fence();
    named_sync(1, GROUPS * GROUP_THREADS);
    sum_tiles(p, m, walk);
}

} // namespace sm90_hyper_forward

#endif
