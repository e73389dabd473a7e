/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - products of e4m3 rows with e4m3 weights on Hopper, both operands as they stand in memory, a's
 * rows rounded by round.cu before.
 *
 *   feed      one thread copies runs of W, of 128 rows of a, and these rows' scales into stages
 *   multiply  two warpgroups of 64 rows of W. A run is summed from zero, as the tensor core keeps 14 bits of
 *             its sums alone, and added times the scales of its rows of W and of a.
 *
 * Registers: 64 + 64 sums. Shared memory of a stage: 32.5 KiB. Limit: tensor cores, 256 clocks a run and
 * warpgroup, beside 130 instructions a warp that add it.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_FP8_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_FP8_KERNEL_CUH

#include "e4m3_gemm/sm90/tiles.cuh"

namespace sm90_e4m3_fp8
{

using namespace sm90_e4m3;

enum { TOKENS = 128, STAGES = 5, FEW_REGISTERS = 40, MANY_REGISTERS = 232 };

struct shared {
    char w[STAGES][TILE_ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    char a[STAGES][TOKENS * RUN];
    char out[GROUPS][TOKENS * 128];
    float scale[STAGES][TOKENS];
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
            const uint32_t bar =
                m.stages.expect(at, (TILE_ROWS + TOKENS) * RUN + TOKENS * (uint32_t)sizeof(float));
            const int64_t from = t.group * q.runs + run;
            tma_load(smem_address(m.w[at.stage]), w, bar, run * RUN, 0, (int)(t.group * q.p.out + t.column),
                     0);
            tma_load(smem_address(m.a[at.stage]), a, bar, (int)(from * RUN), 0, (int)t.token, 0);
            bulk_load(smem_address(m.scale[at.stage]), q.row_scale + from * q.scale_row + t.token,
                      TOKENS * sizeof(float), bar);
            at.advance();
        }
    }
}

/* part = the products of a run. */
__device__ __forceinline__ void multiply_run(float (&part)[TOKENS / 8][4], const char *w, const char *tokens)
{
    const uint64_t a = wg_fresh(wg_tile(smem_address(w), 0)), b = wg_fresh(wg_tile(smem_address(tokens), 0));
    wg_start();
    wgmma_ss_e4m3<false>(part, a, b);
#pragma unroll
    for (int s = 1; s < RUN / 32; s++)
        wgmma_ss_e4m3<true>(part, wg_further(a, s * 32), wg_further(b, s * 32));
    wg_commit();
    wg_wait<0>(part);
}

/* c += part times the scales of its rows of W and its tokens. */
__device__ __forceinline__ void add_scaled(float (&c)[TOKENS / 8][4], const float (&part)[TOKENS / 8][4],
                                           row_scales s, const float *of_tokens)
{
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        const float2 t = *(const float2 *)(of_tokens + n * 8 + threadIdx.x % 4 * 2);
        c[n][0] = fmaf(s.low * t.x, part[n][0], c[n][0]);
        c[n][1] = fmaf(s.low * t.y, part[n][1], c[n][1]);
        c[n][2] = fmaf(s.high * t.x, part[n][2], c[n][2]);
        c[n][3] = fmaf(s.high * t.y, part[n][3], c[n][3]);
    }
}

template <typename T>
__device__ __forceinline__ void multiply(const product_params &q, shared &m, int warpgroup)
{
    ring_place<STAGES> at;
    for (int64_t i = blockIdx.x; i < tiles_of(q); i += gridDim.x) {
        const tile_place t = tile_at(q, i, TOKENS);
        float c[TOKENS / 8][4], part[TOKENS / 8][4];
        clear_sums(c);
        for (int run = 0; run < q.runs; run++) {
            const row_scales s = scales_at(q, t, warpgroup, run);
            m.stages.wait_full(at);
            multiply_run(part, m.w[at.stage] + warpgroup * WG_ROWS * RUN, m.a[at.stage]);
            add_scaled(c, part, s, m.scale[at.stage]);
            m.stages.give_back(at);
            at.advance();
        }
        store_tile<T, TOKENS>(c, q, t, warpgroup, m.out[warpgroup]);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    e4m3_gemm_sm90_fp8(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    if (threadIdx.x == 0) {
        m.stages.init(1, GROUPS * 128);
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

} // namespace sm90_e4m3_fp8

#endif
