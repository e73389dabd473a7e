/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the block indexer on Hopper, for bf16 and f16, blocks of 64 or of multiples of 128 keys, and
 * lists of up to 64 blocks; neither scores of keys nor of blocks leave the chip.
 *
 * A persistent block is three warpgroups that compute and a warp that feeds. Each warpgroup holds 64 rows (a
 * query and one of the heads that share its keys) as the products' first operand, in registers; keys, the
 * second, are copied by TMA, 128 a step, and serve 192 rows. A step's scores become each row's maximum in
 * registers, across four lanes at a block's end, which keep the row's list. One of up to 16 blocks is sorted
 * and in registers, four a lane: a block that belongs in it moves those behind it by one place, for both rows
 * of a thread in some 50 instructions without a branch, whoever has one. In a longer one, in shared memory,
 * what beats the worst takes its place. Of equal scores the first stays. Warpgroups wait for keys alone:
 * one's maxima and lists run beside the others' products.
 *
 * Pieces of 192 rows are taken in turns that run forth and back over the blocks, the longest first, so that
 * each block has about as much to do.
 *
 * Registers at D = 128: queries 32, scores 64 of 152. Shared memory: queries 48 KB, keys 64 to 128, lists 26
 * to 100. Limit: the tensor cores; maxima take an eighth of their time in issue slots, lists a sixteenth.
 */
#ifndef QUERN_CUDA_BLOCK_INDEX_SM90_KERNEL_CUH
#define QUERN_CUDA_BLOCK_INDEX_SM90_KERNEL_CUH

#include "block_index/params.cuh"
#include "hopper/products.cuh"
#include "hopper/tma.cuh"

namespace sm90_block_index
{

enum { GROUPS = 3, ROWS = 64 * GROUPS, STEP = 128, THREADS = 128 * (GROUPS + 1), FEED = 56, COMPUTE = 152 };

/* Stages of keys beside lists of MOST blocks. */
template <int MOST> constexpr int stages_of()
{
    return MOST <= 16 ? 4 : 2;
}

template <int DK, int MOST> struct shared {
    static constexpr int STAGES = stages_of<MOST>(), LIST = MOST + 1; /* a row more: fewer bank conflicts */
    typedef uint16_t panel_row[64];
    alignas(1024) panel_row q[DK / 64][ROWS];
    alignas(1024) panel_row k[STAGES][DK / 64][STEP];
    uint64_t list[ROWS][LIST];
    ring<1> rows;
    ring<STAGES> keys;
};

struct maps {
    CUtensorMap q, k;
};

struct plan {
    int32_t total, queries; /* pieces of all sequences and heads of keys; queries of a piece */
};

struct piece {
    sequence seq;
    int64_t query; /* the first */
    int unit, steps;
};

/* The piece of a block's turn; false past the last. A varlen batch may have none at a number. */
__device__ __forceinline__ bool piece_of(const block_index_kernel &a, const plan &p, int turn, piece *x)
{
    const int at = turn % 2 == 0 ? (int)blockIdx.x : (int)(gridDim.x - 1 - blockIdx.x),
              index = turn * (int)gridDim.x + at;
    x->steps = -1;
    if (index >= p.total) return turn * (int)gridDim.x < p.total; /* turns have different ends */
    int64_t i = p.total / a.units - 1 - index / a.units;
    x->unit = index % a.units;
    if (a.sq.cu_q == NULL) { /* all sequences' last queries first */
        const int64_t tile = i / a.sq.batch;
        i = i % a.sq.batch * ((a.sq.n_q + p.queries - 1) / p.queries) + tile;
    }
    if (!piece_at(a.sq, i, p.queries, 1, &x->seq, &x->query)) return true;
    const int64_t end = x->query + p.queries < x->seq.nq ? x->query + p.queries : x->seq.nq;
    const index_contest newest = index_contest_of(a, x->seq, end - 1);
    x->steps = newest.candidates > a.k ? (newest.seen + STEP - 1) / STEP : 0;
    return true;
}

/* One thread. */
template <int DK, int MOST>
__device__ __forceinline__ void feed(const block_index_kernel &a, const plan &p, const maps &m,
                                     shared<DK, MOST> &s)
{
    piece x;
    ring_place<1> here;
    ring_place<shared<DK, MOST>::STAGES> at;
    for (int turn = 0; piece_of(a, p, turn, &x); turn++) {
        if (x.steps <= 0) continue;
        s.rows.wait_free(here);
        const uint32_t rows_full = s.rows.expect(here, (uint32_t)(DK / 64 * p.queries * a.hs * 128));
        for (int c = 0; c < DK / 64; c++)
            tma_load(stage_address(s.q, c), m.q, rows_full, c * 64, x.unit * a.hs, (int)(x.seq.q0 + x.query),
                     (int)x.seq.view_b);
        here.advance();
        for (int t = 0; t < x.steps; t++) {
            s.keys.wait_free(at);
            const uint32_t full = s.keys.expect(at, sizeof s.k[0]);
            for (int c = 0; c < DK / 64; c++)
                tma_load(stage_address(s.k, at.stage) + c * STEP * 128, m.k, full, c * 64, x.unit,
                         (int)x.seq.k0 + t * STEP, (int)x.seq.view_b);
            at.advance();
        }
    }
}

/* A row's list of up to 16 blocks, sorted, of which each of the four lanes that have its scores keeps four;
 * rank 0: none. */
struct sorted_list {
    enum { OWN = 4 };
    index_contest in;
    uint32_t rank[OWN];
    int block[OWN];
};

/* A longer one, in shared memory. Larger numbers are better. */
struct row_list {
    index_contest in;
    int n, worst;   /* blocks; the place of the worst, once the list is full */
    uint64_t least; /* the worst */
};
template <int MOST> struct list_of {
    typedef row_list type;
};
template <> struct list_of<16> {
    typedef sorted_list type;
};

/* A block takes its place; what is behind it moves by one, from lane to lane, and the last is lost. Of equal
 * ranks the first stays first. */
__device__ __forceinline__ void insert(sorted_list &r, uint32_t rank, int block)
{
    uint32_t before = __shfl_up_sync(~0u, r.rank[r.OWN - 1], 1, 4);
    int before_block = __shfl_up_sync(~0u, r.block[r.OWN - 1], 1, 4);
    bool ahead = threadIdx.x % 4 != 0 && rank > before; /* of what is before */
#pragma unroll
    for (int i = 0; i < r.OWN; i++) {
        const uint32_t here = r.rank[i];
        const int here_block = r.block[i];
        const bool better = rank > here;
        if (better) r.rank[i] = ahead ? before : rank;
        if (better) r.block[i] = ahead ? before_block : block;
        before = here;
        before_block = here_block;
        ahead = better;
    }
}

/* A block's scores of both rows in all four lanes. All lanes of the warp call. */
template <int LIST>
__device__ __forceinline__ void take_blocks(sorted_list (&r)[2], uint64_t (*)[LIST], const float (&score)[2],
                                            int block)
{
    uint32_t rank[2];
    bool better = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rank[h] = block >= r[h].in.first && block < r[h].in.local ? rank_of(score[h]) : 0;
        better = better || rank[h] > r[h].rank[r[h].OWN - 1];
    }
    if (!__any_sync(~0u, better && threadIdx.x % 4 == 3)) return;
#pragma unroll
    for (int h = 0; h < 2; h++) insert(r[h], rank[h], block);
}

__device__ __forceinline__ void begin_list(sorted_list &r)
{
#pragma unroll
    for (int i = 0; i < r.OWN; i++) {
        r.rank[i] = 0;
        r.block[i] = 0;
    }
}
__device__ __forceinline__ void begin_list(row_list &r)
{
    r.n = r.worst = 0;
    r.least = 0;
}

/* The chosen blocks, and what is behind them, as write_lists() takes them. */
template <int LIST>
__device__ __forceinline__ void end_lists(const sorted_list (&r)[2], uint64_t (*list)[LIST])
{
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < r[h].OWN; i++)
            list[h * 8][threadIdx.x % 4 * r[h].OWN + i] = (uint32_t)~r[h].block[i];
}
template <int LIST> __device__ __forceinline__ void end_lists(const row_list (&)[2], uint64_t (*)[LIST]) {}

__device__ __forceinline__ uint64_t entry_of(float score, int block)
{
    return (uint64_t)rank_of(score) << 32 | (uint32_t)~block;
}

/* The worst of a full list, by its four lanes. */
__device__ __forceinline__ void find_worst(row_list &r, const uint64_t *list, unsigned lanes)
{
    uint64_t least = ~(uint64_t)0;
    int worst = 0;
    __syncwarp(lanes);
    for (int i = threadIdx.x % 4; i < r.in.want; i += 4)
        if (list[i] < least) {
            least = list[i];
            worst = i;
        }
#pragma unroll
    for (int by = 1; by <= 2; by *= 2) {
        const uint64_t other = __shfl_xor_sync(lanes, least, by);
        const int place = __shfl_xor_sync(lanes, worst, by);
        if (other < least) {
            least = other;
            worst = place;
        }
    }
    r.least = least;
    r.worst = worst;
}

/* A block's score in all four lanes. */
__device__ __forceinline__ void take_block(row_list &r, uint64_t *list, float score, int block)
{
    const uint64_t entry = entry_of(score, block);
    const unsigned lanes = 15u << (threadIdx.x & 28);
    if (block < r.in.first || block >= r.in.local || (r.n == r.in.want && entry <= r.least)) return;
    const int place = r.n < r.in.want ? r.n++ : r.worst;
    if (threadIdx.x % 4 == 0) list[place] = entry;
    if (r.n == r.in.want) find_worst(r, list, lanes);
}

template <int LIST>
__device__ __forceinline__ void take_blocks(row_list (&r)[2], uint64_t (*list)[LIST], const float (&score)[2],
                                            int block)
{
#pragma unroll
    for (int h = 0; h < 2; h++) take_block(r[h], list[h * 8], score[h], block);
    __syncwarp();
}

/* Maxima of this lane's columns [8 FROM, 8 TO) of rows lane / 4 and that + 8. */
template <int FROM, int TO> __device__ __forceinline__ void raise(float (&most)[2], const float (&x)[16][4])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float part[4] = {x[FROM][h * 2], x[FROM][h * 2 + 1], x[FROM + 1][h * 2], x[FROM + 1][h * 2 + 1]};
#pragma unroll
        for (int i = FROM + 2; i < TO; i += 2)
#pragma unroll
            for (int c = 0; c < 4; c++) part[c] = index_most(part[c], x[i + c / 2][h * 2 + c % 2]);
        most[h] = index_most(most[h], index_most(index_most(part[0], part[1]), index_most(part[2], part[3])));
    }
}

template <typename L>
__device__ __forceinline__ void hide_unseen(float (&x)[16][4], const L (&r)[2], int first)
{
    const int column = first + (int)(threadIdx.x & 3) * 2;
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            if (column + i * 8 + (c & 1) >= r[c / 2].in.seen) x[i][c] = -INFINITY;
}

/* Ends a block of both rows. */
template <typename L, int LIST>
__device__ __forceinline__ void close_block(L (&r)[2], uint64_t (*list)[LIST], float (&most)[2], int block)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        most[h] = index_most(most[h], __shfl_xor_sync(~0u, most[h], 1));
        most[h] = index_most(most[h], __shfl_xor_sync(~0u, most[h], 2));
    }
    take_blocks(r, list, most, block);
    most[0] = most[1] = -INFINITY;
}

/* Writes the lists of a warp's 16 rows, ascending. */
template <int LIST>
__device__ __forceinline__ void write_lists(const block_index_kernel &a, const piece &x, int row0, int rows,
                                            const uint64_t (*list)[LIST])
{
    const int lane = threadIdx.x % 32;
    __syncwarp();
    for (int i = 0; i < 16 && row0 + i < rows; i++) {
        const int n = (int)quotient((uint32_t)(row0 + i), a.by_hs),
                  head = x.unit * a.hs + row0 + i - n * a.hs;
        const index_contest in = index_contest_of(a, x.seq, x.query + n);
        int32_t *const chosen = index_write_forced(a, in, x.seq.view_b, head, x.seq.q0 + x.query + n);
        for (int e = lane; e < in.want; e += 32) {
            const uint32_t own = ~(uint32_t)list[i][e];
            int before = 0;
            for (int other = 0; other < in.want; other++) before += ~(uint32_t)list[i][other] < own;
            chosen[before] = (int32_t)own;
        }
    }
    __syncwarp();
}

/* A computing warpgroup. */
template <typename T, int DK, int MOST>
__device__ __forceinline__ void compute(const block_index_kernel &a, const plan &p, shared<DK, MOST> &s,
                                        int group)
{
    const int lane = threadIdx.x & 31, row0 = group * 64 + (int)(threadIdx.x >> 5 & 3) * 16,
              row = row0 + lane / 4;
    const bool halves = a.block_size == 64;
    const int of_block = halves ? 1 : (int)(a.block_size / STEP); /* steps */
    uint64_t(*const list)[shared<DK, MOST>::LIST] = &s.list[row];
    piece w;
    ring_place<1> here;
    ring_place<shared<DK, MOST>::STAGES> at;
    for (int turn = 0; piece_of(a, p, turn, &w); turn++) {
        if (w.steps < 0) continue;
        const int64_t left = w.seq.nq - w.query;
        const int rows = (int)(left < p.queries ? left : p.queries) * a.hs;
        typename list_of<MOST>::type r[2];
        if (w.steps > 0) {
            float x[16][4], most[2] = {-INFINITY, -INFINITY};
            uint32_t q[DK / 16][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int n = (int)quotient((uint32_t)(row + h * 8), a.by_hs);
                r[h].in = index_contest_of(a, w.seq, n < p.queries ? w.query + n : w.seq.nq);
                begin_list(r[h]);
                if (r[h].in.want == 0) r[h].in.local = r[h].in.first;
            }
            s.rows.wait_full(here);
#pragma unroll
            for (int c = 0; c < DK / 16; c++) load_a<ROWS>(q[c], smem_address(s.q), row0, c * 16, lane);
            give_back_by_warp(s.rows, here);
            here.advance();
            int block = 0, open = 0; /* steps of the open block */
            for (int t = 0; t < w.steps; t++) {
                const uint32_t k = stage_address(s.k, at.stage);
                s.keys.wait_full(at);
                wg_start();
#pragma unroll
                for (int c = 0; c < DK; c += 16) {
                    const uint64_t keys = wg_tile(k + (c >> 6) * (STEP * 128) + (c & 63) * 2, 0);
                    if (c == 0) wg_rs_wide<T, STEP, false, false>(x, q[c / 16], keys);
                    else wg_rs_wide<T, STEP, true, false>(x, q[c / 16], keys);
                }
                wg_commit();
                wg_wait<0>(x);
                give_back_by_warp(s.keys, at);
                at.advance();
                const int first = t * STEP;
                if (!__all_sync(~0u, first + STEP <= r[0].in.seen && first + STEP <= r[1].in.seen))
                    hide_unseen(x, r, first);
                raise<0, 8>(most, x);
                if (halves) close_block(r, list, most, block++);
                raise<8, 16>(most, x);
                if (++open == of_block || t + 1 == w.steps) {
                    close_block(r, list, most, block++);
                    open = 0;
                }
            }
            end_lists(r, list);
        }
        write_lists(a, w, row0, rows, &s.list[row0]);
    }
}

template <typename T, int DK, int MOST>
__global__ void __launch_bounds__(THREADS, 1)
    block_index_sm90(const __grid_constant__ block_index_kernel a, const __grid_constant__ plan p,
                     const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char memory[];
    shared<DK, MOST> &s = *(shared<DK, MOST> *)memory;
    if (threadIdx.x == 0) {
        s.rows.init(1, GROUPS * 4 * READER_ARRIVALS);
        s.keys.init(1, GROUPS * 4 * READER_ARRIVALS);
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0);
    if (group == GROUPS) {
        registers_down<FEED>();
        if (threadIdx.x == GROUPS * 128) feed(a, p, m, s);
    } else {
        registers_up<COMPUTE>();
        compute<T, DK, MOST>(a, p, s, group);
    }
#endif
}

template <typename T, int DK, int MOST>
static quern_status launch(const stage_exec *exec, const block_index_args *args, const block_index_kernel &a)
{
    static_assert(sizeof(shared<DK, MOST>) <= 227 * 1024, "a block has room");
    plan p = {0, ROWS / a.hs};
    const int64_t total = piece_bound(args->seqs, p.queries, 1) * a.units;
    if (total == 0) return QUERN_OK;
    p.total = (int32_t)total;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, p.queries);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->keys, 1, STEP);
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)(total < exec->multiprocessors ? total : exec->multiprocessors);
    return launch_shared({(cudaStream_t)exec->stream, NULL}, block_index_sm90<T, DK, MOST>, dim3(blocks),
                         THREADS, sizeof(shared<DK, MOST>), "block_index", a, p, m);
}

template <typename T>
static quern_status run(const stage_exec *exec, const block_index_args *args, const block_index_kernel &a)
{
    if (a.dim <= 64) return a.k <= 16 ? launch<T, 64, 16>(exec, args, a) : launch<T, 64, 64>(exec, args, a);
    return a.k <= 16 ? launch<T, 128, 16>(exec, args, a) : launch<T, 128, 64>(exec, args, a);
}

typedef quern_status instance(const stage_exec *exec, const block_index_args *args,
                              const block_index_kernel &a);
instance block_index_bf16, block_index_f16;

} // namespace sm90_block_index

#endif
