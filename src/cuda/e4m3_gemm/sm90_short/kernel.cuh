/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the product of few rows of 16 bits with e4m3 weights on Hopper, where a block has room for all
 * of its rows of a: a short sum, or very few rows. W passes through once, at the rate of a copy.
 *
 *   feed      a thread copies runs of W into a ring, another the block's rows of a, once
 *   multiply  four warpgroups, each with 64 rows of W of its own: a lane widens its codes, half a run at a
 *             time, while the products of the half before are under way. A run is summed from zero and added
 *             in registers times its rows' scales.
 *
 * TOKENS, 8 to 64, is the width of the products and changes no bit.
 *
 * The kernel may start while the one before it on the stream still runs: what W's ring holds is weights,
 * which that one does not write. It waits for its end before it reads a, and lets the next start only then.
 *
 * Shared memory: W's ring 96 KiB, a 128 KiB; a tile of c waits in the stage of its last run of W. A run of 64
 * rows takes 8 KiB of W through it once, read as words of two bytes, and the bytes of its tokens. Registers:
 * 32 + 32 sums, 2 x 16 of operands at 64 tokens.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_SHORT_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_SHORT_KERNEL_CUH

#include "e4m3_gemm/sm90/few.cuh"

namespace sm90_e4m3_short
{

using namespace sm90_e4m3;

enum {
    SHORT_THREADS = MATH + 128,
    FEED_REGISTERS = 24,
    MATH_REGISTERS = 112,
    W_STAGES = 12
};
static_assert((int)W_STAGES % (int)TAKERS == 0, "a warpgroup waits for every use of its stages");

template <int TOKENS> struct form {
    enum { RUNS = SHORT_BYTES / (TOKENS * RUN * 2) };
};

template <int TOKENS> struct shared {
    typedef form<TOKENS> f;
    char w[W_STAGES][WG_ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    char a[f::RUNS][TOKENS * RUN * 2];
    float2 scale[TAKERS][f::RUNS];
    ring<W_STAGES> codes;
    stage_barriers<f::RUNS> rows;
};

/* A block's first set of 256 rows of W; it takes every gridDim.x-th of its group. */
__device__ __forceinline__ tile_place place_here(int tokens)
{
    return {(int64_t)blockIdx.z, (int64_t)blockIdx.x * SET_ROWS, (int64_t)blockIdx.y * tokens};
}

template <int TOKENS>
__device__ __forceinline__ void feed_codes(const product_params &q, const CUtensorMap &w, shared<TOKENS> &m)
{
    ring_place<W_STAGES> at;
    const int first = (int)(blockIdx.z * q.p.out);
    for (int64_t column = place_here(TOKENS).column; column < q.p.out; column += gridDim.x * SET_ROWS)
        for (int run = 0; run < q.runs; run++)
            for (int i = 0; i < TAKERS; i++) {
                m.codes.wait_free(at);
                const uint32_t bar = m.codes.expect(at, WG_ROWS * RUN);
                tma_load(stage_address(m.w, at.stage), w, bar, run * RUN, 0,
                         first + (int)column + i * WG_ROWS, 0);
                at.advance();
            }
}

template <int TOKENS>
__device__ __forceinline__ void feed_rows(const product_params &q, const CUtensorMap &a, shared<TOKENS> &m)
{
    const tile_place t = place_here(TOKENS);
    wait_for_before();
    let_next_start();
    for (int run = 0; run < q.runs; run++) {
        const uint32_t bar = m.rows.expect({run, 0}, sizeof m.a[0]), to = stage_address(m.a, run);
        const int from = (int)(t.group * q.p.in) + run * RUN;
        tma_load(to, a, bar, from, 0, (int)t.token, 0);
        tma_load(to + TOKENS * 128, a, bar, from + 64, 0, (int)t.token, 0);
    }
}

/* Those of a warpgroup's 64 rows of W. */
template <int TOKENS>
__device__ __forceinline__ void read_scales(const product_params &q, shared<TOKENS> &m, const tile_place &t,
                                            int warpgroup)
{
    const int run = threadIdx.x % 128;
    named_sync(1 + warpgroup, 128); /* those of the set before are read */
    if (run < q.runs)
        m.scale[warpgroup][run] = tile_scales(q, t.group, t.column + warpgroup * WG_ROWS).of(q, run);
    named_sync(1 + warpgroup, 128);
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply(const product_params &q, shared<TOKENS> &m, int warpgroup)
{
    ring_place<W_STAGES> at, ahead;
    run_operand operand;
    tile_place t = place_here(TOKENS);
    advance_by(ahead, warpgroup);
    if (t.column < q.p.out) take_low<T>(operand, m.codes, ahead, m.w);
    for (; t.column < q.p.out; t.column += gridDim.x * SET_ROWS) {
        const late_rows late(q, t.group, t.column + warpgroup * WG_ROWS);
        const bool more = t.column + gridDim.x * SET_ROWS < q.p.out;
        float c[TOKENS / 8][4];
        clear_sums(c);
        read_scales(q, m, t, warpgroup);
        for (int run = 0; run < q.runs; run++) {
            float part[TOKENS / 8][4];
            m.rows.wait({run, 0});
            at = ahead;
            start_run<T, TOKENS>(part, operand, at, m.w, stage_address(m.a, run));
            if (run + 1 < q.runs) give_back_by_warp(m.codes, at);
            wait_low();
            if (run + 1 < q.runs || more) {
                advance_by(ahead, (int)TAKERS);
                take_low<T>(operand, m.codes, ahead, m.w);
            }
            const row_scales by = late.of(m.scale[warpgroup][run]);
            wg_wait<0>(part);
            add_scaled_rows(c, part, by.low, by.high);
        }
        named_sync(1 + warpgroup, 128); /* all have read the last run's codes */
        store_tile<T, TOKENS>(c, q, t, warpgroup, m.w[0] + at.stage * (WG_ROWS * RUN));
        async_fence();
        give_back_by_warp(m.codes, at);
    }
}

template <typename T, int TOKENS>
__global__ void __launch_bounds__(SHORT_THREADS, 1)
    e4m3_gemm_sm90_short(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w,
                         const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<TOKENS> &m = *(shared<TOKENS> *)memory;
    if (threadIdx.x == 0) {
        m.codes.init(1, 4 * READER_ARRIVALS);
        m.rows.init(1);
        mbar_init_done();
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == TAKERS) {
        registers_down<FEED_REGISTERS>();
        if (threadIdx.x == MATH) feed_codes(q, w, m);
        if (threadIdx.x == MATH + 32) feed_rows(q, a, m);
        __syncwarp();
    } else {
        registers_up<MATH_REGISTERS>();
        multiply<T, TOKENS>(q, m, role);
    }
#endif
}

/* An instance a width and dtype; grid: blocks of a group, tiles of tokens, groups. */
template <typename T, int TOKENS>
quern_status launch(const stage_exec *exec, const product_params &q, dim3 grid, const CUtensorMap &w,
                    const CUtensorMap &a);

template <typename T, int TOKENS>
static quern_status launch_kernel(const stage_exec *exec, const product_params &q, dim3 grid,
                                  const CUtensorMap &w, const CUtensorMap &a)
{
    return launch_behind((cudaStream_t)exec->stream, e4m3_gemm_sm90_short<T, TOKENS>, grid, SHORT_THREADS,
                         sizeof(shared<TOKENS>), "e4m3_gemm", q, w, a);
}

} // namespace sm90_e4m3_short

#endif
