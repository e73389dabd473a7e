/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * keys.cuh - keys_index's gradient of dense calls: a block has 128 entries and walks a part of the slice's
 * queries. A thread copies a query's heads, the bits of its products and its gradients, three runs of
 * bytes. Two pairs of warpgroups take the queries in turn, each with sums of its own, and of a pair each
 * has 64 entries. Limit: tensor cores; heads come from L2 once a block, 16 KB for 2 MFLOP.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_KEYS_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_KEYS_CUH

#include "hopper/tma.cuh"
#include "indexer_loss/sm90/operands.cuh"

namespace sm90_loss
{

enum { KEYS_STAGES = 8, KEYS_THREADS = (KEYS_PAIRS * 2 + 1) * 128 };

struct keys_stage {
    bf16 heads[WIDTH / 64][HEADS][64];
    uint64_t positive[TILE];
    bf16 gradient[TILE];
    char none[1024 - TILE * 2];
};
static_assert(sizeof(keys_stage) % 1024 == 0, "heads stand at multiples of 1024 bytes");

struct keys_shared {
    keys_stage stages[KEYS_STAGES];
    ring<KEYS_STAGES> queries;
};

/* Queries [from, end) of the slice that a block walks: those of its share that see one of its entries. */
__device__ __forceinline__ void block_queries(const slice &s, int &from, int &end)
{
    const loss_params &p = s.of;
    const int64_t entry = (int64_t)blockIdx.x * TILE, sees = (entry + 1) * p.ratio - 1 - p.position - s.first,
                  each = (s.count + gridDim.y - 1) / gridDim.y, begin = each * blockIdx.y;
    end = (int)min(begin + each, s.count);
    from = (int)max(begin, sees);
}

__device__ __forceinline__ void feed_queries(const slice &s, keys_shared &m, int from, int end)
{
    enum { GRADIENT_BYTES = TILE * 2, POSITIVE_BYTES = TILE * 8 };
    ring_place<KEYS_STAGES> at;
    for (int i = from; i < end; i++) {
        const int64_t tile = (i * s.tiles + blockIdx.x) * TILE;
        m.queries.wait_free(at);
        const uint32_t bar = m.queries.expect(at, LOSS_HEAD_BYTES + POSITIVE_BYTES + GRADIENT_BYTES),
                       to = stage_address(m.stages, at.stage);
        bulk_load(to, s.heads + (int64_t)i * LOSS_HEAD_BYTES, LOSS_HEAD_BYTES, bar);
        bulk_load(to + LOSS_HEAD_BYTES, s.positive + tile, POSITIVE_BYTES, bar);
        bulk_load(to + LOSS_HEAD_BYTES + POSITIVE_BYTES, s.gradient + tile, GRADIENT_BYTES, bar);
        at.advance();
    }
}

__global__ void __launch_bounds__(KEYS_THREADS, 1) indexer_loss_keys(const __grid_constant__ slice s)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    keys_shared &m = *(keys_shared *)memory;
    int from, end;
    block_queries(s, from, end);
    if (threadIdx.x == 0) {
        m.queries.init(1, 256);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (group == KEYS_PAIRS * 2) {
        registers_down<24>();
        if (threadIdx.x % 128 == 0) feed_queries(s, m, from, end);
        return;
    }
    registers_up<112>();
    const int pair = group / 2, half = group % 2,
              row = warp_of_group() * 16 + threadIdx.x % 32 / 4 + half * 64;
    float c[COLUMN_TILES][4];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[j][e] = 0.0f;
    ring_place<KEYS_STAGES> at;
    if (pair == 1) at.advance();
    for (int i = from + pair; i < end; i += KEYS_PAIRS) {
        m.queries.wait_full(at);
        const keys_stage &here = m.stages[at.stage];
        const uint16_t *const gradient = (const uint16_t *)here.gradient;
        const uint32_t low = gradient[row] * 0x10001u, high = gradient[row + 8] * 0x10001u,
                       rows[4] = {low, high, low, high};
        uint32_t a[4][4];
#pragma unroll
        for (int k = 0; k < 4; k++) turn_bits(a[k], (const uint8_t *)here.positive, half, k, rows);
        const uint64_t heads = wg_fresh(wg_tile(stage_address(m.stages, at.stage), HEAD_PANEL));
        wg_start();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wg_rs_wide<bf16, WIDTH, true, true>(c, a[k], wg_further(heads, k * 16 * 128));
        wg_commit();
        wg_wait<0>(c);
        m.queries.give_back(at);
        at.advance();
        at.advance();
    }
    const loss_params &p = s.of;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t entry = (int64_t)blockIdx.x * TILE + row + h * 8;
        if (entry >= p.entries) continue;
        const int64_t share = blockIdx.y * KEYS_PAIRS + pair;
        float *const to = s.sums + (share * p.entries + entry) * p.width + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; j++) {
            if (j * 8 >= p.width) continue;
            float2 *const two = (float2 *)(to + j * 8);
            const float2 sum = make_float2(c[j][h * 2] * p.scale_index, c[j][h * 2 + 1] * p.scale_index),
                         old = s.adds ? *two : make_float2(0.0f, 0.0f);
            *two = make_float2(old.x + sum.x, old.y + sum.y);
        }
    }
#endif
}

} // namespace sm90_loss

#endif
