/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the product of one row of 16 bits with e4m3 weights on Hopper. A block makes 32 columns of c,
 * or of a short sum q.tall times as many, so that blocks which all run at once read all of W.
 *
 *   feed      one thread copies pieces of W, a run of 32 rows each, into stages
 *   multiply  sixteen warps, each with all 32 rows of every sixteenth piece. A run is summed from zero by
 *             products of 16 rows and 16 of the sum, whose eight columns are the same row of a
 *   add       the warp that has fed adds the runs in order, those of sixteen pieces while the next are
 *             multiplied: c has the bits that it has among other rows. In a block of more columns the warps
 *             that multiply add, at the end.
 *
 * The tensor core adds the 16 products of a step at once, so their order within it is free: a lane takes four
 * codes that follow one another, and x as it stands.
 *
 * All of W is widened once x is there, for registers hold no more than a piece. To f16 that is one
 * instruction for two codes, to bf16 four, 2 us of 4096 x 4096. So a run of x in bf16 becomes f16 times a
 * power of two wherever that is exact: where its numbers but zeros lie within 2^28 of each other. Its sum is
 * divided by the power, and has the bits that it has in bf16. A warp reads and converts the runs of its own
 * pieces, so that no warp waits for another.
 *
 * The kernel may start while the one before it on the stream still runs: what is in the stages by then, the
 * codes of each warp's first piece, for which registers have room, and the scales are weights, which that one
 * does not write: all of W at 32 runs. It waits for its end before it reads x or writes c, and lets the next
 * kernel start only then, so that of two kernels before it only the last may still run.
 *
 * Shared memory: 64 KiB of W, 512 bytes of x, sums and scales a run: two blocks of up to 32 runs have room
 * beside each other, and with at most 56 registers. Limit: W's bytes over the read rate.
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
    STAGES = 16,
    HALVES = ROWS / 16,
    WARPS = 16, /* a warp's pieces: every sixteenth */
    PRODUCTS = WARPS * 32,
    ROW_THREADS = PRODUCTS + 32
};
static_assert((int)STAGES % (int)WARPS == 0, "a warp waits for every use of its stages");

/* PIECES: the most that a block has. */
template <int PIECES> struct shared {
    char w[STAGES][ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    uint2 x[PIECES][STEPS][4];  /* of the runs, which are no more */
    float parts[PIECES][ROWS], scale[PIECES][ROWS];
    float back[PIECES]; /* of a run: what its sums are multiplied by; 0: x is not in f16 */
    ring<STAGES> stages;
    stage_barriers<PIECES / WARPS> summed; /* of each sixteen pieces */
    stage_barriers<1> scaled;              /* all scales */
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

/* One thread. */
template <int PIECES>
__device__ __forceinline__ void feed(const product_params &q, const CUtensorMap &w, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const int row = (int)(t.group * q.p.out + t.column);
    ring_place<STAGES> at;
    for (int piece = 0; piece < pieces_of(q); piece++) {
        m.stages.wait_free(at);
        ask(q, w, m, row, piece, at);
        at.advance();
    }
}

/* Four elements of x, of which `left` are there; 0 past the last. */
template <typename T> __device__ __forceinline__ uint2 four_of(const T *x, int64_t left)
{
    if (left >= 4) return *(const uint2 *)x;
    alignas(8) T all[4];
#pragma unroll
    for (int i = 0; i < 4; i++) all[i] = i < left ? x[i] : from_float<T>(0.0f);
    return *(const uint2 *)all;
}

enum { SPAN = 28, TOP = 14, FAR = 60 };

/* Of each of N runs, of whose x a warp's lanes have four elements each, brings the largest number into
 * [2^TOP, 2^(TOP + 1)) of f16. back: what a run's sums are to be multiplied by; 0, and x as it was, where a
 * number would be no exact and normal one of f16, or a sum might leave f32's range. */
template <int N> __device__ __forceinline__ void to_halves(uint2 (&x)[N], float (&back)[N])
{
    int most[N], least[N];
    bool near[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint32_t word[2] = {x[n].x, x[n].y};
        most[n] = 0;
        least[n] = 0x7fff;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int size = (int)(word[i / 2] >> i % 2 * 16 & 0x7fff);
            most[n] = max(most[n], size);
            least[n] = min(least[n], size == 0 ? 0x7fff : size);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++) most[n] = (int)__reduce_max_sync(~0u, (uint32_t)most[n]);
#pragma unroll
    for (int n = 0; n < N; n++) near[n] = __all_sync(~0u, (most[n] >> 7) - (least[n] >> 7) <= SPAN);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int top = (most[n] >> 7) - 127;
        const bool fit = near[n] && abs(top) <= FAR;
        const float times = __uint_as_float((uint32_t)(127 + TOP - top) << 23);
        const float2 low = unpack2<bf16>(x[n].x), high = unpack2<bf16>(x[n].y);
        const uint2 halves = {pack2<__half>(low.x * times, low.y * times),
                              pack2<__half>(high.x * times, high.y * times)};
        x[n] = fit ? halves : x[n];
        back[n] = most[n] == 0 ? 1.0f : fit ? __uint_as_float((uint32_t)(127 - TOP + top) << 23) : 0.0f;
    }
}

/* The scales of the block's rows of W. */
template <int PIECES> __device__ __forceinline__ void read_scales(const product_params &q, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const int64_t last = q.p.out - 1 - t.column, first = t.group * q.p.out + t.column;
    for (int i = threadIdx.x; i < pieces_of(q) * ROWS; i += PRODUCTS) {
        const int piece = i / ROWS, rows = q.tall > 1 ? piece / q.runs : 0, row = rows * ROWS + i % ROWS;
        m.scale[piece][i % ROWS] = q.p.scales.at(first + min((int64_t)row, last),
                                                 (int64_t)(piece - rows * q.runs) * RUN, q.p.status);
    }
}

/* x, once the kernel before this one has ended: every sixteenth run, which this warp's pieces need alone if
 * runs are a multiple of sixteen. The loads' address is made before the wait, as L2 is asked for it. */
template <typename T, int PIECES>
__device__ __forceinline__ void read_row(const product_params &q, shared<PIECES> &m)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, runs = q.runs;
    const int64_t k = warp * RUN + lane * 4;
    const T *x = (const T *)q.p.a + row_place_here(q).group * q.p.in + k;
    const bool whole = q.p.in % RUN == 0;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(x));
    wait_for_before();
    for (int run = warp; run < runs; run += 2 * WARPS, x += 2 * WARPS * RUN) {
        const bool two = run + WARPS < runs;
        uint2 four[2] = {};
        if (whole) {
            four[0] = *(const uint2 *)x;
            if (two) four[1] = *(const uint2 *)(x + WARPS * RUN);
        } else {
            const int64_t left = q.p.in - k - (run - warp) * RUN;
            four[0] = four_of(x, left);
            four[1] = four_of(x + WARPS * RUN, left - WARPS * RUN);
        }
        let_next_start();
        if constexpr (__is_same(T, bf16)) {
            float back[2];
            to_halves(four, back);
            if (lane < 2 && run + lane * WARPS < runs)
                m.back[run + lane * WARPS] = lane == 0 ? back[0] : back[1];
        }
        ((uint2 *)m.x)[run * 32 + lane] = four[0];
        if (two) ((uint2 *)m.x)[(run + WARPS) * 32 + lane] = four[1];
    }
    if (runs % WARPS == 0) __syncwarp();
    else named_sync(1, PRODUCTS);
}

/* A lane's codes of four rows, eight apart. */
struct row_codes {
    uint32_t of[STEPS][ROWS / 8];
};

/* Of a step, from where they begin. */
__device__ __forceinline__ void load_step(row_codes &r, uint32_t from, int s)
{
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++)
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r.of[s][i]) : "r"((from ^ s << 4) + i * 8 * 128));
}

/* Where a lane's codes of a piece begin. */
template <int PIECES>
__device__ __forceinline__ uint32_t codes_at(shared<PIECES> &m, const ring_place<STAGES> &at)
{
    const int lane = threadIdx.x % 32, row = lane / 4;
    return smem_address(m.w) + at.stage * (ROWS * RUN) + row * 128 + (row << 4) + lane % 4 * 4;
}

/* A piece's, whose stage is given back. */
template <int PIECES> __device__ __forceinline__ void take_codes(shared<PIECES> &m, int piece, row_codes &r)
{
    const ring_place<STAGES> at = ring_place<STAGES>::of(piece);
    m.stages.wait_full(at);
    const uint32_t from = codes_at(m, at);
#pragma unroll
    for (int s = 0; s < STEPS; s++) load_step(r, from, s);
    give_back_by_warp(m.stages, at);
}

/* Adds the products of a piece. Once a step's codes are widened, those of the next piece take their place. */
template <typename T, bool MORE>
__device__ __forceinline__ void add_piece(float (&part)[HALVES][4], row_codes &r, const uint2 (*x)[4],
                                          uint32_t next)
{
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const uint2 b = x[s][threadIdx.x % 4];
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const uint32_t low = r.of[s][h * 2], high = r.of[s][h * 2 + 1];
            const uint32_t a[4] = {widen<T>((uint16_t)low), widen<T>((uint16_t)high),
                                   widen<T>((uint16_t)(low >> 16)), widen<T>((uint16_t)(high >> 16))};
            mma16816<T>(part[h], a, b.x, b.y);
        }
        if (MORE) load_step(r, next, s);
    }
}

/* The products of a piece, and its sums; if there are MORE, r then holds the codes of the warp's next. */
template <typename T, bool MORE, int PIECES>
__device__ __forceinline__ void sum_piece(shared<PIECES> &m, int piece, int run, row_codes &r)
{
    const int lane = threadIdx.x % 32;
    const float back = __is_same(T, bf16) ? m.back[run] : 1.0f;
    const ring_place<STAGES> next = ring_place<STAGES>::of(piece + WARPS);
    float part[HALVES][4] = {};
    if (MORE) m.stages.wait_full(next);
    const uint32_t from = codes_at(m, next);
    if (back != 0.0f) add_piece<__half, MORE>(part, r, m.x[run], from);
    else add_piece<T, MORE>(part, r, m.x[run], from);
    if (MORE) give_back_by_warp(m.stages, next);
    if (lane % 4 == 0)
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) {
            const float sum = part[i / 2][i % 2 * 2];
            m.parts[piece][i * 8 + lane / 4] = back != 0.0f ? sum * back : sum;
        }
    __syncwarp();
    if (lane < READER_ARRIVALS) m.summed.arrive(piece / WARPS);
}

/* r: the codes of the warp's first piece, if it has one; run: of that. */
template <typename T, int PIECES>
__device__ __forceinline__ void multiply(const product_params &q, shared<PIECES> &m, int run, row_codes &r)
{
    const int pieces = pieces_of(q);
    int piece = threadIdx.x / 32;
    if (piece >= pieces) return;
    for (; piece + WARPS < pieces; piece += WARPS) {
        sum_piece<T, true>(m, piece, run, r);
        run += WARPS;
        while (run >= q.runs) run -= q.runs;
    }
    sum_piece<T, false>(m, piece, run, r);
}

/* The warp that has fed, where a block has 32 columns: a lane a column adds the runs as they come. */
template <typename T, int PIECES>
__device__ __forceinline__ void add_runs_as_summed(const product_params &q, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const int lane = threadIdx.x % 32;
    const int64_t column = min(t.column + lane, q.p.out - 1), at = t.group * q.p.out + column;
    const float bias = q.p.bias.p != NULL ? q.p.bias.at(at) : 0.0f;
    float c = 0.0f;
    m.scaled.wait({0, 0});
    for (int first = 0; first < q.runs; first += WARPS) {
        float scale[WARPS];
#pragma unroll
        for (int i = 0; i < WARPS; i++) scale[i] = m.scale[min(first + i, q.runs - 1)][lane];
        m.summed.wait({first / WARPS, 0});
#pragma unroll
        for (int i = 0; i < WARPS; i++)
            if (first + i < q.runs) c = fmaf(scale[i], m.parts[first + i][lane], c);
    }
    if (t.column + lane < q.p.out) ((T *)q.p.c)[at] = from_float<T>(c + bias);
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
#pragma unroll 16
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
        m.stages.init(1, READER_ARRIVALS);
        for (int i = 0; i < PIECES / WARPS; i++)
            mbar_init(smem_address(&m.summed.of[i]),
                      max(min(pieces_of(q) - i * WARPS, (int)WARPS), 1) * READER_ARRIVALS);
        m.scaled.init(WARPS * READER_ARRIVALS);
        mbar_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= PRODUCTS) {
        if (threadIdx.x == PRODUCTS) feed(q, w, m);
        __syncwarp();
        if (q.tall == 1) add_runs_as_summed<T>(q, m);
    } else {
        row_codes r = {};
        read_scales(q, m);
        if ((int)threadIdx.x / 32 < pieces_of(q)) take_codes(m, threadIdx.x / 32, r);
        __syncwarp();
        if (threadIdx.x % 32 < READER_ARRIVALS) m.scaled.arrive(0);
        const int run = threadIdx.x / 32 % q.runs;
        read_row<T>(q, m);
        multiply<T>(q, m, run, r);
    }
    if (q.tall == 1) return;
    __syncthreads();
    for (int rows = threadIdx.x / 32; rows < q.tall; rows += ROW_THREADS / 32) add_runs<T>(q, m, rows);
#endif
}

} // namespace sm90_e4m3_row

#endif
