/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - c = a b^T of few rows of a on Hopper: b, a weight, is to pass through the chip once at the
 * rate of a copy.
 *
 *   feed      one thread copies 128 of the sum of 64 rows of b into a stage, and a half of what a has there:
 *             each of a cluster's two blocks copies one into both, as they multiply the same rows of a
 *   multiply  two warpgroups, tile by tile in turn: 64 rows of a by 64 of b. One stores while the other one
 *             multiplies
 *
 * Sums run over k in order, 16 at a time, whole and from zero: these are the instructions of cuBLASLt's
 * products that are not cut, so a row has the same bits among few rows and among many (few_rows_test). So a
 * block reads all of k, and N / 64 blocks read a weight of N rows: they stay for tile after tile, and the
 * feed goes ahead of the products across tiles. Several products may share a launch, each with its operands:
 * their tiles follow one another.
 *
 * Shared memory: 6 stages of 16 KiB of b and 16 KiB of a. Limit: b's bytes over the read rate; below 8,000
 * rows of b the rate of the few blocks that there are, some 80 GB/s each.
 */
#ifndef QUERN_CUDA_GEMM_SM90_FEW_KERNEL_CUH
#define QUERN_CUDA_GEMM_SM90_FEW_KERNEL_CUH

#include "common/launch.cuh"
#include "hopper/ring.cuh"
#include "hopper/cluster.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_few
{

enum {
    ROWS = 64,    /* of a tile: of a */
    COLUMNS = 64, /* and of b */
    HALF = 64,    /* of the sum, in rows of 128 bytes */
    DEPTH = 2 * HALF,
    STAGES = 6,
    CLUSTER = 2,
    STAGE_BYTES = 2 * (ROWS + COLUMNS) * 128,
    GROUPS = 2, /* warpgroups that multiply */
    WARPS = 4,  /* of one */
    THREADS = GROUPS * WARPS * 32 + 32
};

/* A product. */
struct few_params {
    void *c;
    int64_t c_row;
    const int64_t *live; /* or NULL: rows of c where it is negative become 0 */
    int64_t live_s;
    int32_t m, n, depths; /* depths: stages of a tile */
    int32_t row_tiles, pairs;
    int32_t first; /* of the launch's tiles */
    bool half;     /* c has the operands' dtype */
    bool wide;     /* its rows begin at multiples of 16 bytes */
};

/* Those of a launch. */
enum { TOGETHER = 12 };
template <int MOST> struct few_set {
    CUtensorMap a[MOST], b[MOST];
    few_params q[MOST];
    int32_t count, tiles;
};

struct shared {
    char b[STAGES][2][COLUMNS * 128]; /* first: tiles are aligned to 1024 bytes */
    char a[STAGES][2][ROWS * 128];
    ring<STAGES> stages;
};

struct few_place {
    int32_t row, column;
};

/* The product that a tile is of, not before `p`. */
template <int MOST> __device__ __forceinline__ int product_of(const few_set<MOST> &set, int32_t tile, int p)
{
    while (MOST > 1 && p + 1 < set.count && tile >= set.q[p + 1].first) p++;
    return p;
}

/* Tiles of the same rows of b follow one another. */
__device__ __forceinline__ few_place place_at(const few_params &q, int32_t tile, int rank)
{
    const int32_t of = tile - q.first, pair = of / q.row_tiles;
    return {(of - pair * q.row_tiles) * ROWS, (pair * CLUSTER + rank) * COLUMNS};
}

template <int MOST> __device__ __forceinline__ void feed(const few_set<MOST> &set, shared &m, int rank)
{
    ring_place<STAGES> at;
    int p = 0;
    for (int32_t i = (int32_t)blockIdx.x / CLUSTER; i < set.tiles; i += (int32_t)gridDim.x / CLUSTER) {
        p = product_of(set, i, p);
        const few_params &q = set.q[p];
        const CUtensorMap &a = set.a[p], &b = set.b[p];
        const few_place t = place_at(q, i, rank);
        for (int32_t k = 0; k < q.depths * DEPTH; k += DEPTH) {
            m.stages.wait_free(at);
            const uint32_t bar = m.stages.expect(at, STAGE_BYTES);
            tma_load(smem_address(m.b[at.stage][0]), b, bar, k, 0, t.column, 0);
            tma_load(smem_address(m.b[at.stage][1]), b, bar, k + HALF, 0, t.column, 0);
            tma_load_all((1 << CLUSTER) - 1, smem_address(m.a[at.stage][rank]), a, bar, k + rank * HALF, 0,
                         t.row, 0);
            at.advance();
        }
    }
}

template <typename T>
__device__ __forceinline__ void start_stage(float (&c)[COLUMNS / 8][4], shared &m,
                                            const ring_place<STAGES> &at)
{
    const uint64_t a = wg_fresh(wg_tile(stage_address(m.a, at.stage), 0)),
                   b = wg_fresh(wg_tile(stage_address(m.b, at.stage), 0));
    wg_start();
#pragma unroll
    for (int s = 0; s < DEPTH / 16; s++)
        wgmma_ss<T, COLUMNS, true, false>(c, wg_further(a, s / 4 * ROWS * 128 + s % 4 * 32),
                                          wg_further(b, s / 4 * COLUMNS * 128 + s % 4 * 32));
    wg_commit();
}

/* A tile's sums, of the stages from use number `use` on. A stage is given back once the products of the next
 * are under way and its own have ended. The other warpgroup, where it has a further tile (`more`), waits for
 * its stages only once all of these are full: by parity alone it would take an earlier use for its own. */
template <typename T>
__device__ __forceinline__ void sum_tile(const few_params &q, float (&c)[COLUMNS / 8][4], shared &m, int use,
                                         int group, bool more)
{
    auto at = ring_place<STAGES>::of(use), before = at;
    if (use > 0) named_sync(1 + group, GROUPS * WARPS * 32);
    clear_sums(c);
    for (int32_t d = 0; d < q.depths; d++) {
        m.stages.wait_full(at);
        start_stage<T>(c, m, at);
        if (d > 0) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            give_back_to_cluster<CLUSTER>(m.stages, before);
        }
        before = at;
        at.advance();
    }
    if (more) named_arrive(1 + (group ^ 1), GROUPS * WARPS * 32);
    wg_wait<0>(c);
    give_back_to_cluster<CLUSTER>(m.stages, before);
}

/* The first of a thread's two rows of c; the second is the eighth behind it. */
__device__ __forceinline__ int32_t first_row(const few_place &t)
{
    return t.row + (int)threadIdx.x / 32 % WARPS * 16 + (int)threadIdx.x % 32 / 4;
}

/* Which of a thread's rows become 0: bits 0 and 1. Read before the sums, so that no store waits for it. */
__device__ __forceinline__ int cleared_rows(const few_params &q, const few_place &t)
{
    const int32_t first = first_row(t);
    int cleared = 0;
    if (q.live == NULL) return 0;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (first + i * 8 < q.m && q.live[(first + i * 8) * q.live_s] < 0) cleared |= 1 << i;
    return cleared;
}

__device__ __forceinline__ void clear_rows(float (&c)[COLUMNS / 8][4], int cleared)
{
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++)
        if (cleared >> (i / 2 & 1) & 1) c[i / 4][i % 4] = 0.0f;
}

template <typename T>
__device__ __forceinline__ void store_tile(const few_params &q, const float (&c)[COLUMNS / 8][4],
                                           const few_place &t)
{
    const int lane = threadIdx.x % 32, first = first_row(t);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t row = first + i * 8;
        const int64_t to = row * q.c_row + t.column;
        if (q.half && t.column + COLUMNS <= q.n) {
            store_row<T>((T *)q.c + to + lane % 4 * 8, c, i, row < q.m, q.wide);
            continue;
        }
        if (row >= q.m) continue;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++) {
            const int32_t column = n * 8 + lane % 4 * 2;
            if (t.column + column >= q.n) continue;
            if (q.half) *(uint32_t *)((T *)q.c + to + column) = pack2<T>(c[n][2 * i], c[n][2 * i + 1]);
            else *(float2 *)((float *)q.c + to + column) = make_float2(c[n][2 * i], c[n][2 * i + 1]);
        }
    }
}

template <typename T, int MOST>
__global__ void __launch_bounds__(THREADS, 1) gemm_sm90_few(const __grid_constant__ few_set<MOST> set)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared &m = *(shared *)memory;
    const int rank = (int)(blockIdx.x % CLUSTER);
    if (threadIdx.x == 0) {
        m.stages.init(1, CLUSTER * WARPS);
        mbar_init_done();
    }
    __syncthreads();
    cluster_sync_arrive();
    cluster_sync_wait();
    const int group = __shfl_sync(~0u, threadIdx.x / (WARPS * 32), 0);
    if (group == GROUPS) {
        if (threadIdx.x % 32 == 0) feed(set, m, rank);
        __syncwarp();
    } else {
        int p = 0, turn = 0, use = 0;
        for (int32_t i = (int32_t)blockIdx.x / CLUSTER; i < set.tiles; i += (int32_t)gridDim.x / CLUSTER) {
            p = product_of(set, i, p);
            const few_params &q = set.q[p];
            if (turn == group) {
                float c[COLUMNS / 8][4];
                const few_place t = place_at(q, i, rank);
                const int cleared = cleared_rows(q, t);
                sum_tile<T>(q, c, m, use, group, i + (int32_t)gridDim.x / CLUSTER < set.tiles);
                if (cleared != 0) clear_rows(c, cleared);
                store_tile<T>(q, c, t);
            }
            use += q.depths;
            turn ^= 1;
        }
    }
    cluster_sync_arrive(); /* the other block may still fill or free this one's stages */
    cluster_sync_wait();
#endif
}

/* An instance a dtype, of one product and of several. */
template <typename T> quern_status launch(const stage_exec *exec, const few_set<1> &set);
template <typename T> quern_status launch(const stage_exec *exec, const few_set<TOGETHER> &set);

template <typename T, int MOST>
static quern_status launch_kernel(const stage_exec *exec, const few_set<MOST> &set)
{
    const int32_t most = exec->multiprocessors / CLUSTER, clusters = set.tiles < most ? set.tiles : most;
    return launch_cluster((cudaStream_t)exec->stream, gemm_sm90_few<T, MOST>,
                          dim3((unsigned)(clusters * CLUSTER)), THREADS, sizeof(shared),
                          "a product of few rows", CLUSTER, false, set);
}

} // namespace sm90_few

#endif
