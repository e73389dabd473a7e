/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - the block indexer on any GPU, for any dtype, block and list.
 *
 * A block of four warps owns 16 rows, each a query and one of the heads that share its keys, and walks the
 * keys, 64 a tile. It multiplies by mma.sync (16 bits) or on the f32 cores, and puts the scores in shared
 * memory. Then each warp has four rows: it takes the maximum of each block's part of the tile into that of
 * the block, and gives whole blocks, 32 at a time, to the row's list (topk.cuh). Rows whose candidates all
 * find room score nothing.
 *
 * Limit: the products at 16 bits, of which a tile's copies are not hidden; else the f32 cores.
 */
#ifndef QUERN_CUDA_BLOCK_INDEX_ANY_KERNEL_CUH
#define QUERN_CUDA_BLOCK_INDEX_ANY_KERNEL_CUH

#include "block_index/params.cuh"
#include "common/mma.cuh"

namespace any_block_index
{

enum { ROWS = 16, KEYS = 64, THREADS = 128, WARP_ROWS = ROWS / 4, ADDED = 64, SCORES_ROW = KEYS + 4 };

/* Shared memory; behind it the rows' lists, `room` ranks and indices each. */
template <typename T, int DP> struct shared {
    static constexpr bool F32 = sizeof(T) == 4;
    static constexpr int ROW = F32 ? DP + 4 : DP; /* elements of a row; 16 bits: in panels of mma.cuh */
    T q[ROWS * ROW], k[KEYS * ROW];
    float scores[ROWS * SCORES_ROW];
    static size_t bytes(int room) { return sizeof(shared) + (size_t)ROWS * room * 8; }
};

/* `rows` rows of a tile: row r comes from `at(r)`, NULL: zeros. */
template <typename T, int DP, int COUNT, typename At>
__device__ __forceinline__ void load_rows(char *tile, const At &at, int dim, bool wide)
{
    constexpr int CHUNKS = DP / 8;
    for (int i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const T *const from = at(row);
        const bool here = from != NULL && chunk * 8 < dim;
        if constexpr (shared<T, DP>::F32) {
            float *const to = (float *)tile + row * shared<T, DP>::ROW + chunk * 8;
            for (int e = 0; e < 8; e++) to[e] = here ? from[chunk * 8 + e] : 0.0f;
        } else {
            load_chunk16<T>(smem_address(tile), tile, tile_at<COUNT>(row, chunk), from + chunk * 8, here,
                            wide);
        }
    }
}

/* scores[row][key] of the tile. */
template <typename T, int DP>
__device__ __forceinline__ void multiply(const char *q, const char *k, float *scores)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if constexpr (shared<T, DP>::F32) {
        constexpr int ROW = shared<T, DP>::ROW;
        const int row = threadIdx.x / 8, key = threadIdx.x % 8;
        float sum[KEYS / 8] = {};
        for (int c = 0; c < DP; c++) {
            const float x = ((const float *)q)[row * ROW + c];
#pragma unroll
            for (int i = 0; i < KEYS / 8; i++)
                sum[i] = fmaf(x, ((const float *)k)[(key + i * 8) * ROW + c], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) scores[row * SCORES_ROW + key + i * 8] = sum[i];
    } else {
        float sum[2][4] = {};
        warp_products::nt<T, DP, 2, ROWS, KEYS>(sum, smem_address(q), 0, smem_address(k), warp * 16, lane);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                scores[(lane / 4 + c / 2 * 8) * SCORES_ROW + warp * 16 + i * 8 + lane % 4 * 2 + c % 2] =
                    sum[i][c];
    }
}

__device__ __forceinline__ float most_of_warp(float x)
{
    for (int by = 16; by > 0; by /= 2) x = index_most(x, __shfl_xor_sync(~0u, x, by));
    return x;
}

/* A warp's row while its keys go by. */
struct row_state {
    index_contest in;
    best_list best;
    float most;    /* of the open block, so far */
    uint32_t rank; /* a block a lane that waits for the list */
    int32_t index, waiting;
    float *scores; /* of the row, or NULL */
};

__device__ __forceinline__ void give_waiting(row_state &r, int room)
{
    if (r.best.n + 32 > room) best_cut(r.best, r.in.want, 0);
    best_add(r.best, (int)threadIdx.x % 32 < r.waiting, r.rank, r.index);
    r.waiting = 0;
}

/* A whole block of the row. */
__device__ __forceinline__ void take_block(row_state &r, int block, int room)
{
    if (r.scores != NULL && threadIdx.x % 32 == 0) r.scores[block] = r.most + 0.0f;
    if (block >= r.in.first && block < r.in.local && r.in.want > 0) {
        if ((int)threadIdx.x % 32 == r.waiting) {
            r.rank = rank_of(r.most);
            r.index = block;
        }
        if (++r.waiting == 32) give_waiting(r, room);
    }
    r.most = -INFINITY;
}

/* Keys [first, end) of a tile, whose scores stand from `scores` on. */
__device__ __forceinline__ void take_tile(const block_index_kernel &a, row_state &r, const float *scores,
                                          int first, int end, int room)
{
    const int lane = threadIdx.x % 32, seen = r.in.seen < end ? r.in.seen : end;
    for (int64_t from = first; from < seen;) {
        const int block = (int)(from / a.block_size);
        const int64_t whole = (block + 1) * a.block_size, to = whole < seen ? whole : seen;
        float most = -INFINITY;
        for (int64_t key = from + lane; key < to; key += 32) most = index_most(most, scores[key - first]);
        r.most = index_most(r.most, most_of_warp(most));
        if (to == whole || to == r.in.seen) take_block(r, block, room);
        from = to;
    }
}

__device__ __forceinline__ void write_row(const block_index_kernel &a, row_state &r, int64_t b, int64_t head,
                                          int64_t row, int room)
{
    if (r.waiting > 0) give_waiting(r, room);
    if (r.in.want > 0) best_cut(r.best, r.in.want, 0);
    int32_t *const chosen = index_write_forced(a, r.in, b, head, row);
    __syncwarp();
    for (int i = threadIdx.x % 32; i < r.in.want; i += 32) chosen[i] = r.best.index[i];
    for (int64_t j = r.in.candidates + threadIdx.x % 32; r.scores != NULL && j < a.width; j += 32)
        r.scores[j] = -INFINITY;
}

template <typename T, int DP>
__global__ void __launch_bounds__(THREADS)
    block_index_any(const __grid_constant__ block_index_kernel a, const int room)
{
    extern __shared__ __align__(1024) char memory[];
    shared<T, DP> &m = *(shared<T, DP> *)memory;
    char *const q = (char *)m.q, *const k = (char *)m.k;
    float *const scores = m.scores;
    uint32_t *const ranks = (uint32_t *)(&m + 1);
    const int warp = threadIdx.x / 32, unit = blockIdx.y;
    sequence seq;
    int64_t row0;
    if (!piece_at(a.sq, gridDim.x - 1 - blockIdx.x, ROWS, a.hs, &seq, &row0)) return;
    const int64_t rows = seq.nq * a.hs - row0, last = (row0 + (rows < ROWS ? rows : ROWS) - 1) / a.hs;
    const index_contest newest = index_contest_of(a, seq, last);
    const int keys = a.scores != NULL || newest.candidates > a.k ? newest.seen : 0;
    row_state state[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const int r = warp * WARP_ROWS + i;
        const int64_t query = (row0 + r) / a.hs, head = unit * a.hs + (row0 + r) % a.hs;
        state[i] = {index_contest_of(a, seq, query),
                    {ranks + r * room, (int32_t *)ranks + (ROWS + r) * room, 0, 0},
                    -INFINITY,
                    0,
                    0,
                    0,
                    NULL};
        if (a.scores != NULL)
            state[i].scores = a.scores + seq.view_b * a.scores_row[0] + head * a.scores_row[1] +
                              (seq.q0 + query) * a.scores_row[2];
    }
    load_rows<T, DP, ROWS>(
        q,
        [&](int r) -> const T * {
            if (r >= rows) return NULL;
            return (const T *)a.q.p + seq.view_b * a.q.s[0] + (seq.q0 + (row0 + r) / a.hs) * a.q.s[1] +
                   (unit * a.hs + (row0 + r) % a.hs) * a.q.s[2];
        },
        a.dim, a.wide);
    for (int first = 0; first < keys; first += KEYS) {
        load_rows<T, DP, KEYS>(
            k,
            [&](int r) -> const T * {
                if (first + r >= keys) return NULL;
                return (const T *)a.keys.p + seq.view_b * a.keys.s[0] + (seq.k0 + first + r) * a.keys.s[1] +
                       unit * a.keys.s[2];
            },
            a.dim, a.wide);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        multiply<T, DP>(q, k, scores);
        __syncthreads();
        const int end = first + KEYS < keys ? first + KEYS : keys;
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++)
            take_tile(a, state[i], scores + (warp * WARP_ROWS + i) * SCORES_ROW, first, end, room);
    }
    cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const int64_t r = row0 + warp * WARP_ROWS + i;
        if (r < seq.nq * a.hs)
            write_row(a, state[i], seq.view_b, unit * a.hs + r % a.hs, seq.q0 + r / a.hs, room);
    }
}

/* Entries that a list has room for. */
static inline int room_of(const block_index_args *args)
{
    const int64_t blocks = mask_blocks(args->seqs.n_kv, args->rule.block_size);
    return (int)(args->rule.k < blocks ? args->rule.k : blocks) + ADDED;
}

template <typename T, int DP>
static quern_status launch(const launcher &to, const block_index_args *args, const block_index_kernel &a)
{
    const int64_t groups = piece_bound(args->seqs, ROWS, a.hs);
    const int room = room_of(args);
    return launch_shared(to, block_index_any<T, DP>, dim3((unsigned)groups, (unsigned)a.units), THREADS,
                         shared<T, DP>::bytes(room), "block_index", a, room);
}

template <typename T>
static quern_status run(const launcher &to, const block_index_args *args, const block_index_kernel &a)
{
    return a.dim <= 64    ? launch<T, 64>(to, args, a)
           : a.dim <= 128 ? launch<T, 128>(to, args, a)
                          : launch<T, 256>(to, args, a);
}

typedef quern_status instance(const launcher &to, const block_index_args *args, const block_index_kernel &a);
instance block_index_f32, block_index_f16, block_index_bf16;

} // namespace any_block_index

#endif
