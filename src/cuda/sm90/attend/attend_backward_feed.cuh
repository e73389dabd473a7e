/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_backward_feed.cuh - the feeding warpgroup of attend_backward.cuh: which keys a block owns, what it
 * copies, and how it adds to dQ. */
#ifndef QUERN_CUDA_SM90_ATTEND_BACKWARD_FEED_CUH
#define QUERN_CUDA_SM90_ATTEND_BACKWARD_FEED_CUH

#include "any/attend/attend_backward.cuh"
#include "common/barrier.cuh"
#include "common/tma.cuh"
#include "sm90/attend/attend.cuh"

namespace sm90_backward
{

enum {
    STAGES = 2,
    GROUPS = 2,
    KEYS = 64 * GROUPS,
    ROWS = SM90_BACKWARD_ROWS,
    BUFFERS = 2,
    FEED = 40,
    COMPUTE = 232
};
enum { CLEANING = 1, DS_FULL = 2, DQ_FULL = 4 }; /* named barriers: one; of each group; of each buffer */

struct maps {
    CUtensorMap q, d_o, k, v, d_q;
};

/* Of the rows of a stage. lse2: times log2 e, +inf where a row sees nothing. */
struct statistics {
    float lse2[ROWS], delta[ROWS], row_scale[ROWS];
    int32_t lo[ROWS], hi[ROWS];
    int32_t part; /* some rows do not see all keys: 1; and something in them is not finite: 3 */
    int32_t pad[3];
};

/* The keys of a block, and its share of the tiles of queries that see them. */
struct key_block {
    int32_t view, q0, nq, k0, nk;
    int32_t kvh, head0;
    int32_t place, key0, key_end; /* which block of its sequence; its keys */
    int32_t tile, tiles;          /* the first tile, and how many */
    int32_t turns;                /* the counter of the sequence's first tile */
    int32_t up;                   /* whether it walks the tiles from the first */
    int32_t odd;                  /* something in K is not finite */
    int32_t pad;
    int64_t slot; /* of the partial sums */
};

__device__ __forceinline__ sequence sequence_of(const key_block &b)
{
    return {0, b.view, b.q0, b.nq, b.k0, b.nk};
}

/* Offsets into shared memory. */
template <int DK, int DV> struct layout {
    static constexpr int Q_BYTES = ROWS * DK * 2, DO_BYTES = ROWS * DV * 2, DS_BYTES = KEYS * ROWS * 2,
                         DQ_BYTES = ROWS * DK * 4;
    static constexpr int K = 0, V = K + KEYS * DK * 2, Q = V + KEYS * DV * 2, DO = Q + STAGES * Q_BYTES,
                         DS = DO + STAGES * DO_BYTES;
    static constexpr int DQ = DS + BUFFERS * DS_BYTES, STAT = DQ + BUFFERS * DQ_BYTES,
                         BARS = STAT + STAGES * (int)sizeof(statistics);
    static constexpr int OWN_FULL = BARS, FULL = OWN_FULL + 8, FREE = FULL + 8 * STAGES,
                         STAT_FULL = FREE + 8 * STAGES;
    static constexpr int DQ_FREE = STAT_FULL + 8 * STAGES, BLOCK = DQ_FREE + 8 * BUFFERS;
    static constexpr int BYTES = BLOCK + (int)sizeof(key_block);
    static_assert(BYTES <= 227 * 1024 && BLOCK % 8 == 0, "more than a block can have");
};

/* Takes a ticket and finds what it is for; one thread calls. Tickets go through sections of SECTION key/value
 * heads, whose rows L2 serves to many blocks at once; in a section through the shares of the rows; in a share
 * through the keys of all heads, from the first to the last. */
__device__ __forceinline__ bool find_keys(const attend_kernel &a, const sm90_backward_plan &plan,
                                          key_block *b)
{
    constexpr int SECTION = 8;
    const int ticket = atomicAdd(plan.taken, 1), per_head = plan.pieces * a.splits;
    const int unit0 = ticket / (per_head * SECTION) * SECTION,
              width = plan.kv_heads - unit0 < SECTION ? plan.kv_heads - unit0 : SECTION;
    const int in_section = ticket - unit0 * per_head, share = in_section / (plan.pieces * width),
              rest = in_section - share * plan.pieces * width;
    const int split = a.splits - 1 - share, piece = rest / width;
    sequence flipped;
    int64_t key0;
    if (!piece_at(by_key(a.sq), piece, KEYS, 1, &flipped, &key0)) return false;
    const sequence seq = flip(flipped);
    b->view = (int)seq.view_b;
    b->q0 = (int)seq.q0;
    b->nq = (int)seq.nq;
    b->k0 = (int)seq.k0;
    b->nk = (int)seq.nk;
    b->kvh = plan.kv0 + unit0 + rest - piece * width;
    b->head0 = b->kvh * a.group;
    b->key0 = (int)key0;
    b->place = b->key0 / KEYS;
    b->key_end = (int)(key0 + KEYS < seq.nk ? key0 + KEYS : seq.nk);
    b->slot = ((int64_t)b->kvh * plan.pieces + piece) * a.splits + split;
    b->odd = 0;
    b->up = in_section / plan.wave & 1;
    const int tiles = (b->nq + ROWS - 1) / ROWS, per = (tiles + a.splits - 1) / a.splits;
    b->turns = a.sq.cu_q == NULL ? (int)seq.b * tiles : b->q0 / ROWS + (int)seq.b;
    /* Whatever the mask, the blocks that walk a tile are consecutive: its turns count from the first of them.
     */
    int lo, hi;
    const int qa = first_query(b->nq, [&](int64_t i) {
        row_keys(a, seq, i, &lo, &hi);
        return hi > b->key0;
    });
    const int qb = first_query(b->nq, [&](int64_t i) {
        row_keys(a, seq, i, &lo, &hi);
        return lo >= b->key_end;
    });
    int first = qa < b->nq ? qa / ROWS : tiles, end = (qb + ROWS - 1) / ROWS;
    if (first < per * split) first = per * split;
    if (end > per * (split + 1)) end = per * (split + 1);
    b->tile = first;
    b->tiles = end > first ? end - first : 0;
    return true;
}

/* The tile and head of step t. */
__device__ __forceinline__ int tile_at_step(const attend_kernel &a, const sm90_backward_plan &plan,
                                            const key_block &b, int t, int *head)
{
    int x = (int)quotient((uint32_t)t, a.by_hs), h = t - x * a.hs;
    if (plan.head_first) {
        h = t / b.tiles;
        x = t - h * b.tiles;
    }
    *head = b.head0 + h;
    return b.tile + (b.up ? x : b.tiles - 1 - x);
}

/* Warp 0 of the feeder: one thread copies. */
template <int DK, int DV>
__device__ __forceinline__ void feed(const attend_kernel &a, const sm90_backward_plan &plan,
                                     const key_block &b, const maps &m, uint32_t base)
{
    typedef layout<DK, DV> at;
    const int steps = b.tiles * a.hs;
    if ((threadIdx.x & 31) != 0 || steps == 0) return;
    const int key = b.k0 + b.key0;
    mbar_expect(base + at::OWN_FULL, KEYS * (DK + DV) * 2);
#pragma unroll
    for (int p = 0; p < DK / 64; p++)
        tma_load(base + at::K + p * KEYS * 128, m.k, base + at::OWN_FULL, p * 64, b.kvh, key, b.view);
#pragma unroll
    for (int p = 0; p < DV / 64; p++)
        tma_load(base + at::V + p * KEYS * 128, m.v, base + at::OWN_FULL, p * 64, b.kvh, key, b.view);
    for (int t = 0; t < steps; t++) {
        const int stage = t % STAGES;
        int head;
        const int query = b.q0 + tile_at_step(a, plan, b, t, &head) * ROWS;
        const uint32_t full = base + at::FULL + 8 * stage;
        mbar_wait(base + at::FREE + 8 * stage, (t / STAGES & 1) ^ 1);
        mbar_expect(full, at::Q_BYTES + at::DO_BYTES);
#pragma unroll
        for (int p = 0; p < DK / 64; p++)
            tma_load(base + at::Q + stage * at::Q_BYTES + p * ROWS * 128, m.q, full, p * 64, head, query,
                     b.view);
#pragma unroll
        for (int p = 0; p < DV / 64; p++)
            tma_load(base + at::DO + stage * at::DO_BYTES + p * ROWS * 128, m.d_o, full, p * 64, head, query,
                     b.view);
    }
}

/* Whether something in a row of a tile is not finite. The order of its chunks keeps the lanes on different
 * banks. */
template <typename T, int PANELS> __device__ __forceinline__ bool row_nonfinite(const char *tile, int row)
{
    constexpr uint32_t INFINITE =
        __is_same(T, bf16) ? 0x7f80 : 0x7c00; /* the least bits of what is not finite */
    uint32_t most = 0;
    for (int p = 0; p < PANELS; p++)
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const uint4 v = *(const uint4 *)(tile + p * ROWS * 128 + row * 128 + ((c ^ (row & 7)) << 4));
            most = __vmaxu2(most, __vmaxu2(__vmaxu2(v.x & 0x7fff7fff, v.y & 0x7fff7fff),
                                           __vmaxu2(v.z & 0x7fff7fff, v.w & 0x7fff7fff)));
        }
    return (most & 0xffff) >= INFINITE || most >> 16 >= INFINITE;
}

/* Warp 1 of the feeder: a lane has rows lane and lane + 32 of each stage. */
template <typename T, int DK, int DV>
__device__ __forceinline__ void fetch_statistics(const attend_kernel &a, const sm90_backward_plan &plan,
                                                 const key_block &b, char *smem, uint32_t base)
{
    typedef layout<DK, DV> at;
    const int lane = threadIdx.x & 31, steps = b.tiles * a.hs;
    for (int t = 0; t < steps; t++) {
        const int stage = t % STAGES;
        statistics *st = (statistics *)(smem + at::STAT) + stage;
        int head;
        const int query = tile_at_step(a, plan, b, t, &head) * ROWS;
        bool part[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = lane + i * 32, n = query + row;
            int lo = 0, hi = 0;
            float lse2 = INFINITY, delta = 0.0f, row_scale = 1.0f;
            if (n < b.nq) {
                row_statistics(a, sequence_of(b), b.q0 + n, head, &lse2, &delta, &row_scale);
                if (lse2 != INFINITY) row_keys(a, sequence_of(b), n, &lo, &hi);
            }
            part[i] = lo > b.key0 || hi < b.key0 + KEYS; /* so that keys past the last are hidden */
            if (i == 0) mbar_wait(base + at::FREE + 8 * stage, (t / STAGES & 1) ^ 1);
            st->lse2[row] = lse2;
            st->delta[row] = delta;
            st->row_scale[row] = row_scale;
            st->lo[row] = lo;
            st->hi[row] = hi;
        }
        bool odd = false;
        if (__any_sync(~0u, part[0] || part[1])) {
            mbar_wait(base + at::FULL + 8 * stage, t / STAGES & 1);
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (part[i])
                    odd = odd ||
                          row_nonfinite<T, DK / 64>(smem + at::Q + stage * at::Q_BYTES, lane + i * 32) ||
                          row_nonfinite<T, DV / 64>(smem + at::DO + stage * at::DO_BYTES, lane + i * 32);
        }
        const int found = (__any_sync(~0u, part[0] || part[1]) ? 1 : 0) | (__any_sync(~0u, odd) ? 2 : 0);
        if (lane == 0) st->part = found;
        mbar_arrive(base + at::STAT_FULL + 8 * stage); /* each lane's, for what it wrote */
    }
}

/* Warps 2 and 3 of the feeder, one for each buffer: one thread adds dQ of every second step when its turn
 * comes. */
template <int DK, int DV>
__device__ __forceinline__ void add_rows(const attend_kernel &a, const sm90_backward_plan &plan,
                                         const key_block &b, const maps &m, uint32_t base, int buffer)
{
    typedef layout<DK, DV> at;
    const int steps = b.tiles * a.hs;
    for (int t = buffer; t < steps; t += BUFFERS) {
        int head, lo, hi;
        const int tile = tile_at_step(a, plan, b, t, &head);
        int32_t *turn = plan.turns + (int64_t)head * plan.tiles + b.turns + tile;
        if ((threadIdx.x & 31) == 0) {
            row_keys(a, sequence_of(b), tile * ROWS, &lo, &hi);
            const int before = b.place - lo / KEYS;
            while (load_acquire(turn) < before) {
            }
        }
        __syncwarp();
        named_sync(DQ_FULL + buffer, 128 * GROUPS + 32);
        if ((threadIdx.x & 31) == 0) {
#pragma unroll
            for (int p = 0; p < DK / 32; p++)
                if (p * 32 < a.dim_k)
                    tma_add(m.d_q, base + at::DQ + buffer * at::DQ_BYTES + p * ROWS * 128, p * 32,
                            head - plan.kv0 * a.group, b.q0 + tile * ROWS, b.view);
            tma_commit();
            tma_wait_read();
            mbar_arrive(base + at::DQ_FREE + 8 * buffer);
            tma_wait_written();
            add_release(turn, 1);
        }
    }
}

} // namespace sm90_backward

#endif
