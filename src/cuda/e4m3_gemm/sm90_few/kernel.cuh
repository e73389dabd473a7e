/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the product of few rows of 16 bits with e4m3 weights on Hopper: W is to pass through the chip
 * once at the rate of a copy. A tile is 64 rows of W by TOKENS rows of a.
 *
 *   feed      a thread copies runs of W into their ring, another what a has there into its own
 *   multiply  four warpgroups take runs in turn: a lane widens its codes, half a run at a time, while the
 *             products of the half before are under way. A run is summed from zero.
 *   fold      a warpgroup adds the runs' sums, times their rows' scales, in the order of the runs. Its warps
 *             have the rows of W of those that multiply: each waits for one warp of these alone.
 *
 * Where there are few tiles, up to 8 blocks of a cluster split a tile's runs. They keep all their runs' sums
 * and then add them in the order of the runs, each block for some of c: the bits are those of one block.
 * TOKENS, 8 to 64, is the width of the products and changes no bit either.
 *
 * The kernel may start while the one before it on the stream still runs: what W's ring holds is weights,
 * which that one does not write. It waits for its end before it reads a, and lets the next start only then.
 *
 * Shared memory: rings of W, of a and of sums. A run of 64 rows takes 8 KiB of W through it once, read as
 * words of two bytes, and four times the bytes of its tokens: 56 KB at 32 tokens, 448 clocks, and as many at
 * the copy rate. Registers: 32 sums, 2 x 16 of operands at 64 tokens.
 */
#ifndef QUERN_CUDA_E4M3_GEMM_SM90_FEW_KERNEL_CUH
#define QUERN_CUDA_E4M3_GEMM_SM90_FEW_KERNEL_CUH

#include "e4m3_gemm/sm90/few.cuh"
#include "hopper/cluster.cuh"

namespace sm90_e4m3_few
{

using namespace sm90_e4m3;

enum {
    FEW_THREADS = MATH + 256,
    FEED = MATH + 128, /* threads: the one that feeds codes, and that of rows */
    FEED_ROWS = FEED + 32,
    RUNS_MOST = 256
};

template <int TOKENS> struct form {
    enum {
        TILES = TOKENS / 8,         /* of a run's sums: eight tokens each */
        A_BYTES = TOKENS * RUN * 2, /* of a run: its rows of a, or its sums */
        W_STAGES = TOKENS == 8    ? 12
                   : TOKENS == 32 ? 10
                                  : 8,
        A_STAGES = TOKENS == 64   ? 5
                   : TOKENS == 16 ? 6
                                  : 8,
        FEED_REGISTERS = 32,
        MATH_REGISTERS = TOKENS == 64 ? 96 : 88,
        FOLD_REGISTERS = TOKENS == 64 ? 64 : 80,
        SUMS = TOKENS == 64   ? 4
               : TOKENS == 32 ? 8
               : TOKENS == 16 ? 32
                              : 48 /* runs whose sums have room */
    };
    static_assert((int)SUMS % (int)TAKERS == 0, "a warpgroup waits for every use of its places for sums");
};

template <int TOKENS> struct shared {
    typedef form<TOKENS> f;
    char w[f::W_STAGES][WG_ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    char a[f::A_STAGES][f::A_BYTES];
    char sums[f::SUMS][f::A_BYTES];
    char out[TOKENS * WG_ROWS * 2];
    float2 scale[RUNS_MOST];
    group_ring<TAKERS, f::W_STAGES> codes;
    group_ring<TAKERS, f::A_STAGES> rows;
    ring<f::SUMS * 4> warps; /* a run's sums of a warp's 16 rows of W */
};

/* Of N barriers that WARPS warps initialise, those of one; a lane of each calls. `warp` comes from a
 * __shfl_sync(): a warp whose addresses are in no uniform register initialises one barrier at a time, each
 * behind a fence, some 60 clocks. */
template <int WARPS, int N>
__device__ __forceinline__ void init_part(uint64_t (&of)[N], int warp, uint32_t arrivals)
{
#pragma unroll
    for (int i = 0; i < N; i += WARPS)
        if (i + WARPS <= N || warp < N - i) mbar_init(smem_address(of) + (warp + i) * 8, arrivals);
}

/* All threads. A warp that feeds uses its own ring's barriers alone, so it starts before the others are
 * there. Blocks that share a tile use each place for sums once, without barriers. */
template <int TOKENS>
__device__ __forceinline__ void init_barriers(const product_params &q, shared<TOKENS> &m, int role)
{
    enum { WARPS = FEED / 32 };
    if (role <= TAKERS) {
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (threadIdx.x % 32 == 0 && q.shares == 1) {
            init_part<WARPS>(m.warps.full, warp, READER_ARRIVALS);
            init_part<WARPS>(m.warps.free, warp, READER_ARRIVALS);
        }
        mbar_init_done();
        named_sync(0, FEW_THREADS);
    } else {
        if (threadIdx.x == FEED) m.codes.init(1, 4 * READER_ARRIVALS);
        if (threadIdx.x == FEED_ROWS) m.rows.init(1, 4 * READER_ARRIVALS);
        mbar_init_done();
        __syncwarp();
        named_arrive(0, FEW_THREADS);
    }
}

/* A block's place among those that share a tile and the runs of each; its own runs, and its tiles: the
 * first, the step from one to the next. */
struct share {
    int rank, each, first, count;
    int64_t tile, step;
};

/* By shifts: 1, 2, 4 or 8 blocks share a tile. A division takes some 200 clocks, before the first copy. */
__device__ __forceinline__ share share_here(const product_params &q)
{
    const int shift = 31 - __clz(q.shares), rank = (int)(blockIdx.x & (q.shares - 1)),
              each = (q.runs + q.shares - 1) >> shift, first = min(rank * each, (int)q.runs);
    share s = {rank, each, first, min(each, q.runs - first)};
    s.tile = blockIdx.x >> shift;
    s.step = gridDim.x >> shift;
    return s;
}

/* Tiles of the same rows of W follow one another. */
__device__ __forceinline__ tile_place place_of(const product_params &q, int64_t tile, int tokens)
{
    int64_t panel = tile, group = 0;
    if (q.token_tiles > 1) panel = tile / q.token_tiles;
    if (q.p.groups > 1) group = panel / q.panels;
    return {group, (panel - group * q.panels) * WG_ROWS, (tile - panel * q.token_tiles) * tokens};
}

/* ---- feed ---- */

template <int TOKENS>
__device__ __forceinline__ void feed_codes(const product_params &q, const CUtensorMap &w, shared<TOKENS> &m)
{
    const share s = share_here(q);
    group_place<TAKERS, form<TOKENS>::W_STAGES> at;
    for (int64_t i = s.tile; i < tiles_of(q); i += s.step) {
        const tile_place t = place_of(q, i, TOKENS);
#pragma unroll 1
        for (int run = s.first; run < s.first + s.count; run++) {
            m.codes.wait_free(at);
            const uint32_t bar = m.codes.expect(at, WG_ROWS * RUN);
            tma_load(stage_address(m.w, at.stage), w, bar, run * RUN, 0, (int)(t.group * q.p.out + t.column),
                     0);
            at.advance();
        }
    }
}

template <int TOKENS>
__device__ __forceinline__ void feed_rows(const product_params &q, const CUtensorMap &a, shared<TOKENS> &m)
{
    const share s = share_here(q);
    group_place<TAKERS, form<TOKENS>::A_STAGES> at;
    wait_for_before();
    let_next_start();
    for (int64_t i = s.tile; i < tiles_of(q); i += s.step) {
        const tile_place t = place_of(q, i, TOKENS);
#pragma unroll 1
        for (int run = s.first; run < s.first + s.count; run++) {
            m.rows.wait_free(at);
            const uint32_t bar = m.rows.expect(at, form<TOKENS>::A_BYTES), to = stage_address(m.a, at.stage);
            const int from = (int)(t.group * q.p.in) + run * RUN;
            tma_load(to, a, bar, from, 0, (int)t.token, 0);
            tma_load(to + TOKENS * 128, a, bar, from + 64, 0, (int)t.token, 0);
            at.advance();
        }
    }
}

/* ---- products ---- */

/* A thread's 16 bytes of eight tokens' sums: those of its two rows of W and two tokens. */
__device__ __forceinline__ uint32_t sums_at(uint32_t sums, int tile)
{
    return sums + (uint32_t)(tile * 128 + threadIdx.x % 128) * 16;
}

__device__ __forceinline__ float4 load_sums(uint32_t address)
{
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}

/* A warp's place in the ring of sums. */
template <int SUMS> __device__ __forceinline__ ring_place<SUMS * 4> warp_place(const ring_place<SUMS> &at)
{
    return {at.stage * 4 + (int)(threadIdx.x / 32 % 4), at.parity};
}

template <typename T, int TOKENS>
__device__ __forceinline__ void multiply(const product_params &q, shared<TOKENS> &m, int warpgroup)
{
    typedef form<TOKENS> f;
    const share s = share_here(q);
    const int runs = s.count * (int)((tiles_of(q) - s.tile + s.step - 1) / s.step);
    group_place<TAKERS, f::W_STAGES> w;
    group_place<TAKERS, f::A_STAGES> a;
    ring_place<f::SUMS> to = ring_place<f::SUMS>::of(warpgroup);
    run_operand operand;
    w.advance_by(warpgroup);
    a.advance_by(warpgroup);
    if (warpgroup < runs) take_low<T>(operand, m.codes, w, m.w);
    for (int run = warpgroup; run < runs; run += TAKERS) {
        const uint32_t sums = stage_address(m.sums, to.stage);
        float part[f::TILES][4];
        m.rows.wait_full(a);
        start_run<T, TOKENS>(part, operand, w, m.w, stage_address(m.a, a.stage));
        give_back_by_warp(m.codes, w);
        wait_low();
        if (run + TAKERS < runs) {
            w.advance_by(TAKERS);
            take_low<T>(operand, m.codes, w, m.w);
        }
        wg_wait<0>(part);
        give_back_by_warp(m.rows, a);
        if (q.shares == 1) m.warps.wait_free(warp_place(to));
#pragma unroll
        for (int n = 0; n < f::TILES; n++)
            store_shared4(sums_at(sums, n), part[n][0], part[n][1], part[n][2], part[n][3]);
        __syncwarp();
        if (q.shares == 1 && threadIdx.x % 32 < READER_ARRIVALS) m.warps.give(warp_place(to));
        a.advance_by(TAKERS);
        advance_by(to, (int)TAKERS);
    }
}

/* ---- sums ---- */

template <int TOKENS>
__device__ __forceinline__ void read_scales(const product_params &q, shared<TOKENS> &m, const tile_place &t)
{
    const tile_scales scales(q, t.group, t.column);
    for (int run = threadIdx.x % 128; run < q.runs; run += 128) m.scale[run] = scales.of(q, run);
}

__device__ __forceinline__ void add_sums(float (&c)[4], const float4 &x, const row_scales &s)
{
    c[0] = fmaf(s.low, x.x, c[0]);
    c[1] = fmaf(s.low, x.y, c[1]);
    c[2] = fmaf(s.high, x.z, c[2]);
    c[3] = fmaf(s.high, x.w, c[3]);
}

/* A warpgroup. */
template <typename T, int TOKENS>
__device__ __forceinline__ void fold_tiles(const product_params &q, shared<TOKENS> &m)
{
    typedef form<TOKENS> f;
    const share s = share_here(q);
    ring_place<f::SUMS> at;
    for (int64_t i = s.tile; i < tiles_of(q); i += s.step) {
        const tile_place t = place_of(q, i, TOKENS);
        const late_rows late(q, t.group, t.column);
        float c[f::TILES][4];
        clear_sums(c);
        read_scales(q, m, t);
        if (q.shares > 1) return;
        named_sync(1, 128);
#pragma unroll 1
        for (int run = 0; run < q.runs; run++) {
            const uint32_t sums = stage_address(m.sums, at.stage);
            const row_scales by = late.of(m.scale[run]);
            m.warps.wait_full(warp_place(at));
#pragma unroll
            for (int n = 0; n < f::TILES; n++) add_sums(c[n], load_sums(sums_at(sums, n)), by);
            give_back_by_warp(m.warps, warp_place(at));
            at.advance();
        }
        store_tile<T, TOKENS>(c, q, t, 0, m.out);
    }
}

/* ---- shares ---- */

/* A part is eight tokens of 16 rows of W, a number of c for each thread of a warpgroup: the blocks' sums of
 * all runs, in order. Those of two blocks, or of twice AHEAD runs of one, are read at once. */
template <typename T, int TOKENS>
__device__ __forceinline__ void fold_part(const product_params &q, shared<TOKENS> &m, const tile_place &t,
                                          int each, int part)
{
    enum { AHEAD = TOKENS == 8 ? 16 : TOKENS == 64 ? 4 : 8, STEP = form<TOKENS>::A_BYTES };
    static_assert((int)form<TOKENS>::SUMS % (int)AHEAD == 0, "reads past a block's runs end with its places");
    const int x = threadIdx.x % 128, row = part % 4 * 16 + x / 16 + x % 4 / 2 * 8,
              token = part / 4 * 8 + x / 4 % 4 * 2 + x % 2;
    const int64_t row0 = t.group * q.p.out, to = t.column + row, at = t.token + token;
    const bool late = (row0 + to) >> q.p.scales.shift != (row0 + t.column) >> q.p.scales.shift;
    const float *const scale = late ? &m.scale[0].y : &m.scale[0].x;
    const uint32_t sums = smem_address(m.sums) + (uint32_t)(part * 128 + x) * 4;
    float c = 0.0f;
    int rank = 0, done = 0;
#pragma unroll 1
    while (rank < q.shares) {
        float sum[2][AHEAD];
        int first[2], count[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t from = cluster_address(sums + done * (uint32_t)STEP, min(rank, q.shares - 1));
            first[i] = rank * each + done;
            count[i] = min(each - done, q.runs - first[i]);
#pragma unroll
            for (int run = 0; run < AHEAD; run++) sum[i][run] = cluster_load_one(from + run * (uint32_t)STEP);
            done += AHEAD;
            if (done < each) continue;
            done = 0;
            rank++;
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int run = 0; run < AHEAD; run++)
                if (run < count[i]) c = fmaf(scale[2 * (first[i] + run)], sum[i][run], c);
    }
    if (to >= q.p.out || at >= q.p.tokens) return;
    const float bias = q.p.bias.p != NULL ? q.p.bias.at(row0 + to) : 0.0f;
    ((T *)q.p.c)[at * q.p.c_row + row0 + to] = from_float<T>(c + bias);
}

/* The warpgroups of the cluster that multiplied add the parts of its tile. */
template <typename T, int TOKENS>
__device__ __forceinline__ void fold_shares(const product_params &q, shared<TOKENS> &m, int warpgroup)
{
    cluster_sync_arrive();
    const share s = share_here(q);
    const tile_place t = place_of(q, s.tile, TOKENS);
    cluster_sync_wait(); /* sums are there */
    for (int part = warpgroup * q.shares + s.rank; part < form<TOKENS>::TILES * 4; part += TAKERS * q.shares)
        fold_part<T, TOKENS>(q, m, t, s.each, part);
}

template <typename T, int TOKENS>
__global__ void __launch_bounds__(FEW_THREADS, 1)
    e4m3_gemm_sm90_few(const __grid_constant__ product_params q, const __grid_constant__ CUtensorMap w,
                       const __grid_constant__ CUtensorMap a)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<TOKENS> &m = *(shared<TOKENS> *)memory;
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    init_barriers(q, m, role);
    if (role < TAKERS) {
        registers_up<form<TOKENS>::MATH_REGISTERS>();
        multiply<T, TOKENS>(q, m, role);
        if (q.shares > 1) fold_shares<T, TOKENS>(q, m, role);
    } else if (role == TAKERS) {
        registers_down<form<TOKENS>::FOLD_REGISTERS>();
        fold_tiles<T, TOKENS>(q, m);
        if (q.shares > 1) {
            cluster_sync_arrive();
            cluster_sync_wait();
        }
    } else {
        registers_down<form<TOKENS>::FEED_REGISTERS>();
        if (threadIdx.x == FEED) feed_codes(q, w, m);
        if (threadIdx.x == FEED_ROWS) feed_rows(q, a, m);
        __syncwarp();
        if (q.shares > 1) {
            cluster_sync_arrive_read();
            cluster_sync_wait();
        }
    }
    if (q.shares > 1) { /* no block ends while another one reads its sums */
        cluster_sync_arrive_read();
        cluster_sync_wait();
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
    return launch_cluster((cudaStream_t)exec->stream, e4m3_gemm_sm90_few<T, TOKENS>, dim3((unsigned)grid),
                          FEW_THREADS, sizeof(shared<TOKENS>), "e4m3_gemm", (unsigned)q.shares, true, q, w,
                          a);
}

} // namespace sm90_e4m3_few

#endif
