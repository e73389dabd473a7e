/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the feeding warpgroup of the backward's kernels that own keys
 * (kernel.cuh and sm90_dq_dkv/dkv.cuh): which keys a block owns, what it copies, and how it
 * adds to dQ. AT is a kernel's layout of shared memory. */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_FEED_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_FEED_CUH

#include "attend/backward/params.cuh"
#include "hopper/nonfinite.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "attend/sm90_backward/dq_sums.cuh"

namespace sm90_backward
{

enum { GROUPS = 2, MOST_ROWS = SM90_BACKWARD_ROWS, MOST_KEYS = 128, RUN = 16 };
/* Named barriers: one; of dQ of each adding warp; of each buffer of dS, or, where warpgroups hand it to each
 * other, of each warpgroup. */
enum { CLEANING = 1, DQ_FULL = 2, DS_FULL = 4 };

struct maps {
    CUtensorMap q, d_o, k, v, d_q;
};

/* Of the rows of a stage, with AT::FOURS each at place_of_row(). lse2: times log2 e, +inf where a row sees
 * nothing. */
struct alignas(16) statistics {
    float lse2[MOST_ROWS], delta[MOST_ROWS], row_scale[MOST_ROWS];
    int32_t part;        /* some rows do not see all keys: 1; and something in them is not finite: 3 */
    int32_t next_halves; /* halves_seen() of the step behind this one */
    uint32_t empty[2];   /* rows that see nothing, by their lse or as there are none: a bit each */
    int32_t query;       /* the first row's */
    int32_t pad[3];
};

/* Rows 2 c and 2 c + 1 of a tile of eight, and those of the next tile, follow one another: a thread loads
 * these four at once. */
__device__ __forceinline__ int place_of_row(int row)
{
    return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1);
}

/* The keys of a block, and its share of the tiles of queries that see them. */
struct key_block {
    int32_t view, q0, nq, k0, nk;
    int32_t kvh, head0;
    int32_t place, key0, key_end;      /* which block of its sequence; its keys */
    int32_t tile, tiles;               /* the first tile, and how many */
    int32_t turns;                     /* the counter of the sequence's first tile */
    int32_t up;                        /* whether it walks the tiles from the first */
    int32_t nonfinite;                 /* something in K is not finite */
    int32_t whole_first, whole_end;    /* the queries that see all of its keys */
    int32_t half_tile[2], half_end[2]; /* of each half of the keys: the tiles whose rows may see some of it */
    int32_t first[MOST_KEYS / RUN];    /* the first key of each run of RUN that follow one another */
    int32_t last_end;                  /* no later block of keys comes to the tiles before this one */
    int32_t stores;                    /* without tiles: it stores d_q */
    int32_t alone_end;                 /* no other block of keys comes to the tiles before this one */
    int64_t slot;                      /* of the partial sums */
    const float *lse, *delta, *row_scale; /* of the sequence's first row of head 0 */
};

/* Key `place` of a block. */
__device__ __forceinline__ int key_of(const key_block &b, int place)
{
    return b.first[place / RUN] + place % RUN;
}

__device__ __forceinline__ sequence sequence_of(const key_block &b)
{
    return {0, b.view, b.q0, b.nq, b.k0, b.nk};
}

__device__ __forceinline__ void enter_sequence(const attend_kernel &a, const sequence &seq, key_block *b)
{
    b->view = (int)seq.view_b;
    b->q0 = (int)seq.q0;
    b->nq = (int)seq.nq;
    b->k0 = (int)seq.k0;
    b->nk = (int)seq.nk;
    b->turns = first_tile(a.sq, seq);
    b->lse = a.lse.p + seq.view_b * a.lse.s[0] + seq.q0 * a.lse.s[2];
    b->delta = a.delta.p + seq.view_b * a.delta.s[0] + seq.q0 * a.delta.s[2];
    b->row_scale = NULL;
    if (a.row_scale.p != NULL)
        b->row_scale = a.row_scale.p + seq.view_b * a.row_scale.s[0] + seq.q0 * a.row_scale.s[2];
}

/* Finds the queries that see all keys from `first` to `last`. */
__device__ __forceinline__ void find_whole(const attend_kernel &a, const sequence &seq, int first, int last,
                                           key_block *b)
{
    int other_first, other_end;
    key_queries(a, seq, first, &other_first, &b->whole_end);
    key_queries(a, seq, last, &b->whole_first, &other_end);
    b->whole_first = max(b->whole_first, other_first);
    b->whole_end = min(b->whole_end, other_end);
}

/* Fills in what is ticket `ticket` of lists: the blocks of threads of a list follow one another, since they
 * read the same rows and add to the same dQ; the last tiles, with the longest lists, come first. False where
 * there is no such list, or nothing left of it. */
template <int KEYS, int ROWS>
__device__ __forceinline__ bool find_listed(const attend_kernel &a, const sm90_backward_plan &plan,
                                            int ticket, key_block *b)
{
    enum { NO_KEY = INT32_MAX - KEYS }; /* of slots past the list: no row sees it */
    const sm90_lists &lists = plan.lists;
    const int per_head = lists.rows * lists.per, head = ticket / per_head, in_head = ticket - head * per_head,
              row = lists.rows - 1 - in_head / lists.per, at = lists.row0 + row, view = at / lists.view_rows,
              view_row = at - view * lists.view_rows;
    sequence seq;
    int64_t query = (int64_t)view_row * a.tile;
    if (a.sq.cu_q == NULL) {
        seq = sequence_at(a.sq, view);
        if (query >= seq.nq) return false;
    } else if (!piece_at(a.sq, view_row, a.tile, 1, &seq, &query)) {
        return false;
    }
    b->kvh = plan.kv0 + head;
    b->place = in_head % lists.per;
    const int32_t *list = lists.clean + ((int64_t)b->kvh * lists.all_rows + at) * a.list_k;
    int end = 0;
    for (int i = 0; i < KEYS / RUN; i++) {
        const int slot = b->place * KEYS + i * RUN, e = (int)quotient((uint32_t)slot, a.by_block);
        const int32_t block = e < a.list_k ? list[e] : -1;
        b->first[i] = block < 0 ? NO_KEY : block * a.list_block + (slot - e * a.list_block);
        if (b->first[i] + RUN > end) end = b->first[i] + RUN;
    }
    /* An empty list has a block only where d_q has the sums and nobody clears it: the block stores 0. */
    if (b->first[0] == NO_KEY && (b->place > 0 || plan.sums != NULL || !plan.fresh)) return false;
    const int next = (int)quotient((uint32_t)(b->place + 1) * KEYS, a.by_block);
    b->last_end = next < a.list_k && list[next] >= 0 ? 0 : INT32_MAX;
    b->alone_end = b->place == 0 && plan.sums != NULL ? b->last_end : 0;
    enter_sequence(a, seq, b);
    b->head0 = b->kvh * a.group;
    b->key0 = b->first[0];
    b->key_end = b->nk;
    find_whole(a, seq, 0, end - 1, b);
    b->slot = ((int64_t)head * lists.rows + row) * lists.per + b->place;
    b->nonfinite = 0;
    b->up = 1;
    b->half_tile[0] = b->half_tile[1] = 0;
    b->half_end[0] = b->half_end[1] = INT32_MAX;
    const int last = query + a.tile < b->nq ? (int)query + a.tile : b->nq;
    b->tile = (int)query / ROWS;
    b->tiles = (last + ROWS - 1) / ROWS - b->tile;
    return true;
}

/* The queries [first, end) that see a thread's keys `key` and that + 8. */
struct key_rows {
    int first[2], end[2];
};

__device__ __forceinline__ key_rows find_key_rows(const attend_kernel &a, const sequence &seq, int key)
{
    key_rows r;
#pragma unroll
    for (int h = 0; h < 2; h++) key_queries(a, seq, key + h * 8, &r.first[h], &r.end[h]);
    return r;
}

/* Finds what a ticket is for, a piece of KEYS keys; a whole warp calls. Tickets go through sections of
 * KEY_SECTION key/value heads, whose rows L2 serves to many blocks at once; in a section through the shares
 * of the rows; in a share through the keys of all heads, from the first to the last. */
template <int KEYS, int ROWS>
__device__ __forceinline__ bool find_keys(const attend_kernel &a, const sm90_backward_plan &plan, int ticket,
                                          key_block *b)
{
    const int lane = threadIdx.x & 31, per_head = plan.pieces * a.splits;
    if (plan.lists.clean != NULL)
        return __shfl_sync(~0u, lane == 0 && find_listed<KEYS, ROWS>(a, plan, ticket, b), 0);
    const int unit0 = ticket / (per_head * KEY_SECTION) * KEY_SECTION,
              width = plan.kv_heads - unit0 < KEY_SECTION ? plan.kv_heads - unit0 : KEY_SECTION;
    const int in_section = ticket - unit0 * per_head, share = in_section / (plan.pieces * width),
              rest = in_section - share * plan.pieces * width;
    const int split = a.splits - 1 - share, piece = rest / width;
    sequence flipped;
    int64_t at;
    if (!piece_at(by_key(a.sq), piece, KEYS, 1, &flipped, &at)) return false;
    const sequence seq = flip(flipped);
    const int nk = (int)seq.nk, key0 = (int)at, key_end = key0 + KEYS < nk ? key0 + KEYS : nk;
    if (lane != 0) return true;
    static_assert(ROWS == BACKWARD_STEP, "a tile of rows is one of tile_range");
    tile_range half[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int first = key0 + h * (KEYS / 2), end = min(first + KEYS / 2, key_end);
        half[h] = tiles_that_see(a, seq, first, end - 1);
    }
    enter_sequence(a, seq, b);
    b->kvh = plan.kv0 + unit0 + rest - piece * width;
    b->head0 = b->kvh * a.group;
    b->key0 = key0;
    b->place = key0 / KEYS;
    b->key_end = key_end;
    b->slot = ((int64_t)b->kvh * plan.pieces + piece) * a.splits + split;
    b->nonfinite = 0;
    find_whole(a, seq, key0, key0 + KEYS - 1, b); /* none where keys past the last are to be hidden */
    for (int i = 0; i < KEYS / RUN; i++) b->first[i] = key0 + i * RUN;
    int next_first = (int)seq.nq, other;
    if (key_end < nk) key_queries(a, seq, key_end, &next_first, &other);
    b->last_end = next_first < seq.nq ? next_first / ROWS : INT32_MAX;
    b->alone_end = b->place == 0 && plan.sums != NULL && !plan.head_first ? b->last_end : 0;
    b->up = in_section / plan.wave & 1;
    for (int h = 0; h < 2; h++) {
        b->half_tile[h] = half[h].from;
        b->half_end[h] = half[h].to;
    }
    const tile_range tiles = tiles_of_share(a, seq, KEYS, {half[0].from, max(half[0].to, half[1].to)}, split);
    b->tile = tiles.from;
    b->tiles = tiles.to > tiles.from ? tiles.to - tiles.from : 0;
    if (b->alone_end <= b->tile) b->alone_end = 0;
    return b->tiles > 0 || a.splits == 1; /* a share that sees nothing writes nothing */
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

/* Which halves of the keys some rows of step t's tile may see, a bit each; none behind the last step. */
__device__ __forceinline__ int halves_seen(const attend_kernel &a, const sm90_backward_plan &plan,
                                           const key_block &b, int t)
{
    if (t >= b.tiles * a.hs) return 0;
    int head;
    const int tile = tile_at_step(a, plan, b, t, &head);
    return (tile >= b.half_tile[0] && tile < b.half_end[0] ? 1 : 0) |
           (tile >= b.half_tile[1] && tile < b.half_end[1] ? 2 : 0);
}

/* Warp 0 of the feeder: one thread copies. */
template <typename AT>
__device__ __forceinline__ void feed(const attend_kernel &a, const sm90_backward_plan &plan,
                                     const key_block &b, const maps &m, uint32_t base)
{
    const int steps = b.tiles * a.hs;
    if ((threadIdx.x & 31) != 0 || steps == 0) return;
    const int box = plan.lists.box > 0 ? plan.lists.box : AT::KEYS;
    AT::own_full::expect(base, {}, AT::KEYS * (AT::DIM_K + AT::DIM_V) * 2);
    for (int r = 0; r < AT::KEYS; r += box) {
        const int first = key_of(b, r), key = first < b.nk ? b.k0 + first : (int)a.sq.n_kv; /* 0 there */
#pragma unroll
        for (int p = 0; p < AT::DIM_K / 64; p++)
            tma_load(base + AT::K + p * AT::KEYS * 128 + r * 128, m.k, AT::own_full::barrier(base, {}),
                     p * 64, b.kvh, key, b.view);
#pragma unroll
        for (int p = 0; p < AT::DIM_V / 64; p++)
            tma_load(base + AT::V + p * AT::KEYS * 128 + r * 128, m.v, AT::own_full::barrier(base, {}),
                     p * 64, b.kvh, key, b.view);
    }
    for (int t = 0; t < steps; t++) {
        int head;
        const int query = b.q0 + tile_at_step(a, plan, b, t, &head) * AT::ROWS;
        const auto here = AT::place::of(t);
        AT::free::wait_before(base, here);
        const uint32_t full = AT::full::expect(base, here, AT::Q_BYTES + AT::DO_BYTES);
#pragma unroll
        for (int p = 0; p < AT::DIM_K / 64; p++)
            tma_load(base + AT::Q + here.stage * AT::Q_BYTES + p * AT::ROWS * 128, m.q, full, p * 64, head,
                     query, b.view);
#pragma unroll
        for (int p = 0; p < AT::DIM_V / 64; p++)
            tma_load(base + AT::DO + here.stage * AT::DO_BYTES + p * AT::ROWS * 128, m.d_o, full, p * 64,
                     head, query, b.view);
    }
}

/* Whether something in a row of a tile is not finite. The order of its chunks keeps the lanes on different
 * banks. */
template <typename T, int ROWS, int PANELS>
__device__ __forceinline__ bool row_nonfinite(const char *tile, int row)
{
    uint32_t most = 0;
    for (int p = 0; p < PANELS; p++)
#pragma unroll 2
        for (int c = 0; c < 8; c++) {
            most = largest_bits(most,
                                *(const uint4 *)(tile + p * ROWS * 128 + row * 128 + ((c ^ (row & 7)) << 4)));
        }
    return is_nonfinite<T>(most);
}

/* Warp 1 of the feeder: a lane has rows lane and lane + 32 of each stage, and loads what it needs of them a
 * step ahead. What is not finite in a row's Q leaves it no finite score, so no finite lse, and what is not in
 * its dO no finite delta: with FINITE_KNOWN, the other rows are not searched. */
template <typename T, typename AT, bool FINITE_KNOWN>
__device__ __forceinline__ void fetch_and_search(const attend_kernel &a, const sm90_backward_plan &plan,
                                                 const key_block &b, char *smem, uint32_t base)
{
    const int lane = threadIdx.x & 31, steps = b.tiles * a.hs;
    float lse[2], delta[2], row_scale[2];
    int query;
    /* A lane's rows of a statistic; `p`: that of the sequence's first row of head 0. */
    auto load = [&](float(&x)[2], const float *p, const int64_t *strides, int head, float none) {
        const int64_t between = strides[2];
        const float *row = p + head * strides[1] + (query + lane) * between;
#pragma unroll
        for (int i = 0; i < 2; i++)
            x[i] = lane + i * 32 < AT::ROWS && query + lane + i * 32 < b.nq ? __ldg(row + i * 32 * between)
                                                                            : none;
    };
    auto load_step = [&](int t) {
        int head;
        query = tile_at_step(a, plan, b, t, &head) * AT::ROWS;
        load(lse, b.lse, a.lse.s, head, -INFINITY);
        load(delta, b.delta, a.delta.s, head, 0.0f);
        row_scale[0] = row_scale[1] = 1.0f;
        if (b.row_scale != NULL) load(row_scale, b.row_scale, a.row_scale.s, head, 1.0f);
    };
    if (steps > 0) load_step(0);
    for (int t = 0; t < steps; t++) {
        const int stage = t % AT::STAGES;
        statistics *st = (statistics *)(smem + AT::STAT) + stage;
        uint32_t search = 0; /* a bit each of its rows */
        bool parts = false;
        uint32_t empty[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = lane + i * 32, n = query + row;
            const bool part =
                row < AT::ROWS && (lse[i] == -INFINITY || n < b.whole_first || n >= b.whole_end);
            empty[i] = __ballot_sync(~0u, lse[i] == -INFINITY);
            if (part && !(FINITE_KNOWN && isfinite(lse[i]) && isfinite(delta[i]))) search |= 1u << i;
            parts = parts || part;
        }
        AT::free::wait_before(base, AT::place::of(t));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = lane + i * 32, place = AT::FOURS ? place_of_row(row) : row;
            st->lse2[place] = exp2_lse(lse[i]);
            st->delta[place] = a.row_scale.p == NULL  ? delta[i]
                               : row_scale[i] != 0.0f ? delta[i] / row_scale[i]
                                                      : 0.0f;
            st->row_scale[place] = row_scale[i];
        }
        parts = __any_sync(~0u, parts);
        bool nonfinite = false;
        if (__any_sync(~0u, search != 0)) {
            AT::full::wait(base, AT::place::of(t));
#pragma unroll 1
            for (int row = lane; search != 0; row += 32, search >>= 1)
                if (search & 1)
                    nonfinite =
                        nonfinite ||
                        row_nonfinite<T, AT::ROWS, AT::DIM_K / 64>(smem + AT::Q + stage * AT::Q_BYTES, row) ||
                        row_nonfinite<T, AT::ROWS, AT::DIM_V / 64>(smem + AT::DO + stage * AT::DO_BYTES, row);
            __syncwarp();
            nonfinite = __any_sync(~0u, nonfinite);
        }
        if (lane == 0) {
            st->part = (parts ? 1 : 0) | (nonfinite ? 2 : 0);
            st->empty[0] = empty[0];
            st->empty[1] = empty[1];
            st->query = query;
            if (AT::HALVES) st->next_halves = halves_seen(a, plan, b, t + 1);
        }
        AT::stats_full::arrive(base, AT::place::of(t)); /* each lane's, for what it wrote */
        if (t + 1 < steps) load_step(t + 1);
    }
}

/* Windows have many rows that do not see all keys. Where few do not, finding which are finite takes longer
 * than searching them. */
template <typename T, typename AT>
__device__ __forceinline__ void fetch_statistics(const attend_kernel &a, const sm90_backward_plan &plan,
                                                 const key_block &b, char *smem, uint32_t base)
{
    if (AT::HALVES || plan.head_first) fetch_and_search<T, AT, true>(a, plan, b, smem, base);
    else fetch_and_search<T, AT, false>(a, plan, b, smem, base);
}

/* Warps 2 and 3 of the feeder: one thread each adds dQ of every second step when its turn comes. */
template <typename AT>
__device__ __forceinline__ void add_rows(const attend_kernel &a, const sm90_backward_plan &plan,
                                         const key_block &b, const maps &m, uint32_t base, int which)
{
    const int steps = b.tiles * a.hs, buffer = AT::DQ_BUFFERS == ADDERS ? which : 0;
    for (int t = which; t < steps; t += ADDERS) {
        int head, lo = 0, hi;
        const int tile = tile_at_step(a, plan, b, t, &head);
        int32_t *turn = plan.turns + (int64_t)head * plan.tiles + b.turns + tile;
        bool store = false;
        if ((threadIdx.x & 31) == 0) {
            if (plan.head_first) row_keys(a, sequence_of(b), tile * AT::ROWS, &lo, &hi);
            const int before = b.place - lo / AT::KEYS;
            store = plan.fresh && before == 0;
            while (load_acquire(turn) < before) {
            }
        }
        __syncwarp();
        named_sync(DQ_FULL + which, AT::DQ_THREADS + 32);
        if ((threadIdx.x & 31) == 0) {
            const int to_head = head - plan.kv0 * a.group, query = b.q0 + tile * AT::ROWS;
            const uint32_t from = base + AT::DQ + buffer * AT::DQ_BYTES;
            const bool stored = AT::ALONE && tile < b.alone_end;
            if (stored) { /* by dQ's warpgroup */
            } else if (plan.sums != NULL) {
                float *to = plan.sums + sums_at(b.turns + tile, to_head, plan.kv_heads * a.group, AT::DIM_K);
                if (store) bulk_store(to, from, AT::DQ_BYTES);
                else bulk_add(to, from, AT::DQ_BYTES);
            } else {
#pragma unroll
                for (int p = 0; p < AT::DIM_K / 32; p++) {
                    const uint32_t panel = from + p * AT::ROWS * 128;
                    if (p * 32 >= a.dim_k) continue;
                    if (store) tma_store(m.d_q, panel, p * 32, to_head, query, b.view);
                    else tma_add(m.d_q, panel, p * 32, to_head, query, b.view);
                }
            }
            tma_commit();
            tma_wait_read();
            AT::dq_free::arrive(base, {buffer});
            tma_wait_written();
            add_release(turn, stored ? TILE_STORED : tile < b.last_end ? SUMS_WHOLE : 1);
        }
    }
    if (plan.done != NULL && (threadIdx.x & 31) == 0) add_release(plan.done, 1);
}

} // namespace sm90_backward

#endif
