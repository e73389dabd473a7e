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
 * All of W is widened once x is there, for registers hold no more than a run. To f16 that is one instruction
 * for two codes, to bf16 four, 2 us of 4096 x 4096. So a run of x in bf16 becomes f16 times a power of two
 * wherever that is exact: where its numbers but zeros lie within 2^28 of each other. Its sum is divided by
 * the power, and has the bits that it has in bf16.
 *
 * The kernel may start while the one before it on the stream still runs: what is in the stages by then, the
 * codes of each warp's first piece, for which registers have room, and the scales are weights, which that one
 * does not write: all of W at 32 runs. It waits for its end before it reads x or writes c, and lets the next
 * kernel start only then, so that of two kernels before it only the last may still run.
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
    WINDOW = 12,
    HALVES = ROWS / 16,
    WARPS = 16,
    EVERY = WARPS / HALVES, /* a warp's pieces: every eighth */
    PRODUCTS = WARPS * 32,
    ROW_THREADS = PRODUCTS + 32
};
static_assert((int)STAGES % (int)EVERY == 0, "a warp waits for every use of its stages");

/* PIECES: the most that a block has. */
template <int PIECES> struct shared {
    char w[STAGES][ROWS * RUN]; /* first: tiles are aligned to 1024 bytes */
    uint2 x[PIECES][STEPS][4];  /* of the runs, which are no more */
    float parts[PIECES][ROWS], scale[PIECES][ROWS];
    float back[PIECES]; /* of a run: what its sums are multiplied by; 0: x is not in f16 */
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

/* One thread. No more than q.window pieces are under way: x would stand behind them. */
template <int PIECES>
__device__ __forceinline__ void feed(const product_params &q, const CUtensorMap &w, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const int row = (int)(t.group * q.p.out + t.column);
    ring_place<STAGES> at;
    for (int piece = 0; piece < pieces_of(q); piece++) {
        if (piece >= q.window) m.stages.wait_full(ring_place<STAGES>::of(piece - q.window));
        m.stages.wait_free(at);
        ask(q, w, m, row, piece, at);
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

enum { RUN_LANES = RUN / 8, SPAN = 28, TOP = 14, FAR = 60 };

/* Brings the largest number of a run, of whose x 16 lanes have eight elements each, into [2^TOP, 2^(TOP + 1))
 * of f16. What its sums are to be multiplied by; 0, and x as it was, where a number would be no exact and
 * normal one of f16, or a sum might leave f32's range. */
__device__ __forceinline__ float to_halves(uint4 &x)
{
    const uint32_t lanes = 0xffffu << (threadIdx.x & RUN_LANES);
    uint32_t *const word = (uint32_t *)&x;
    uint32_t most = 0, least = 0x7fff;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 32; h += 16) {
            const uint32_t size = word[i] >> h & 0x7fff;
            most = max(most, size);
            least = min(least, size == 0 ? 0x7fff : size);
        }
#pragma unroll
    for (int by = RUN_LANES / 2; by > 0; by /= 2) {
        most = max(most, __shfl_xor_sync(lanes, most, by));
        least = min(least, __shfl_xor_sync(lanes, least, by));
    }
    const int top = (int)(most >> 7) - 127, low = (int)(least >> 7) - 127;
    if (most == 0) return 1.0f;
    if (abs(top) > FAR || top - low > SPAN) return 0.0f;
    const float times = __uint_as_float((uint32_t)(127 + TOP - top) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = unpack2<bf16>(word[i]);
        word[i] = pack2<__half>(two.x * times, two.y * times);
    }
    return __uint_as_float((uint32_t)(127 - TOP + top) << 23);
}

/* The scales of the block's rows of W. */
template <int PIECES>
__device__ __forceinline__ void read_scales(const product_params &q, shared<PIECES> &m)
{
    const row_place t = row_place_here(q);
    const int64_t last = q.p.out - 1 - t.column, first = t.group * q.p.out + t.column;
    for (int i = threadIdx.x; i < pieces_of(q) * ROWS; i += PRODUCTS) {
        const int piece = i / ROWS, rows = q.tall > 1 ? piece / q.runs : 0, row = rows * ROWS + i % ROWS;
        m.scale[piece][i % ROWS] = q.p.scales.at(first + min((int64_t)row, last),
                                                 (int64_t)(piece - rows * q.runs) * RUN, q.p.status);
    }
}

/* x, once the kernel before this one has ended. */
template <typename T, int PIECES>
__device__ __forceinline__ void read_row(const product_params &q, shared<PIECES> &m)
{
    const T *const x = (const T *)q.p.a + row_place_here(q).group * q.p.in;
    wait_for_before();
    let_next_start();
    for (int i = threadIdx.x; i < q.runs * RUN_LANES; i += PRODUCTS) {
        uint4 eight = eight_of(x, (int64_t)i * 8, q.p.in, q.wide);
        if constexpr (__is_same(T, bf16)) {
            const float back = to_halves(eight);
            if (i % RUN_LANES == 0) m.back[i / RUN_LANES] = back;
        }
        ((uint4 *)m.x)[i] = eight;
    }
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

/* Adds a step's products of a warp's 16 rows. */
template <typename T>
__device__ __forceinline__ void add_step(float (&part)[4], const row_codes &r, int s, const uint2 &x)
{
    const uint32_t a[4] = {widen<T>((uint16_t)r.low[s]), widen<T>((uint16_t)r.high[s]),
                           widen<T>((uint16_t)(r.low[s] >> 16)), widen<T>((uint16_t)(r.high[s] >> 16))};
    mma16816<T>(part, a, x.x, x.y);
}

/* N of a warp's pieces, in turn: no product waits for the one before it. */
template <typename T, int N, int PIECES>
__device__ __forceinline__ void add_pieces(const shared<PIECES> &m, const row_codes *r, const int *run,
                                           float (*part)[4])
{
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int i = 0; i < N; i++) add_step<T>(part[i], r[i], s, m.x[run[i]][s][threadIdx.x % 4]);
}

/* The codes of a warp's half of a piece, whose stage is given back. */
template <int PIECES> __device__ __forceinline__ row_codes take_codes(shared<PIECES> &m, int piece)
{
    const ring_place<STAGES> at = ring_place<STAGES>::of(piece);
    m.stages.wait_full(at);
    const row_codes r = load_codes(m.w[at.stage] + threadIdx.x / 32 % HALVES * 16 * RUN);
    give_back_by_warp(m.stages, at);
    return r;
}

template <typename T, int N, int PIECES>
__device__ __forceinline__ void sum_pieces(const product_params &q, shared<PIECES> &m, int piece,
                                           const row_codes &first)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp % HALVES;
    int run[N];
    float part[N][4] = {}, back[N];
    row_codes r[N];
    bool halves = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int at = piece + i * EVERY;
        r[i] = i == 0 ? first : take_codes(m, at);
        run[i] = q.tall > 1 ? at % q.runs : at;
        back[i] = __is_same(T, bf16) ? m.back[run[i]] : 1.0f;
        halves = halves && back[i] != 0.0f;
    }
    if (halves) add_pieces<__half, N>(m, r, run, part);
    else
#pragma unroll
        for (int i = 0; i < N; i++)
            if (back[i] != 0.0f) add_pieces<__half, 1>(m, r + i, run + i, part + i);
            else add_pieces<T, 1>(m, r + i, run + i, part + i);
#pragma unroll
    for (int i = 0; i < N; i++)
        if (lane % 4 == 0) {
            float *const to = &m.parts[piece + i * EVERY][half * 16 + lane / 4];
            to[0] = back[i] != 0.0f ? part[i][0] * back[i] : part[i][0];
            to[8] = back[i] != 0.0f ? part[i][2] * back[i] : part[i][2];
        }
}

/* first: the codes of the warp's first piece, if it has one. */
template <typename T, int PIECES>
__device__ __forceinline__ void multiply(const product_params &q, shared<PIECES> &m, row_codes &first)
{
    const int pieces = pieces_of(q), start = threadIdx.x / 32 / HALVES;
    for (int piece = start; piece < pieces; piece += 2 * EVERY) {
        if (piece > start) first = take_codes(m, piece);
        if (piece + EVERY < pieces) sum_pieces<T, 2>(q, m, piece, first);
        else sum_pieces<T, 1>(q, m, piece, first);
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
    if (threadIdx.x >= PRODUCTS) {
        if (threadIdx.x == PRODUCTS) feed(q, w, m);
        __syncwarp();
    } else {
        row_codes first = {};
        read_scales(q, m);
        if ((int)threadIdx.x / 32 / HALVES < pieces_of(q)) first = take_codes(m, threadIdx.x / 32 / HALVES);
        read_row<T>(q, m);
        multiply<T>(q, m, first);
    }
    __syncthreads();
    if ((int)threadIdx.x / 32 < q.tall) add_runs<T>(q, m, threadIdx.x / 32);
#endif
}

} // namespace sm90_e4m3_row

#endif
