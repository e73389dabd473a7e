/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dq_sums.cuh - dQ's f32 sums in workspace: one tile of SM90_BACKWARD_ROWS queries after another, and of each
 * tile one head after another. A tile lies there as 128 threads hold it in wgmma's accumulators: for every
 * eight columns four values a thread, thread after thread. So they write it to shared memory 16 bytes at a
 * time without bank conflicts, and one bulk copy adds it.
 *
 * Blocks of threads without keys store the sums in d_q as tiles become whole, and 0 where no keys came: warps
 * copy them in bulk to rings in shared memory, warpgroups empty these. A multiprocessor reads 71 GB/s so, and
 * 52 beside the products; limit: the copy rate. */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_DQ_SUMS_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_DQ_SUMS_CUH

#include "attend/attend.cuh"
#include "hopper/ring.cuh"
#include "common/mma.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90/attend.cuh"

namespace sm90_backward
{

/* Key/value heads whose keys are taken beside each other. */
enum { KEY_SECTION = 8 };

/* The first tile of a sequence. */
__device__ __forceinline__ int first_tile(const seqs &s, const sequence &seq)
{
    if (s.cu_q != NULL) return (int)(seq.q0 / SM90_BACKWARD_ROWS + seq.b);
    return (int)(seq.b * ((s.n_q + SM90_BACKWARD_ROWS - 1) / SM90_BACKWARD_ROWS));
}

/* Where the sums of a tile and head begin; dim: padded. */
__device__ __forceinline__ int64_t sums_at(int tile, int head, int heads, int dim)
{
    return ((int64_t)tile * heads + head) * (SM90_BACKWARD_ROWS * dim);
}

/* Where in a tile the values of columns 8 i to 8 i + 7 begin. */
__device__ __forceinline__ int held_at(int i)
{
    return i * (128 * 4);
}

/* What a turn's counter holds at least once all keys that its tile's rows see have been added. */
enum { SUMS_WHOLE = 1 << 30 };

/* What is added instead where the one block of keys that comes to a tile stores it in d_q. */
enum { TILE_STORED = SUMS_WHOLE | 1 << 29 };

/* Warps of a block that add. */
enum { ADDERS = 2 };

/* A tile of a head in d_q. */
template <typename T> struct stored_tile {
    T *to;               /* its first row */
    const float *sums;   /* NULL: there is no such tile */
    const int32_t *turn; /* its counter */
    int32_t rows;
};

/* The sequence of a tile, and the tile's first query there; false where there is none. */
__device__ __forceinline__ bool find_tile(const seqs &s, int tile, sequence *seq, int *query)
{
    int b = tile / (int)((s.n_q + SM90_BACKWARD_ROWS - 1) / SM90_BACKWARD_ROWS);
    if (s.cu_q != NULL) {
        int end = (int)s.batch; /* of the sequences that may be the last to begin at or before the tile */
        for (b = 0; end - b > 1;) {
            const int mid = (b + end) / 2;
            if (first_tile(s, sequence_at(s, mid)) <= tile) b = mid;
            else end = mid;
        }
    }
    if (b >= s.batch) return false;
    *seq = sequence_at(s, b);
    *query = (tile - first_tile(s, *seq)) * SM90_BACKWARD_ROWS;
    return *query < seq->nq;
}

/* What a block is to do: a number below plan.blocks names keys, any other says to store d_q. A whole warp
 * calls. Of the blocks that store from the start none may wait where all that run do, since blocks of keys
 * would find no room then: they do so only if half a GPU of blocks runs before them and none has ended. */
__device__ __forceinline__ int take_ticket(const sm90_backward_plan &plan)
{
    if (plan.taken == NULL) return (int)blockIdx.x;
    int ticket = plan.blocks;
    if ((threadIdx.x & 31) == 0 &&
        (blockIdx.x - plan.beside_from >= plan.beside || load_acquire(plan.done) > 0))
        ticket = atomicAdd(plan.taken, 1);
    return __shfl_sync(~0u, ticket, 0);
}

/* Number `i` of a launch's tiles of heads, about in the order in which they become whole. A tile's heads
 * follow one another, so that rows of d_q are stored as they lie. */
template <typename T, int DIM>
__device__ __forceinline__ stored_tile<T> find_stored(const attend_kernel &a, const sm90_backward_plan &plan,
                                                      int i)
{
    const bool listed = plan.lists.clean != NULL;
    const int together = listed ? 1 : KEY_SECTION, kv0 = i / (plan.tiles * together * a.group) * together,
              heads = min(plan.kv_heads - kv0, together) * a.group,
              in_section = i - kv0 * a.group * plan.tiles, at = in_section / heads,
              to_head = kv0 * a.group + in_section - at * heads, head = plan.kv0 * a.group + to_head,
              tile = listed || a.splits > 1 ? plan.tiles - 1 - at : at;
    stored_tile<T> found = {};
    sequence seq;
    int query;
    if (i >= plan.tiles * plan.kv_heads * a.group || !find_tile(a.sq, tile, &seq, &query)) return found;
    found.turn = plan.turns + (int64_t)head * plan.tiles + tile;
    found.to = (T *)a.d_q.p + seq.view_b * a.d_q.s[0] + (seq.q0 + query) * a.d_q.s[1] + head * a.d_q.s[2];
    found.sums = plan.sums + sums_at(tile, to_head, plan.kv_heads * a.group, DIM);
    found.rows = (int)seq.nq - query;
    return found;
}

/* What a slot of a ring holds. */
struct stored_rows {
    void *to;       /* the first row in d_q */
    int32_t rows;   /* 0: no tile; < 0: the last slot */
    int32_t unseen; /* no sums: no keys came to the tile */
};

/* Shared memory of a block that stores d_q. Each pair of a warp that fetches and a warpgroup that stores has
 * a ring of tiles. */
template <int DIM, int PAIRS> struct store_memory {
    enum { SLOTS = (DIM > 128 ? 4 : 6) / PAIRS };
    float tile[PAIRS * SLOTS][SM90_BACKWARD_ROWS * DIM];
    uint64_t full[PAIRS * SLOTS], free[PAIRS * SLOTS];
    stored_rows of[PAIRS * SLOTS];
};

/* Offsets into it. */
template <int DIM, int PAIRS> struct store_ring {
    typedef store_memory<DIM, PAIRS> memory;
    static constexpr int SLOTS = memory::SLOTS, TILE = sizeof(memory::tile[0]), OF = offsetof(memory, of),
                         BYTES = sizeof(memory);
    typedef ring_place<PAIRS * SLOTS> place;
    typedef barriers_at<offsetof(memory, full), PAIRS * SLOTS> full;
    typedef barriers_at<offsetof(memory, free), PAIRS * SLOTS> free;
    /* The place of a pair's use number `use`. */
    static __device__ __forceinline__ place of(int pair, int use)
    {
        const auto within = ring_place<SLOTS>::of(use);
        return {pair * SLOTS + within.stage, within.parity};
    }
};

/* A warp copies tiles that nobody has taken yet into its ring, as they become whole. It takes up to TOGETHER
 * at once, a lane each, so that they wait for memory at the same time. */
template <typename T, int DIM, int PAIRS>
__device__ __forceinline__ void fetch_sums(const attend_kernel &a, const sm90_backward_plan &plan, char *smem,
                                           uint32_t base, int pair)
{
    typedef store_ring<DIM, PAIRS> ring;
    constexpr int TOGETHER = 8;
    const int all = plan.tiles * plan.kv_heads * a.group, lane = threadIdx.x & 31,
              together = min(TOGETHER, all / (PAIRS * (int)plan.behind) + 1);
    stored_rows *const of = (stored_rows *)(smem + ring::OF);
    int next = lane == 0 ? atomicAdd(plan.stored, together) : 0;
    for (int k = 0;; k += together) {
        const int ticket = __shfl_sync(~0u, next, 0) + lane;
        if (lane == 0) next = atomicAdd(plan.stored, together);
        stored_tile<T> tile = {};
        tile.rows = -1;
        int32_t turn = TILE_STORED;
        if (lane < together && ticket < all) {
            tile = find_stored<T, DIM>(a, plan, ticket);
            if (tile.sums != NULL) turn = load_acquire(tile.turn);
        }
        for (int i = 0; i < together; i++) {
            if (lane == i) {
                /* All blocks have added theirs: no keys came to the tile. */
                for (bool done = false; turn < SUMS_WHOLE && !done;) {
                    done = load_acquire(plan.done) >= ADDERS * plan.blocks;
                    turn = load_acquire(tile.turn);
                    if (!done) __nanosleep(100);
                }
                const bool unseen = turn == 0, stored = turn >= TILE_STORED;
                const auto at = ring::of(pair, k + i);
                const uint32_t full = ring::full::barrier(base, at);
                const int slot = at.stage;
                ring::free::wait_before(base, at);
                of[slot].to = tile.to;
                of[slot].rows = stored && tile.rows > 0 ? 0 : tile.rows;
                of[slot].unseen = unseen;
                if (unseen || stored) {
                    ring::full::arrive(base, at);
                } else {
                    async_fence_global();
                    ring::full::expect(base, at, ring::TILE);
                    bulk_load(base + slot * ring::TILE, tile.sums, ring::TILE, full);
                }
            }
            if (__shfl_sync(~0u, tile.rows, i) < 0) return;
        }
    }
}

/* Stores what a thread has of a tile of `rows` rows: x[h][i] is two columns, of the i-th eight after eight
 * `at`, of row `row` + 8 h. Four neighbours exchange theirs, so that each stores eight that follow one
 * another. */
template <typename T, int EIGHTS>
__device__ __forceinline__ void store_eights(const uint32_t (&x)[2][EIGHTS], T *to, int at, int row, int rows,
                                             const attend_kernel &a, bool wide)
{
#pragma unroll
    for (int i = 0; i < EIGHTS; i += 4) {
        const int column = (at + i + (threadIdx.x & 3)) * 8;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t y[4] = {x[h][i], x[h][i + 1], x[h][i + 2], x[h][i + 3]};
            transpose_by_four(y);
            if (column < a.dim_k && row + h * 8 < rows)
                store_eight(to + (row + h * 8) * a.d_q.s[1] + column, y, wide);
        }
    }
}

/* A warpgroup stores what comes to its ring, half of the columns at a time. */
template <typename T, int DIM, int PAIRS>
__device__ __forceinline__ void store_sums(const attend_kernel &a, const sm90_backward_plan &plan,
                                           const char *smem, uint32_t base, int pair)
{
    typedef store_ring<DIM, PAIRS> ring;
    const int thread = threadIdx.x & 127, lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    const stored_rows *const of = (const stored_rows *)(smem + ring::OF);
    for (int k = 0;; k++) {
        const auto at = ring::of(pair, k);
        const int slot = at.stage;
        ring::full::wait(base, at);
        const stored_rows tile = of[slot];
        if (tile.rows < 0) break;
        const float *held = (const float *)(smem + slot * ring::TILE) + thread * 4;
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            constexpr int EIGHTS = DIM / 16;
            uint32_t x[2][EIGHTS];
#pragma unroll
            for (int i = 0; i < EIGHTS; i++) {
                const float4 v = *(const float4 *)(held + held_at(half * EIGHTS + i));
                /* A zero's sign may come from a row that is not seen. */
                x[0][i] = tile.unseen ? 0 : pack2<T>(v.x + 0.0f, v.y + 0.0f);
                x[1][i] = tile.unseen ? 0 : pack2<T>(v.z + 0.0f, v.w + 0.0f);
            }
            if (half == 1) ring::free::arrive(base, at);
            store_eights(x, (T *)tile.to, half * EIGHTS, row, tile.rows, a, plan.wide);
        }
    }
}

/* What a block does that owns no keys. */
template <typename T, int DIM, int PAIRS>
__device__ __forceinline__ void store_tiles(const attend_kernel &a, const sm90_backward_plan &plan,
                                            char *smem, uint32_t base)
{
    typedef store_ring<DIM, PAIRS> ring;
    if (threadIdx.x == 0) {
        for (int i = 0; i < PAIRS * ring::SLOTS; i++) {
            ring::full::init(base, i, 1);
            ring::free::init(base, i, 128);
        }
        mbar_init_done();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group > 0) store_sums<T, DIM, PAIRS>(a, plan, smem, base, group - 1);
    else if (warp < PAIRS) fetch_sums<T, DIM, PAIRS>(a, plan, smem, base, warp);
}

} // namespace sm90_backward

#endif
