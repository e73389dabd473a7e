/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - products of 16-bit rows with e4m3 weights on Hopper, of more rows than sm90_few takes.
 *
 *   feed      one thread copies runs of W and of 128 rows of a into stages
 *   multiply  two warpgroups of 64 rows of W: a lane reads its codes, two of K at a time, and widens them
 *             into the products' first operand while the products of the run before are under way. Each run
 *             is summed from zero and added times its rows' scales.
 *
 * Registers: 64 + 64 sums, 2 x 32 of operands. Shared memory of a stage: 16 KiB of W, 32 of a. Limit: tensor
 * cores.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_KERNEL_CUH

#include "e4m3_gemm/sm90/widen.cuh"
#include "hopper/products.cuh"

namespace sm90_e4m3
{

enum {
    TOKENS = 128,
    STAGES = 3,
    STAGE_BYTES = TILE_ROWS * RUN + TOKENS * RUN * 2,
    FEW_REGISTERS = 40,
    MANY_REGISTERS = 232
};

struct shared {
    char w[STAGES][TILE_ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    char a[STAGES][2][TOKENS * 128];
    char out[GROUPS][TOKENS * 128];
    ring<STAGES> stages;
};

__device__ __forceinline__ void feed(const product_params &q, const CUtensorMap &w, const CUtensorMap &a,
                                     shared &m)
{
    ring_place<STAGES> at;
    for (int64_t i = blockIdx.x; i < tiles_of(q); i += gridDim.x) {
        const tile_place t = tile_at(q, i, TOKENS);
        for (int run = 0; run < q.runs; run++) {
            m.stages.wait_free(at);
            const uint32_t bar = m.stages.expect(at, STAGE_BYTES);
            const int k = run * RUN, from = (int)(t.group * q.p.in) + k;
            tma_load(smem_address(m.w[at.stage]), w, bar, k, 0, (int)(t.group * q.p.out + t.column), 0);
            tma_load(smem_address(m.a[at.stage][0]), a, bar, from, 0, (int)t.token, 0);
            tma_load(smem_address(m.a[at.stage][1]), a, bar, from + 64, 0, (int)t.token, 0);
            at.advance();
        }
    }
}

/* part = the products of a run; they are under way when this returns. */
template <typename T>
__device__ __forceinline__ void start_run(float (&part)[TOKENS / 8][4], const uint32_t (&a)[STEPS][4],
                                          uint32_t tokens)
{
    const uint64_t b = wg_fresh(wg_tile(tokens, 0));
    wg_start();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const uint64_t at = wg_further(b, s / 4 * TOKENS * 128 + s % 4 * 32);
        if (s == 0) wg_rs_wide<T, TOKENS, false, false>(part, a[s], at);
        else wg_rs_wide<T, TOKENS, true, false>(part, a[s], at);
    }
    wg_commit();
}

/* Where a thread of a warpgroup that multiplies is. */
struct run_walk {
    ring_place<STAGES> at, next; /* the run that is multiplied, and the one that is widened */
};

template <typename T>
__device__ __forceinline__ void take_operand(uint32_t (&a)[STEPS][4], shared &m, run_walk &walk,
                                             int warpgroup)
{
    m.stages.wait_full(walk.next);
    load_steps<T, 0, STEPS>(a, m.w[walk.next.stage] + (warpgroup * 4 + threadIdx.x / 32 % 4) * 16 * RUN);
    walk.next.advance();
}

/* Multiplies `run`, whose operand is `a`, and widens the next into `next`. */
template <typename T>
__device__ __forceinline__ void step(const product_params &q, shared &m, run_walk &walk, const tile_place &t,
                                     int warpgroup, int run, const uint32_t (&a)[STEPS][4],
                                     uint32_t (&next)[STEPS][4], float (&c)[TOKENS / 8][4])
{
    float part[TOKENS / 8][4];
    const row_scales s = scales_at(q, t, warpgroup, run);
    start_run<T>(part, a, smem_address(m.a[walk.at.stage][0]));
    if (run + 1 < q.runs) take_operand<T>(next, m, walk, warpgroup);
    wg_wait<0>(part);
    give_back_by_warp(m.stages, walk.at);
    walk.at.advance();
    add_scaled_rows(c, part, s.low, s.high);
}

template <typename T>
__device__ __forceinline__ void multiply(const product_params &q, shared &m, int warpgroup)
{
    run_walk walk;
    for (int64_t i = blockIdx.x; i < tiles_of(q); i += gridDim.x) {
        const tile_place t = tile_at(q, i, TOKENS);
        float c[TOKENS / 8][4];
        uint32_t a[STEPS][4], b[STEPS][4];
        clear_sums(c);
        take_operand<T>(a, m, walk, warpgroup);
        for (int run = 0; run < q.runs; run += 2) {
            step<T>(q, m, walk, t, warpgroup, run, a, b, c);
            if (run + 1 < q.runs) step<T>(q, m, walk, t, warpgroup, run + 1, b, a, c);
        }
        store_tile<T, TOKENS>(c, q, t, warpgroup, m.out[warpgroup]);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    e4m3_gemm_sm90(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w,
                   const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    if (threadIdx.x == 0) {
        m.stages.init(1, GROUPS * 4 * READER_ARRIVALS);
        mbar_init_done();
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<FEW_REGISTERS>();
        if (threadIdx.x == 0) feed(q, w, a, m);
    } else {
        registers_up<MANY_REGISTERS>();
        multiply<T>(q, m, role - 1);
    }
#endif
}

} // namespace sm90_e4m3

#endif
