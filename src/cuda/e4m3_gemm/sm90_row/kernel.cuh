/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the product of one row of 16 bits with e4m3 weights on Hopper. A block makes 32 columns of c.
 *
 *   feed      one thread copies runs of 32 rows of W into stages
 *   multiply  eight warps, each with 16 rows of W and a run of its own. The products of a warpgroup share
 *             their second operand, whose 8 columns are here 8 runs of the row: a warp keeps the column of
 *             its run. So each run is summed from zero by the same instructions as in the kernels of more
 *             rows, and the runs are then added in order: c has the bits that it has among other rows.
 *
 * The kernel may start while the one before it on the stream still runs, and lets the next one do so. Until
 * that one has ended it asks L2 for W alone, and reads and writes nothing.
 *
 * Shared memory: 64 KiB of W, 256 bytes each of x, sums and scales a run: two blocks of up to 32 runs have
 * room beside each other. Limit: W's bytes over the read rate.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_ROW_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_ROW_KERNEL_CUH

#include "e4m3_gemm/sm90_row/widen.cuh"
#include "hopper/tma_more.cuh"

namespace sm90_e4m3_row
{

using namespace sm90_e4m3;

enum {
    ROWS = 32,
    STAGES = 16,
    PRODUCTS = GROUPS * 128,
    ROW_THREADS = PRODUCTS + 32,
    ACROSS = 8 /* runs side by side */
};

template <int RUNS> struct shared {
    char w[STAGES][ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    char x[RUNS / ACROSS][2][ACROSS * 128];
    float parts[RUNS][ROWS], scale[RUNS][ROWS];
    ring<STAGES> stages;
};

struct row_place {
    int64_t group, column; /* column: of the group */
};

__device__ __forceinline__ row_place row_place_here(const product_params &q)
{
    const int group = (int)(blockIdx.x / (uint32_t)q.panels);
    return {group, (int64_t)((int)blockIdx.x - group * (int)q.panels) * ROWS};
}

template <int RUNS>
__device__ __forceinline__ void feed(const product_params &q, const CUtensorMap &w, shared<RUNS> &m)
{
    const row_place t = row_place_here(q);
    const int row = (int)(t.group * q.p.out + t.column);
    ring_place<STAGES> at;
    for (int run = 0; run < q.runs; run++) tma_ask(w, run * RUN, 0, row, 0);
    wait_for_before();
    for (int run = 0; run < q.runs; run++) {
        m.stages.wait_free(at);
        const uint32_t bar = m.stages.expect(at, ROWS * RUN);
        tma_load(smem_address(m.w[at.stage]), w, bar, run * RUN, 0, row, 0);
        at.advance();
    }
}

/* Eight elements of x from k on; 0 past the last. */
template <typename T>
__device__ __forceinline__ uint4 eight_of(const T *x, int64_t k, int64_t count, bool wide)
{
    if (wide && k + 8 <= count) return *(const uint4 *)(x + k);
    alignas(16) T all[8];
#pragma unroll
    for (int i = 0; i < 8; i++) all[i] = k + i < count ? x[k + i] : from_float<T>(0.0f);
    return *(const uint4 *)all;
}

/* x's runs as columns of the second operand, and the scales of the block's rows of W. */
template <typename T, int RUNS>
__device__ __forceinline__ void prepare(const product_params &q, shared<RUNS> &m)
{
    const row_place t = row_place_here(q);
    const T *const x = (const T *)q.p.a + t.group * q.p.in;
    const int64_t last = q.p.out - 1 - t.column, first = t.group * q.p.out + t.column;
    for (int i = threadIdx.x; i < q.runs * 16; i += PRODUCTS) {
        const int run = i / 16, row = run % ACROSS, chunk = i % 8;
        char *const to = m.x[run / ACROSS][i / 8 % 2] + row * 128 + ((chunk ^ row) << 4);
        *(uint4 *)to = eight_of(x, (int64_t)i * 8, q.p.in, q.wide);
    }
    for (int i = threadIdx.x; i < q.runs * ROWS; i += PRODUCTS)
        m.scale[i / ROWS][i % ROWS] =
            q.p.scales.at(first + min((int64_t)(i % ROWS), last), (int64_t)(i / ROWS) * RUN, q.p.status);
}

/* part = the products of a warp's run, of which the other columns are none. */
template <typename T, int RUNS>
__device__ __forceinline__ void multiply_run(float (&part)[1][4], const uint32_t (&a)[STEPS][4],
                                             shared<RUNS> &m, int run)
{
    const uint64_t x = wg_fresh(wg_tile(stage_address(m.x, run / ACROSS), 0));
#pragma unroll
    for (int e = 0; e < 4; e++) part[0][e] = 0.0f;
    wg_start();
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        wgmma_rs<T, 8>(part, a[s], wg_further(x, s / 4 * ACROSS * 128 + s % 4 * 32));
    wg_commit();
    wg_wait<0>(part);
}

/* Two runs at a time: two of the warpgroup's warps have the one, two the other. */
template <typename T, int RUNS>
__device__ __forceinline__ void multiply(const product_params &q, shared<RUNS> &m, int warpgroup)
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, second = warp / 2,
              row = warp % 2 * 16 + lane / 4;
    for (int pair = warpgroup * 2; pair < q.runs; pair += GROUPS * 2) {
        const int run = pair + second;
        uint32_t a[STEPS][4] = {};
        float part[1][4];
        if (run < q.runs) {
            const ring_place<STAGES> at = ring_place<STAGES>::of(run);
            m.stages.wait_full(at);
            load_operand<T>(a, m.w[at.stage] + warp % 2 * 16 * RUN);
            __syncwarp();
            if (lane == 0) m.stages.give_back(at);
        }
        multiply_run<T>(part, a, m, pair);
        if (run < q.runs && lane % 4 == run % ACROSS / 2) {
            m.parts[run][row] = second ? part[0][1] : part[0][0];
            m.parts[run][row + 8] = second ? part[0][3] : part[0][2];
        }
    }
}

/* A lane a column of c. */
template <typename T, int RUNS>
__device__ __forceinline__ void add_runs(const product_params &q, const shared<RUNS> &m)
{
    const row_place t = row_place_here(q);
    const int row = threadIdx.x % 32;
    const int64_t at = t.group * q.p.out + t.column + row;
    if (t.column + row >= q.p.out) return;
    const float bias = q.p.bias.p != NULL ? q.p.bias.at(at) : 0.0f;
    float c = 0.0f;
#pragma unroll 8
    for (int run = 0; run < q.runs; run++) c = fmaf(m.scale[run][row], m.parts[run][row], c);
    ((T *)q.p.c)[at] = from_float<T>(c + bias);
}

template <typename T, int RUNS>
__global__ void __launch_bounds__(ROW_THREADS)
    e4m3_gemm_sm90_row(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<RUNS> &m = *(shared<RUNS> *)memory;
    let_next_start();
    if (threadIdx.x == PRODUCTS) {
        m.stages.init(1, 2);
        mbar_init_done();
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == GROUPS) {
        if (threadIdx.x == PRODUCTS) feed(q, w, m);
        __syncwarp();
    } else {
        wait_for_before();
        prepare<T>(q, m);
        wg_show();
        named_sync(1, PRODUCTS);
        multiply<T>(q, m, role);
    }
    __syncthreads();
    if (role == GROUPS) add_runs<T>(q, m);
#endif
}

} // namespace sm90_e4m3_row

#endif
