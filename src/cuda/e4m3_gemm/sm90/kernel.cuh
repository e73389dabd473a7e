/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - products of 16-bit rows with e4m3 weights on Hopper.
 *
 *   feed      one thread copies runs of W and of TOKENS rows of a into stages
 *   multiply  two warpgroups of 64 rows of W: a lane reads its codes, two of K at a time, and widens them
 *             into the products' first operand while the products of the run before are under way. Each run
 *             is summed from zero and added times its rows' scales.
 *
 * Where there are few tiles, up to 8 blocks of a cluster split a tile's runs. They keep each run's sums in
 * shared memory and then add them in the order of the runs, each block for some rows: the bits are those of
 * one block. TOKENS, 8 to 128, is the width of the products and changes no bit either.
 *
 * Registers at 128 tokens: 64 + 64 sums, 2 x 32 of operands. Shared memory of a stage: 16 KiB of W, 256 bytes
 * a token. Limits: W's bytes over the read rate; tensor cores.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_KERNEL_CUH

#include "e4m3_gemm/sm90/widen.cuh"

namespace sm90_e4m3
{

enum { FEW_REGISTERS = 40, MANY_REGISTERS = 232, PARTS_BYTES = 64 * 1024, ROOM = 220 * 1024 };

template <int TOKENS> struct form {
    enum {
        SPLITS = TOKENS <= 32, /* whether blocks may share a tile */
        PART_BYTES = TILE_ROWS * TOKENS * 4,
        PARTS = SPLITS ? PARTS_BYTES / PART_BYTES : 0, /* runs of a block, then */
        STAGE = TILE_ROWS * RUN + TOKENS * RUN * 2,
        STAGES = (ROOM - (SPLITS ? PARTS_BYTES : 0) - GROUPS * TOKENS * 128) / STAGE < 8
                     ? (ROOM - (SPLITS ? PARTS_BYTES : 0) - GROUPS * TOKENS * 128) / STAGE
                     : 8
    };
};

template <int TOKENS> struct shared {
    typedef form<TOKENS> f;
    char w[f::STAGES][TILE_ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    char a[f::STAGES][2][TOKENS * 128];
    char out[GROUPS][TOKENS * 128];
    float parts[f::SPLITS ? f::PARTS : 1][f::SPLITS ? TILE_ROWS : 1][TOKENS];
    ring<f::STAGES> stages;
};

/* The runs of a block. */
struct run_range {
    int first, end;
};

__device__ __forceinline__ run_range runs_here(const product_params &q)
{
    const int each = (q.runs + q.shares - 1) / q.shares, first = (int)(blockIdx.x % q.shares) * each;
    return {min(first, q.runs), min(first + each, q.runs)};
}

template <int TOKENS>
__device__ __forceinline__ void feed(const product_params &q, const CUtensorMap &w, const CUtensorMap &a,
                                     shared<TOKENS> &m)
{
    const run_range r = runs_here(q);
    ring_place<form<TOKENS>::STAGES> at;
    for (int64_t i = blockIdx.x / q.shares; i < tiles_of(q); i += gridDim.x / q.shares) {
        const tile_place t = tile_at(q, i, TOKENS);
        for (int run = r.first; run < r.end; run++) {
            m.stages.wait_free(at);
            const uint32_t bar = m.stages.expect(at, form<TOKENS>::STAGE);
            const int k = run * RUN, from = (int)(t.group * q.p.in) + k;
            tma_load(smem_address(m.w[at.stage]), w, bar, k, 0, (int)(t.group * q.p.out + t.column), 0);
            tma_load(smem_address(m.a[at.stage][0]), a, bar, from, 0, (int)t.token, 0);
            tma_load(smem_address(m.a[at.stage][1]), a, bar, from + 64, 0, (int)t.token, 0);
            at.advance();
        }
    }
}

/* ---- products ---- */

/* part = the products of a run; they are under way when this returns. */
template <typename T, int TOKENS>
__device__ __forceinline__ void start_run(float (&part)[TOKENS / 8][4], const uint32_t (&a)[STEPS][4],
                                          uint32_t tokens)
{
    const uint64_t b = wg_fresh(wg_tile(tokens, 0));
    if constexpr (TOKENS < 64) clear_sums(part);
    wg_start();
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const uint64_t at = wg_further(b, s / 4 * TOKENS * 128 + s % 4 * 32);
        if constexpr (TOKENS < 64) wgmma_rs<T, TOKENS>(part, a[s], at);
        else if (s == 0) wg_rs_wide<T, TOKENS, false, false>(part, a[s], at);
        else wg_rs_wide<T, TOKENS, true, false>(part, a[s], at);
    }
    wg_commit();
}

/* Where a thread of a warpgroup that multiplies is. */
template <int TOKENS> struct run_walk {
    ring_place<form<TOKENS>::STAGES> at, next; /* the run that is multiplied, and the one that is widened */
};

template <typename T, int TOKENS>
__device__ __forceinline__ void take_operand(uint32_t (&a)[STEPS][4], shared<TOKENS> &m,
                                             run_walk<TOKENS> &walk, int warpgroup)
{
    m.stages.wait_full(walk.next);
    load_operand<T>(a, m.w[walk.next.stage] + (warpgroup * 4 + threadIdx.x / 32 % 4) * 16 * RUN);
    walk.next.advance();
}

/* A run's sums to where the cluster's blocks read them. */
template <int TOKENS>
__device__ __forceinline__ void keep_run(const float (&part)[TOKENS / 8][4], shared<TOKENS> &m, int index,
                                         int warpgroup)
{
    const int row = (int)low_row(warpgroup), token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        *(float2 *)&m.parts[index][row][n * 8 + token] = make_float2(part[n][0], part[n][1]);
        *(float2 *)&m.parts[index][row + 8][n * 8 + token] = make_float2(part[n][2], part[n][3]);
    }
}

/* Multiplies `run`, whose operand is `a`, and widens the next into `next`. */
template <typename T, int TOKENS>
__device__ __forceinline__ void step(const product_params &q, shared<TOKENS> &m, run_walk<TOKENS> &walk,
                                     const tile_place &t, int warpgroup, int run, const run_range &r,
                                     const uint32_t (&a)[STEPS][4], uint32_t (&next)[STEPS][4],
                                     float (&c)[TOKENS / 8][4])
{
    const bool kept = form<TOKENS>::SPLITS && q.shares > 1;
    float part[TOKENS / 8][4];
    const row_scales s = kept ? row_scales{} : scales_at(q, t, warpgroup, run);
    start_run<T, TOKENS>(part, a, smem_address(m.a[walk.at.stage][0]));
    if (run + 1 < r.end) take_operand<T>(next, m, walk, warpgroup);
    wg_wait<0>(part);
    m.stages.give_back(walk.at);
    walk.at.advance();
    if constexpr (form<TOKENS>::SPLITS)
        if (kept) keep_run<TOKENS>(part, m, run - r.first, warpgroup);
    if (!kept) add_scaled_rows(c, part, s.low, s.high);
}

template <typename T, int TOKENS>
__device__ __forceinline__ void sum_tile(const product_params &q, shared<TOKENS> &m, run_walk<TOKENS> &walk,
                                         const tile_place &t, int warpgroup, float (&c)[TOKENS / 8][4])
{
    const run_range r = runs_here(q);
    uint32_t a[STEPS][4], b[STEPS][4];
    clear_sums(c);
    if (r.first < r.end) take_operand<T>(a, m, walk, warpgroup);
    for (int run = r.first; run < r.end; run += 2) {
        step<T, TOKENS>(q, m, walk, t, warpgroup, run, r, a, b, c);
        if (run + 1 < r.end) step<T, TOKENS>(q, m, walk, t, warpgroup, run + 1, r, b, a, c);
    }
}

/* ---- shares ---- */

/* All threads of the cluster. */
__device__ __forceinline__ void cluster_sync()
{
    cluster_sync_arrive();
    cluster_sync_wait();
}

/* Four tokens of a row of W: the blocks' sums of its runs, in order. */
template <typename T, int TOKENS>
__device__ __forceinline__ void fold_row(const product_params &q, shared<TOKENS> &m, const tile_place &t,
                                         int row, int token)
{
    const int each = (q.runs + q.shares - 1) / q.shares;
    const int64_t column = t.column + row, at = t.group * q.p.out + column;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column >= q.p.out) return;
    for (int run = 0; run < q.runs; run += each) {
        const uint32_t from = cluster_address(smem_address(&m.parts[0][row][token]), (uint32_t)(run / each));
#pragma unroll 4
        for (int i = 0; i < min(each, q.runs - run); i++) {
            const float s = q.p.scales.at(at, (int64_t)(run + i) * RUN, q.p.status);
            const float4 x = cluster_load(from + i * (uint32_t)sizeof m.parts[0]);
            sum.x = fmaf(s, x.x, sum.x);
            sum.y = fmaf(s, x.y, sum.y);
            sum.z = fmaf(s, x.z, sum.z);
            sum.w = fmaf(s, x.w, sum.w);
        }
    }
    const float bias = q.p.bias.p != NULL ? q.p.bias.at(at) : 0.0f, all[4] = {sum.x, sum.y, sum.z, sum.w};
    for (int i = 0; i < 4; i++)
        if (t.token + token + i < q.p.tokens)
            ((T *)q.p.c)[(t.token + token + i) * q.p.c_row + at] = from_float<T>(all[i] + bias);
}

template <typename T, int TOKENS>
__device__ __forceinline__ void fold(const product_params &q, shared<TOKENS> &m)
{
    const int share = blockIdx.x % q.shares, items = TILE_ROWS * TOKENS / 4, each = items / q.shares;
    const tile_place t = tile_at(q, blockIdx.x / q.shares, TOKENS);
    cluster_sync();
    for (int i = share * each + threadIdx.x - 128; i < (share + 1) * each; i += THREADS - 128)
        fold_row<T, TOKENS>(q, m, t, i % TILE_ROWS, i / TILE_ROWS * 4);
    cluster_sync();
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply(const product_params &q, shared<TOKENS> &m, int warpgroup)
{
    run_walk<TOKENS> walk;
    for (int64_t i = blockIdx.x / q.shares; i < tiles_of(q); i += gridDim.x / q.shares) {
        const tile_place t = tile_at(q, i, TOKENS);
        float c[TOKENS / 8][4];
        sum_tile<T, TOKENS>(q, m, walk, t, warpgroup, c);
        if (q.shares == 1) store_tile<T, TOKENS>(c, q, t, warpgroup, m.out[warpgroup]);
    }
}

template <typename T, int TOKENS>
__global__ void __launch_bounds__(THREADS, 1)
    e4m3_gemm_sm90(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w,
                   const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<TOKENS> &m = *(shared<TOKENS> *)memory;
    if (threadIdx.x == 0) {
        m.stages.init(1, GROUPS * 128);
        mbar_init_done();
    }
    __syncthreads();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<FEW_REGISTERS>();
        if (threadIdx.x == 0) feed(q, w, a, m);
        __syncwarp();
        if (q.shares > 1) {
            cluster_sync(); /* sums are there */
            cluster_sync(); /* and read */
        }
    } else {
        registers_up<MANY_REGISTERS>();
        multiply<T, TOKENS>(q, m, role - 1);
        if constexpr (form<TOKENS>::SPLITS)
            if (q.shares > 1) fold<T, TOKENS>(q, m);
    }
#endif
}

/* An instance a width and dtype. */
template <typename T, int TOKENS>
quern_status launch(const stage_exec *exec, const product_params &q, const CUtensorMap &w,
                    const CUtensorMap &a);

template <typename T, int TOKENS>
static quern_status launch_kernel(const stage_exec *exec, const product_params &q, const CUtensorMap &w,
                                  const CUtensorMap &a)
{
    const int64_t tiles = q.panels * q.p.groups * q.token_tiles,
                  grid = q.shares > 1 || tiles < exec->multiprocessors ? tiles * q.shares
                                                                       : (int64_t)exec->multiprocessors;
    return launch_cluster((cudaStream_t)exec->stream, e4m3_gemm_sm90<T, TOKENS>, dim3((unsigned)grid),
                          THREADS, sizeof(shared<TOKENS>), "e4m3_gemm", (unsigned)q.shares, false, q, w, a);
}

} // namespace sm90_e4m3

#endif
