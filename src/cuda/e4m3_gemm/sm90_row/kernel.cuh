/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the product of one row of 16 bits with e4m3 weights on Hopper. A block makes 32 columns of c,
 * or of a short sum q.tall times as many, so that blocks which all run at once read all of W.
 *
 *   feed      one thread copies pieces of W, a run of 32 rows each, into stages
 *   multiply  sixteen warps, each with 16 rows and every eighth piece. A run is summed from zero by
 *             products of 16 rows and 16 of the sum, whose eight columns are the same row of a, and the runs
 *             are then added in order: c has the bits that it has among other rows.
 *
 * The tensor core adds the 16 products of a step at once, so their order within it is free: a lane takes four
 * codes that follow one another, and x as it stands.
 *
 * The kernel may start while the one before it on the stream still runs: what is in the stages by then, three
 * quarters of W at 32 runs, and the scales are weights, which that one does not write. It waits for its end
 * before it reads x or writes c, and lets the next kernel start only then, so that of two kernels before it
 * only the last may still run.
 *
 * Shared memory: 96 KiB of W, 512 bytes of x, sums and scales a run: two blocks of up to 32 runs have room
 * beside each other, and with at most 60 registers. Limit: W's bytes over the read rate.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_ROW_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_ROW_KERNEL_CUH

#include "e4m3_gemm/sm90/widen.cuh"
#include "hopper/products.cuh"

namespace sm90_e4m3_row
{

using namespace sm90_e4m3;

enum {
    ROWS = 32,
    STAGES = 24,
    HALVES = ROWS / 16,
    WARPS = 16,
    PRODUCTS = WARPS * 32,
    ROW_THREADS = PRODUCTS + 32
};

/* PIECES: the most that a block has. */
template <int PIECES> struct shared {
    char w[STAGES][ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    uint2 x[PIECES][STEPS][4];  /* of the runs, which are no more */
    float parts[PIECES][ROWS], scale[PIECES][ROWS];
    ring<STAGES> stages;
};

struct row_place {
    int64_t group, column; /* column: of the group */
};

__device__ __forceinline__ row_place row_place_here(const product_params &q)
{
    const int group = (int)(blockIdx.x / (uint32_t)q.panels);
    return {group, (int64_t)((int)blockIdx.x - group * (int)q.panels) * ROWS * q.tall};
}

/* Pieces of the same rows follow one another. */
__device__ __forceinline__ int pieces_of(const product_params &q)
{
    return q.runs * q.tall;
}

template <int PIECES>
__device__ __forceinline__ void ask(const product_params &q, const CUtensorMap &w, shared<PIECES> &m, int row,
                                    int piece, const ring_place<STAGES> &at)
{
    const int rows = q.tall > 1 ? piece / q.runs : 0;
    tma_load(smem_address(m.w[at.stage]), w, m.stages.expect(at, ROWS * RUN), (piece - rows * q.runs) * RUN,
             0, row + rows * ROWS, 0);
}

/* One warp. */
template <int PIECES>
__device__ __forceinline__ void feed(const product_params &q, const CUtensorMap &w, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const int row = (int)(t.group * q.p.out + t.column), first = min(pieces_of(q), (int)STAGES);
    ring_place<STAGES> at;
    if (threadIdx.x % 32 == 0)
        for (int piece = 0; piece < first; piece++) {
            ask(q, w, m, row, piece, at);
            at.advance();
        }
    __syncwarp();
    wait_for_before();
    let_next_start();
    if (threadIdx.x % 32 == 0)
        for (int piece = first; piece < pieces_of(q); piece++) {
            m.stages.wait_free(at);
            ask(q, w, m, row, piece, at);
            at.advance();
        }
    __syncwarp();
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

/* The scales of the block's rows of W, and x. */
template <typename T, int PIECES>
__device__ __forceinline__ void prepare(const product_params &q, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const T *const x = (const T *)q.p.a + t.group * q.p.in;
    const int64_t last = q.p.out - 1 - t.column, first = t.group * q.p.out + t.column;
    for (int i = threadIdx.x; i < pieces_of(q) * ROWS; i += PRODUCTS) {
        const int piece = i / ROWS, rows = q.tall > 1 ? piece / q.runs : 0, row = rows * ROWS + i % ROWS;
        m.scale[piece][i % ROWS] = q.p.scales.at(first + min((int64_t)row, last),
                                                 (int64_t)(piece - rows * q.runs) * RUN, q.p.status);
    }
    wait_for_before();
    for (int i = threadIdx.x; i < q.runs * (RUN / 8); i += PRODUCTS)
        ((uint4 *)m.x)[i] = eight_of(x, (int64_t)i * 8, q.p.in, q.wide);
    named_sync(1, PRODUCTS);
}

/* A lane's codes of two rows, eight apart. */
struct row_codes {
    uint32_t low[STEPS], high[STEPS];
};

__device__ __forceinline__ row_codes load_codes(const char *rows)
{
    const int lane = threadIdx.x % 32, row = lane / 4;
    const uint32_t from = smem_address(rows) + row * 128 + (row << 4) + lane % 4 * 4;
    row_codes r;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const uint32_t at = from ^ s << 4;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r.low[s]) : "r"(at));
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r.high[s]) : "r"(at + 8 * 128));
    }
    return r;
}

template <typename T, int PIECES>
__device__ __forceinline__ void multiply(const product_params &q, shared<PIECES> &m)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp % HALVES;
    for (int piece = warp / HALVES; piece < pieces_of(q); piece += WARPS / HALVES) {
        const ring_place<STAGES> at = ring_place<STAGES>::of(piece);
        const int run = q.tall > 1 ? piece % q.runs : piece;
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        m.stages.wait_full(at);
        const row_codes r = load_codes(m.w[at.stage] + half * 16 * RUN);
        give_back_by_warp(m.stages, at);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const uint2 x = m.x[run][s][lane % 4];
            const uint32_t a[4] = {widen<T>((uint16_t)r.low[s]), widen<T>((uint16_t)r.high[s]),
                                   widen<T>((uint16_t)(r.low[s] >> 16)),
                                   widen<T>((uint16_t)(r.high[s] >> 16))};
            mma16816<T>(part, a, x.x, x.y);
        }
        if (lane % 4 == 0) {
            m.parts[piece][half * 16 + lane / 4] = part[0];
            m.parts[piece][half * 16 + lane / 4 + 8] = part[2];
        }
    }
}

/* A lane a column of c. */
template <typename T, int PIECES>
__device__ __forceinline__ void add_runs(const product_params &q, const shared<PIECES> &m, int rows)
{
    const row_place t = row_place_here(q);
    const int row = threadIdx.x % 32, first = rows * q.runs;
    const int64_t column = t.column + rows * ROWS + row, at = t.group * q.p.out + column;
    if (column >= q.p.out) return;
    const float bias = q.p.bias.p != NULL ? q.p.bias.at(at) : 0.0f;
    float c = 0.0f;
#pragma unroll 8
    for (int run = first; run < first + q.runs; run++) c = fmaf(m.scale[run][row], m.parts[run][row], c);
    ((T *)q.p.c)[at] = from_float<T>(c + bias);
}

template <typename T, int PIECES>
__global__ void __launch_bounds__(ROW_THREADS, 2)
    e4m3_gemm_sm90_row(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<PIECES> &m = *(shared<PIECES> *)memory;
    if (threadIdx.x == PRODUCTS) {
        m.stages.init(1, HALVES * READER_ARRIVALS);
        mbar_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= PRODUCTS) feed(q, w, m);
    else {
        prepare<T>(q, m);
        multiply<T>(q, m);
    }
    __syncthreads();
    if ((int)threadIdx.x / 32 < q.tall) add_runs<T>(q, m, threadIdx.x / 32);
#endif
}

} // namespace sm90_e4m3_row

#endif
