/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - products of many rows with e4m3 weights on Hopper: both operands from shared memory, 128 rows
 * of a by 256 of W a block. Rows of 16 bits meet W widened to their dtype (widen.cu), exactly and without its
 * scales; rows rounded to e4m3 (round.cu) meet W as it stands.
 *
 *   feed      one thread copies 128 bytes of each of a's and W's rows into a stage. Two blocks of a cluster
 *             have the same rows of W: each brings half of them to both.
 *   multiply  two warpgroups of 64 rows of a, the columns in two halves of 128, one after the other. A run of
 *             128 is summed from zero and added times the scales, one of W for each half: 64 multiply-adds a
 *             thread, while the other warpgroup's products run.
 *
 * A row has the bits that it has in the kernels of few rows: the same runs, summed and added in their order.
 *
 * Registers: 128 + 64 sums. Shared memory of a stage: 48 KiB, of which 32 come from L2 for this block alone.
 * Limit: tensor cores, a half of a run 512 clocks a warpgroup in 16 bits and 256 in e4m3.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_LARGE_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_LARGE_KERNEL_CUH

#include "e4m3_gemm/sm90/tiles.cuh"
#include "hopper/cluster.cuh"

namespace sm90_e4m3_large
{

using sm90_e4m3::RUN;
using sm90_e4m3::THREADS;
using sm90_e4m3::GROUPS;
using sm90_e4m3::WG_ROWS;

enum {
    TOKENS = GROUPS * WG_ROWS,
    HALF = 128,
    COLUMNS = 2 * HALF,
    CLUSTER = 2,
    STAGES = 4,
    SECTION = 8, /* pairs of blocks of rows that meet all of W before the next ones do: L2 keeps them */
    FEW_REGISTERS = 40,
    MANY_REGISTERS = 232,
    FREEING = CLUSTER * GROUPS * 4 /* warps */
};

/* A pass has some of W's groups, or some columns of one. */
struct large_params {
    e4m3_scales scales;
    any_floats bias;
    void *c;
    int64_t c_row, tokens, in, out; /* in, out: of a group */
    int64_t group, column, columns; /* the pass's first ones, and a group's columns in it */
    int32_t groups, panels, pairs;  /* in the pass; panels: of a group */
    int32_t runs;                   /* of a group */
    bool wide;                      /* rows of c take stores of 16 bytes */
    const float *row_scale;         /* of codes: [groups runs][scale_row] */
    int64_t scale_row;
    int32_t *status;
};

template <bool FP8> struct form {
    enum {
        STEP = FP8 ? 128 : 64, /* elements of a stage along the sum */
        EACH = RUN / STEP,     /* stages of a run */
        BYTES = (COLUMNS + TOKENS) * 128 + (FP8 ? TOKENS * 4 : 0)
    };
};

template <bool FP8> struct shared {
    char w[STAGES][COLUMNS * 128]; /* first: tiles are aligned to 1024 bytes */
    char a[STAGES][TOKENS * 128];
    char out[GROUPS][WG_ROWS * HALF * 2];
    float scale[FP8 ? STAGES : 1][TOKENS];
    ring<STAGES> stages;
};

struct large_place {
    int64_t group, column, token; /* column: of the group */
    int32_t row;                  /* of the pass's W */
};

__device__ __forceinline__ int32_t tiles_of(const large_params &q)
{
    return q.groups * q.panels * q.pairs;
}

__device__ __forceinline__ large_place place_at(const large_params &q, int32_t tile, int rank)
{
    const int32_t all = q.groups * q.panels, section = tile / (all * SECTION),
                  pairs = min((int32_t)SECTION, q.pairs - section * SECTION),
                  rest = tile - section * all * SECTION, panel = rest / pairs, group = panel / q.panels,
                  column = (panel - group * q.panels) * COLUMNS;
    return {q.group + group, q.column + column,
            ((int64_t)(section * SECTION + rest - panel * pairs) * CLUSTER + rank) * TOKENS,
            (int32_t)(group * q.columns) + column};
}

template <bool FP8>
__device__ __forceinline__ void feed(const large_params &q, const CUtensorMap &w, const CUtensorMap &a,
                                     shared<FP8> &m, int rank)
{
    typedef form<FP8> form;
    ring_place<STAGES> at;
    wait_for_before();
    for (int32_t i = (int32_t)blockIdx.x / CLUSTER; i < tiles_of(q); i += (int32_t)gridDim.x / CLUSTER) {
        const large_place t = place_at(q, i, rank);
        const int64_t from = FP8 ? t.group * q.runs * RUN : t.group * q.in;
        for (int s = 0; s < q.runs * form::EACH; s++) {
            m.stages.wait_free(at);
            const uint32_t bar = m.stages.expect(at, form::BYTES);
            tma_load_all((1 << CLUSTER) - 1, smem_address(m.w[at.stage]) + rank * HALF * 128, w, bar,
                         s * form::STEP, 0, t.row + rank * HALF, 0);
            tma_load(smem_address(m.a[at.stage]), a, bar, (int)from + s * form::STEP, 0, (int)t.token, 0);
            if (FP8)
                bulk_load(smem_address(m.scale[at.stage]),
                          q.row_scale + (t.group * q.runs + s) * q.scale_row + t.token,
                          TOKENS * sizeof(float), bar);
            at.advance();
        }
    }
}

template <typename T, bool FP8, bool ADD>
__device__ __forceinline__ void product(float (&part)[HALF / 8][4], uint64_t a, uint64_t b)
{
    if constexpr (FP8) wgmma_ss_e4m3<ADD>(part, a, b);
    else wgmma_ss<T, HALF, ADD, false>(part, a, b);
}

/* part = the products of a run with a half of the columns. The first half waits for the run's stages. */
template <typename T, bool FP8, int WHICH>
__device__ __forceinline__ void multiply_half(float (&part)[HALF / 8][4], shared<FP8> &m,
                                              const ring_place<STAGES> &first, int warpgroup)
{
    ring_place<STAGES> at = first;
    wg_start();
#pragma unroll
    for (int i = 0; i < form<FP8>::EACH; i++) {
        if (WHICH == 0) m.stages.wait_full(at);
        const uint64_t a =
                           wg_fresh(wg_tile(stage_address(m.a, at.stage) + warpgroup * WG_ROWS * 128, 0)),
                       b = wg_fresh(wg_tile(stage_address(m.w, at.stage) + WHICH * HALF * 128, 0));
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if (i == 0 && s == 0) product<T, FP8, false>(part, a, b);
            else product<T, FP8, true>(part, wg_further(a, s * 32), wg_further(b, s * 32));
        }
        at.advance();
    }
    wg_commit();
    wg_wait<0>(part);
}

/* c += part times the scales of a thread's two rows. */
__device__ __forceinline__ void add_half(float (&c)[HALF / 8][4], const float (&part)[HALF / 8][4], float low,
                                         float high)
{
#pragma unroll
    for (int n = 0; n < HALF / 8; n++) {
        c[n][0] = fmaf(low, part[n][0], c[n][0]);
        c[n][1] = fmaf(low, part[n][1], c[n][1]);
        c[n][2] = fmaf(high, part[n][2], c[n][2]);
        c[n][3] = fmaf(high, part[n][3], c[n][3]);
    }
}

/* Tells both blocks of the cluster that this warp has read a stage. */
template <bool FP8> __device__ __forceinline__ void free_stage(shared<FP8> &m, const ring_place<STAGES> &at)
{
    const int lane = threadIdx.x % 32;
    if (lane < CLUSTER)
        cluster_arrive_read(cluster_address(smem_address(m.stages.free) + at.stage * 8, (uint32_t)lane));
}

/* Both halves' sums of a tile; `at` goes on. */
template <typename T, bool FP8>
__device__ __forceinline__ void sum_tile(const large_params &q, shared<FP8> &m, ring_place<STAGES> &at,
                                         const large_place &t, int warpgroup,
                                         float (&c)[2][HALF / 8][4])
{
    const int64_t row = t.group * q.out + t.column, second = row + min((int64_t)HALF, q.out - 1 - t.column);
    const int token = warpgroup * WG_ROWS + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    uint32_t stored[2] = {q.scales.stored(row, 0), q.scales.stored(second, 0)};
    for (int run = 0; run < q.runs; run++) {
        const int64_t next = (int64_t)min(run + 1, q.runs - 1) * RUN;
        float part[HALF / 8][4], low[2], high[2];
        multiply_half<T, FP8, 0>(part, m, at, warpgroup);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float s = q.scales.value(stored[i], q.status);
            low[i] = FP8 ? s * m.scale[at.stage][token] : s;
            high[i] = FP8 ? s * m.scale[at.stage][token + 8] : s;
        }
        add_half(c[0], part, low[0], high[0]);
        stored[0] = q.scales.stored(row, next);
        stored[1] = q.scales.stored(second, next);
        multiply_half<T, FP8, 1>(part, m, at, warpgroup);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < form<FP8>::EACH; i++) {
            free_stage(m, at);
            at.advance();
        }
        add_half(c[1], part, low[1], high[1]);
    }
}

/* Where element `column` of 128 of 16 bits stands in a row's 256 bytes. */
__device__ __forceinline__ int out_at(int row, int column)
{
    return row * HALF * 2 + ((column / 8 ^ (row & 7)) << 4) + column % 8 * 2;
}

/* 64 rows of a half of the columns through `room`. */
template <typename T>
__device__ __forceinline__ void store_half(const float (&c)[HALF / 8][4], const large_params &q,
                                           const large_place &t, int half, int warpgroup, char *room)
{
    const int lane = threadIdx.x % 32, thread = threadIdx.x % 128, row = thread / 32 * 16 + lane / 4;
    const int64_t first = t.column + half * HALF, at = t.group * q.out + first, left = q.out - first;
#pragma unroll
    for (int n = 0; n < HALF / 8; n++) {
        const int column = n * 8 + lane % 4 * 2;
        float bias[2] = {0.0f, 0.0f};
        if (q.bias.p != NULL)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (column + e < left) bias[e] = q.bias.at(at + column + e);
        *(uint32_t *)(room + out_at(row, column)) = pack2<T>(c[n][0] + bias[0], c[n][1] + bias[1]);
        *(uint32_t *)(room + out_at(row + 8, column)) = pack2<T>(c[n][2] + bias[0], c[n][3] + bias[1]);
    }
    named_sync(1 + warpgroup, 128);
    const int part = thread % 16 * 8;
#pragma unroll 4
    for (int r = thread / 16; r < WG_ROWS; r += 8) {
        const int64_t token = t.token + warpgroup * WG_ROWS + r;
        const T *const from = (const T *)(room + out_at(r, part));
        T *const to = (T *)q.c + token * q.c_row + at + part;
        if (token >= q.tokens) break;
        if (left - part >= 8 && q.wide) *(uint4 *)to = *(const uint4 *)from;
        else
            for (int i = 0; i < 8 && i < left - part; i++) to[i] = from[i];
    }
    named_sync(1 + warpgroup, 128);
}

template <typename T, bool FP8>
__device__ __forceinline__ void multiply(const large_params &q, shared<FP8> &m, int warpgroup, int rank)
{
    ring_place<STAGES> at;
    for (int32_t i = (int32_t)blockIdx.x / CLUSTER; i < tiles_of(q); i += (int32_t)gridDim.x / CLUSTER) {
        const large_place t = place_at(q, i, rank);
        float c[2][HALF / 8][4];
#pragma unroll
        for (int n = 0; n < HALF / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[0][n][e] = c[1][n][e] = 0.0f;
        sum_tile<T>(q, m, at, t, warpgroup, c);
        store_half<T>(c[0], q, t, 0, warpgroup, m.out[warpgroup]);
        store_half<T>(c[1], q, t, 1, warpgroup, m.out[warpgroup]);
    }
}

template <typename T, bool FP8>
__global__ void __launch_bounds__(THREADS, 1)
    e4m3_gemm_sm90_large(const __grid_constant__ large_params q, const __grid_constant__ CUtensorMap w,
                         const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<FP8> &m = *(shared<FP8> *)memory;
    const int rank = (int)(blockIdx.x % CLUSTER);
    if (threadIdx.x == 0) {
        m.stages.init(1, FREEING);
        mbar_init_done();
    }
    __syncthreads();
    cluster_sync_arrive();
    cluster_sync_wait();
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (role == 0) {
        registers_down<FEW_REGISTERS>();
        if (threadIdx.x == 0) feed(q, w, a, m, rank);
        __syncwarp();
    } else {
        registers_up<MANY_REGISTERS>();
        multiply<T>(q, m, role - 1, rank);
    }
    cluster_sync_arrive(); /* the other block may still fill or free this one's stages */
    cluster_sync_wait();
#endif
}

} // namespace sm90_e4m3_large

#endif
