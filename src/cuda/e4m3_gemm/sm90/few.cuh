/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* few.cuh - what Hopper's products of few rows with e4m3 weights share: tiles of 64 rows of W, whose runs are
 * widened and multiplied in halves, and their scales. */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_FEW_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_FEW_CUH

#include "e4m3_gemm/sm90/widen.cuh"
#include "hopper/group_ring.cuh"
#include "hopper/products.cuh"

namespace sm90_e4m3
{

enum {
    TAKERS = 4, /* warpgroups that multiply */
    MATH = TAKERS * 128,
    HALF = STEPS / 2,
    SET_ROWS = TAKERS * WG_ROWS, /* of W, with 64 rows a warpgroup */
    SHORT_BYTES = 128 * 1024     /* of a, in a block that keeps all of its rows */
};

/* A warp has read its part of a stage. */
template <int STAGES>
__device__ __forceinline__ void give_back_by_warp(group_ring<TAKERS, STAGES> &stages,
                                                  const ring_place<STAGES> &at)
{
    __syncwarp();
    if (threadIdx.x % 32 < READER_ARRIVALS) stages.give_back(at);
}

/* Adds the products of half a run; they are under way when this returns. */
template <typename T, int TOKENS>
__device__ __forceinline__ void start_half(float (&part)[TOKENS / 8][4], const uint32_t (&a)[HALF][4],
                                           uint32_t tokens)
{
    const uint64_t b = wg_fresh(wg_tile(tokens, 0));
    wg_start();
#pragma unroll
    for (int s = 0; s < HALF; s++) wgmma_rs<T, TOKENS>(part, a[s], wg_further(b, s * 32));
    wg_commit();
}

/* A warpgroup's operand: half a run is widened ahead. */
struct run_operand {
    uint32_t low[HALF][4], high[HALF][4];
};

/* RING: a ring, or a group_ring. */
template <typename T, typename RING, typename PLACE, int STAGES>
__device__ __forceinline__ void take_low(run_operand &a, RING &codes, const PLACE &at,
                                         const char (&w)[STAGES][WG_ROWS * RUN])
{
    codes.wait_full(at);
    load_steps<T, 0, HALF>(a.low, w[0] + at.stage * (WG_ROWS * RUN) + threadIdx.x / 32 % 4 * 16 * RUN);
}

/* Sums a run whose first half is widened, from zero; the rest is widened meanwhile. All products are under
 * way when this returns. */
template <typename T, int TOKENS, int STAGES>
__device__ __forceinline__ void start_run(float (&part)[TOKENS / 8][4], run_operand &a,
                                          const ring_place<STAGES> &at,
                                          const char (&w)[STAGES][WG_ROWS * RUN], uint32_t tokens)
{
    clear_sums(part);
    start_half<T, TOKENS>(part, a.low, tokens);
    load_steps<T, HALF, HALF>(a.high, w[0] + at.stage * (WG_ROWS * RUN) + threadIdx.x / 32 % 4 * 16 * RUN);
    start_half<T, TOKENS>(part, a.high, tokens + TOKENS * 128);
}

/* Waits until the first half's registers are read. */
__device__ __forceinline__ void wait_low()
{
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

/* Of 64 rows of W, which have one or two scales in a run: those of the first and of the last row. Rows past
 * the group's last count as it. */
struct tile_scales {
    int64_t first, last;

    __device__ __forceinline__ tile_scales(const product_params &q, int64_t group, int64_t column)
        : first(group * q.p.out + min(column, q.p.out - 1)),
          last(group * q.p.out + min(column + WG_ROWS - 1, q.p.out - 1))
    {
    }
    __device__ __forceinline__ float2 of(const product_params &q, int run) const
    {
        return make_float2(q.p.scales.at(first, (int64_t)run * RUN, q.p.status),
                           q.p.scales.at(last, (int64_t)run * RUN, q.p.status));
    }
};

/* Whether a thread's two rows of W have the last row's scales. */
struct late_rows {
    bool low, high;

    __device__ __forceinline__ late_rows(const product_params &q, int64_t group, int64_t column)
    {
        const int64_t first = group * q.p.out + column, row = first + low_row(0);
        const int shift = q.p.scales.shift;
        low = row >> shift != first >> shift;
        high = (row + 8) >> shift != first >> shift;
    }
    __device__ __forceinline__ row_scales of(const float2 &both) const
    {
        return {low ? both.y : both.x, high ? both.y : both.x};
    }
};

} // namespace sm90_e4m3

#endif
