/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk.cuh - the warpgroups that compute in kernel.cuh's kernels: the tiles of a piece's branches
 * as one walk.
 *
 * A step is attend/sm90_forward/kernel.cuh's: S of a tile and P V of the tile before it, softmax, and the
 * warpgroups take turns at the tensor cores. Where a branch ends, its last P V runs behind the next one's
 * first S, and then its O goes to the sums of the rows. A piece's first step is a step, too: what it
 * multiplies as P V is of no use, and its O is dropped. So the loop is the only code that walks.
 *
 * A step reads neither plans nor parameters: what a branch's tiles need of them comes into registers when the
 * branch begins.
 */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_WALK_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_WALK_CUH

#include "attend_gate/sm90/turns.cuh"

namespace sm90_gate
{

/* Waits until V of a tile is searched; whether something was not finite. */
template <typename S> __device__ __forceinline__ bool wait_searched(S &sm, int stage, uint32_t *parities)
{
    sm.searched.wait_next(stage, parities);
    const int found = (threadIdx.x & 31) == 0 ? sm.nonfinite[stage] : 0;
    return __shfl_sync(~0u, found, 0) != 0; /* lane 0 frees V */
}

/* The keys of a range that this thread's rows do not see become -inf: those behind a row's last one, and
 * where EARLY those before its first. `key`: the tile's first. */
template <int NT, bool EARLY>
__device__ __forceinline__ void hide_range(float (&s)[NT][4], const row_state &r, int key)
{
    const int column = key + (threadIdx.x & 3) * 2;
    const int bound[2] = {(EARLY ? r.lo[0] : r.hi[0]) - column, (EARLY ? r.lo[1] : r.hi[1]) - column};
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int at = i * 8 + (c & 1);
            if (EARLY ? at < bound[c >> 1] : at >= bound[c >> 1]) s[i][c] = -INFINITY;
        }
}

/* The plan of a turn that has not ended. */
template <typename S> __device__ __forceinline__ const gated_turn &plan_of_turn(S &sm, int turn)
{
    return sm.plan[turn % SM90_BRANCHES];
}

/* The branch whose tiles are walked: `t` is the tile at hand, and counts down. */
struct walked_branch {
    int turn, t;
    int whole_from, whole_to; /* the tiles that every row sees whole */
    int base;                 /* range: the first tile's first key */
    int branch;
    float scale_log2;
};

/* Tells the compiler that a value is the same in all lanes. */
__device__ __forceinline__ int same(int x)
{
    return __shfl_sync(~0u, x, 0);
}

/* Begins a branch, before its last tile: waits for its plan and its list. */
template <int D, typename W>
__device__ __forceinline__ walked_branch enter_branch(shared<D, W> &sm, int turn, row_state &r)
{
    const gated_turn &w = wait_turn(sm, turn);
    wait_list(w, sm, turn);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.top[h] = -INFINITY;
        r.sum[h] = 0.0f;
    }
    return {turn,
            same((w.slots + KEYS - 1) / KEYS),
            same(w.whole_from),
            same(w.whole_to),
            same(w.base),
            same(w.branch),
            __int_as_float(same(__float_as_int(w.scale_log2)))};
}

/* Finds which keys the thread's rows see. */
__device__ __forceinline__ void find_keys(const gated_turn &w, const attend_kernel &a, const int (&place)[2],
                                          row_state &r)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int query = (int)quotient((uint32_t)place[h], a.by_hs);
        r.lo[h] = r.hi[h] = 0;
        if (query < w.queries) keys_of_row(w, w.query + query, &r.lo[h], &r.hi[h]);
    }
}

/* What O of a branch is multiplied by: gate / sum of the thread's rows. Stores LSE. */
template <typename S>
__device__ __forceinline__ void end_branch(const sm90_gated &call, const gated_turn &w, const row_state &r,
                                           const int (&place)[2], const S &sm, float (&by)[2])
{
    const attend_kernel &b = call.branch[w.branch];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int query = (int)quotient((uint32_t)place[h], b.by_hs);
        const int head = place[h] - query * b.hs + w.head0;
        const bool mine = query < w.queries;
        const float sum = end_row(b, w, r, h, head, (int64_t)w.q0 + w.query + query, mine),
                    gate = sm.gates[place[h]][w.branch];
        by[h] = sum == 0.0f || !mine ? 0.0f : gate / sum;
    }
}

/* The same as slots of a clean list, of which a row sees the first n. The tiles before the first that
 * some row does not see whole are left out. */
__device__ __forceinline__ void find_slots(const gated_turn &w, const attend_kernel &a, const int32_t *list,
                                           int slot, row_state &r)
{
    const int blocks = (int)quotient((uint32_t)w.slots, a.by_block);
    int end[2] = {0, 0};
#pragma unroll 1
    for (int e = (int)quotient((uint32_t)slot, a.by_block); e < blocks; e++) {
        const int key = list[e] * a.list_block;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int seen = r.hi[h] - key < a.list_block ? r.hi[h] - key : a.list_block;
            if (seen > 0) end[h] = e * a.list_block + seen;
        }
    }
    r.hi[0] = end[0];
    r.hi[1] = end[1];
}

/* Four sums of rows in shared memory, by one address for all of a thread's. */
__device__ __forceinline__ float4 load_sums(uint32_t at)
{
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(at));
    return x;
}
__device__ __forceinline__ void store_sums(uint32_t at, const float4 &x)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}

/* Adds O times `by` to the sums of the rows, or begins them. */
template <int OT>
__device__ __forceinline__ void add_branch(float (&o)[OT][4], const float (&by)[2], bool begun, uint32_t sums)
{
#pragma unroll
    for (int i = 0; i < OT; i++) {
        const uint32_t at = sums + i * (M * 2 * 16);
        float4 x = make_float4(o[i][0] * by[0], o[i][1] * by[0], o[i][2] * by[1], o[i][3] * by[1]);
        if (begun) {
            const float4 before = load_sums(at);
            x = make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w);
        }
        store_sums(at, x);
    }
}

/* Adds the sums that the other block of the pair found of the same rows. */
template <int OT> __device__ __forceinline__ void add_peer_sums(uint32_t sums, uint32_t theirs, bool begun)
{
#pragma unroll 8
    for (int i = 0; i < OT; i++) {
        float4 x = cluster_load(theirs + i * (M * 2 * 16));
        if (begun) {
            const float4 before = load_sums(sums + i * (M * 2 * 16));
            x = make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w);
        }
        store_sums(sums + i * (M * 2 * 16), x);
    }
}

/* Stores O times `by` and the sums of the rows; notes if something is not finite. */
template <typename T, typename S, int OT>
__device__ __forceinline__ void store_sums(float (&o)[OT][4], const sm90_gated &a, const gated_turn &w,
                                           const float (&by)[2], bool begun, const int (&place)[2], S &sm)
{
    const int thread = threadIdx.x - 128;
    float zero[2] = {0.0f, 0.0f}; /* of this thread's rows, unless something is not finite */
#pragma unroll
    for (int i = 0; i < OT; i++) {
        float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (begun) before = sm.sums[i][thread];
        o[i][0] = before.x + o[i][0] * by[0], o[i][1] = before.y + o[i][1] * by[0];
        o[i][2] = before.z + o[i][2] * by[1], o[i][3] = before.w + o[i][3] * by[1];
#pragma unroll
        for (int c = 0; c < 4; c++) zero[c >> 1] = fmaf(o[i][c], 0.0f, zero[c >> 1]);
    }
    const int query[2] = {(int)quotient((uint32_t)place[0], a.branch[1].by_hs),
                          (int)quotient((uint32_t)place[1], a.branch[1].by_hs)};
    const bool mine[2] = {query[0] < w.queries, query[1] < w.queries};
    if ((mine[0] && zero[0] != 0.0f) || (mine[1] && zero[1] != 0.0f))
        atomicOr(&sm.again[w.piece % PIECES], 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = place[h] - query[h] * a.branch[1].hs + w.head0;
        T *const to = (T *)a.o.p + (int64_t)w.view * a.o.s[0] +
                      ((int64_t)w.q0 + w.query + query[h]) * a.o.s[1] + head * a.o.s[2];
        store_row<T, OT>(o, h, 1.0f, to, mine[h], a.branch[1].dim_v);
    }
}

/* Adds what is not finite in the V of a tile to the rows that see it, of a branch with a range or a list. */
template <typename T, int KEYS, int OT>
__device__ __forceinline__ void add_branch_nonfinite(float (&o)[OT][4], const attend_kernel &a,
                                                     const gated_turn &w, const int32_t *list,
                                                     const row_state &r, int slot0)
{
    if (list != NULL && w.branch == 1) add_nonfinite<T, KEYS, OT, true>(o, a, w, list, r, slot0);
    else add_nonfinite<T, KEYS, OT, false>(o, a, w, list, r, slot0);
}

/* The same of tile t of turn `turn`. */
template <typename T, int D, typename W, int OT>
__device__ __forceinline__ void add_tile_nonfinite(float (&o)[OT][4], const sm90_gated &call, int turn, int t,
                                                   const int (&place)[2], shared<D, W> &sm)
{
    const gated_turn &w = plan_of_turn(sm, turn);
    row_state r = {};
    find_keys(w, call.branch[1], place, r);
    if constexpr (W::MASKS) W::template add_nonfinite<T>(o, call, w, r, place, t, sm);
    else add_branch_nonfinite<T, KEYS>(o, call.branch[w.branch], w, sm.list, r, t * KEYS);
}

/* The keys of the tile at hand that this thread's rows do not see become -inf. */
template <int D, typename W, int NT>
__device__ __forceinline__ void hide_tile(float (&s)[NT][4], const sm90_gated &call, const walked_branch &b,
                                          const int (&place)[2], shared<D, W> &sm, row_state &r)
{
    const gated_turn &w = plan_of_turn(sm, b.turn);
    find_keys(w, call.branch[1], place, r);
    if (!W::MASKS && b.branch == 1) find_slots(w, call.branch[1], sm.list, b.t * KEYS, r);
    if (b.t < b.whole_from) hide_range<NT, true>(s, r, b.base + b.t * KEYS);
    if (b.t >= b.whole_to) hide_range<NT, false>(s, r, b.base + b.t * KEYS);
}

/* Chooses the blocks of the thread's rows from the exponentials of all their entries. */
template <int D, typename W, int NT>
__device__ __forceinline__ void choose_of_tile(const float (&s)[NT][4], const sm90_gated &call, int turn,
                                               const int (&place)[2], shared<D, W> &sm, row_state &r)
{
    const gated_turn &w = plan_of_turn(sm, turn);
    find_keys(w, call.branch[1], place, r);
    W::choose_blocks(s, call, w, r, sm);
}

template <int OT> __device__ __forceinline__ void clear_rows(float (&o)[OT][4])
{
#pragma unroll
    for (int i = 0; i < OT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) o[i][c] = 0.0f;
}

/* What becomes of a piece's O: rows: there is one; begun: the sums have a branch. */
struct piece_end {
    bool rows, for_peer, adds_peer, begun;
};

/* Leaves the O of a piece whose last turn is `turn`: to the other block of the pair, or in memory. */
template <typename T, int D, typename W, int OT>
__device__ __forceinline__ void store_piece(float (&o)[OT][4], const sm90_gated &call, int turn,
                                            piece_end end, const float (&by)[2], const int (&place)[2],
                                            uint32_t own_sums, shared<D, W> &sm)
{
    if (!end.rows) return;
    if constexpr (W::MASKS) {
        const uint32_t peer = (blockIdx.x & 1) ^ 1;
        if (end.for_peer) {
            add_branch(o, by, false, own_sums);
            sm.sums_full.arrive_at(peer, {});
        }
        if (end.adds_peer) {
            sm.sums_full.wait_cluster({});
            add_peer_sums<OT>(own_sums, cluster_address(own_sums, peer), end.begun);
            end.begun = true;
        }
    }
    if (!end.for_peer) store_sums<T>(o, call, plan_of_turn(sm, turn), by, end.begun, place, sm);
}

/* A computing warpgroup on its way: tiles and pieces so far, and the parity of each stage's `searched`. */
struct walker {
    int group, place[2], step, used;
    uint32_t searched, own_sums;
};

/* Leaves the sums of a tile's rows to the warp that makes its list; one warpgroup calls. `others`: how often
 * rows of another piece have come. Whether a loop goes on must not look different from lane to lane: ptxas
 * would do without uniform registers in all that follows, and a tile would take a tenth longer. */
template <typename T, int D, typename W>
__device__ __forceinline__ void sum_tile_rows(const sm90_gated &call, const gated_turn &w, int used,
                                              int *others, shared<D, W> &sm)
{
    const tile_rows tile = tile_of(call.branch[1], w);
    const int other = same(other_piece<M>(tile, w)), own = same(w.query);
    float sum[D / 8][4] = {};
    sm.queries.wait_full(ring_place<1>::of(used));
    if (other >= 0) sm.other_full.wait(ring_place<1>::of((*others)++));
#pragma unroll 1
    for (int n = same(tile.first); n >= 0; n = n < own ? own : n < other ? other : -1) {
        const int left = same(tile.end) - n;
        sum_rows<T, D, M>(sum, n == own ? smem_address(sm.q) : smem_address(sm.other.q), left < M ? left : M);
    }
    if ((threadIdx.x & 127) < 4) {
        float2 *const to = (float2 *)sm.other.sum + (threadIdx.x & 3);
#pragma unroll
        for (int i = 0; i < D / 8; i++) to[i * 4] = make_float2(sum[i][0], sum[i][1]);
    }
    sm.sums_full.arrive({}); /* each lane's, for what it wrote */
}

/* Frees the turns from ... to. */
template <typename S> __device__ __forceinline__ void free_turns(S &sm, int from, int to)
{
    for (int i = from; i <= to; i++) free_turn(sm, i);
}

/* Frees the places of a piece's rows, if it has some, and of their sums: the copy engine may bring others. */
template <int D, typename W>
__device__ __forceinline__ void free_rows(bool rows, const sm90_gated &call, shared<D, W> &sm)
{
    if (rows && !W::MASKS && call.choice.here) {
        async_fence();
        __syncwarp();
    }
    if (rows && (threadIdx.x & 31) == 0) sm.queries.give_back(0);
}

/* Walks the piece whose first turn is `turn`. */
template <typename T, int D, typename W>
__device__ __forceinline__ void walk_piece(const sm90_gated &call, const gated_turn &first, int turn,
                                           walker &x, shared<D, W> &sm)
{
    constexpr int NT = KEYS / 8, OT = D / 8;
    const int own = 1 + x.group, next = 1 + (x.group + 1) % GROUPS;
    const bool rows = same(first.queries > 0), again = same(first.again), for_peer = same(first.for_peer),
               adds_peer = same(first.adds_peer);
    row_state r;
    float o[OT][4] = {}, s[NT][4], shrink[2], by[2] = {0.0f, 0.0f};
    uint32_t p[NT / 2][4] = {};
    const uint32_t none_held[1][4] = {};
    typename W::row_masks masks = {};
    bool gated = false, begun = false; /* gates are known; the sums have a branch */
    bool opens = true;                 /* no tile has been walked */
    auto free_values = [&](int stage) {
        if ((threadIdx.x & 31) == 0) sm.values.give_back(stage);
    };
    walked_branch b = enter_branch(sm, turn, r);
    if (rows) sm.queries.wait_full(ring_place<1>::of(x.used));
    int from = b.turn, from_t = 0;
    auto end = [&](float(&by)[2]) {
        if (!rows || plan_of_turn(sm, b.turn).peer_walks) return;
        if (!gated) sm.gates_full.wait(ring_place<1>::of(x.used));
        gated = true;
        end_branch(call, plan_of_turn(sm, b.turn), r, x.place, sm, by);
    };
    auto values = [&]() { /* of the tile before */
                          const int stage = (x.step + 1) % STAGES;
                          if (!opens) sm.values.wait_full(ring_place<STAGES>::of(x.step - 1));
                          if (again && !opens && wait_searched(sm, stage, &x.searched))
                              add_tile_nonfinite<T>(o, call, from, from_t, x.place, sm);
                          multiply_values<T, D, KEYS>(o, p, stage_address(sm.v, stage));
    };
    for (; b.t == 0 && !W::last(b.turn); b = enter_branch(sm, b.turn + 1, r)) {
        end(by);
        free_turn(sm, b.turn);
    }
    const bool some = b.t > 0;
    if (some) {
        wg_wait<0>(o); /* without it ptxas lets no products overlap */
        for (;;) {
            const bool ends = b.t == 0;
            from = b.turn;
            from_t = b.t;
            if (ends) {
                float none[2];
                end(by);
                while (b.t == 0 && !W::last(b.turn)) {
                    b = enter_branch(sm, b.turn + 1, r);
                    if (b.t == 0) end(none);
                }
                if (b.t == 0) break;
            }
            b.t--;
            const auto at = ring_place<STAGES>::of(x.step);
            sm.keys.wait_full(at);
            named_sync(own, 256);
            wg_start();
            multiply_queries<T, D, M, KEYS>(s, none_held, smem_address(sm.q) + x.group * 64 * 128,
                                            stage_address(sm.k, at.stage));
            values();
            named_arrive(next, 256);
            if constexpr (W::MASKS) W::find_halves(masks, call, b.branch, x.place, b.t, sm);
            wg_wait<1>(s);
            if ((threadIdx.x & 31) == 0) sm.keys.give_back(at);
            if (b.t < b.whole_from || b.t >= b.whole_to) hide_tile(s, call, b, x.place, sm, r);
            if constexpr (W::MASKS) W::weigh(s, r, shrink, b.scale_log2, masks, again);
            else softmax(s, r, shrink, b.scale_log2);
            wg_wait<0>(o);
            if (!opens) free_values((x.step + 1) % STAGES);
            if constexpr (W::MASKS)
                if (b.branch == 0 && call.choice.here) choose_of_tile(s, call, b.turn, x.place, sm, r);
            pack_rows<T>(s, p);
            x.step++;
            if (opens || ends) {
                if (!opens) {
                    if (!W::MASKS && !begun && call.choice.here)
                        sm.sums_read.wait(ring_place<1>::of(x.used));
                    add_branch(o, by, begun, x.own_sums);
                    begun = true;
                }
                clear_rows(o);
                if (ends) free_turns(sm, from, b.turn - 1);
                opens = false;
            } else if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
                shrink_rows(o, shrink);
            }
        }
        values();
        wg_wait<0>(o);
        free_values((x.step + 1) % STAGES);
    } else {
        from = b.turn;
        end(by);
    }
    store_piece<T>(o, call, b.turn, {rows, for_peer, adds_peer, begun}, by, x.place, x.own_sums, sm);
    free_turns(sm, from, b.turn);
    free_rows(rows, call, sm);
    x.used += rows;
}

/* A computing warpgroup. */
template <typename T, int D, typename W>
__device__ __forceinline__ void three_branches::walk(const call &call, shared<D, W> &sm, int group)
{
    const int row = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    walker x = {group, {row, row + 8}, 0, 0, 0, smem_address(sm.sums) + (threadIdx.x - 128) * 16};
    const bool last = group == GROUPS - 1;
    int others = 0;
    if (last) named_arrive(1, 256); /* the first warpgroup goes first */
    W::wait_peer(call);
    for (int turn = 0;; turn += SM90_BRANCHES) {
        const gated_turn &first = wait_turn(sm, turn);
        if (first.queries < 0) break;
        if constexpr (!W::MASKS)
            if (last && same(first.queries > 0) && call.choice.here)
                sum_tile_rows<T>(call, first, x.used, &others, sm);
        walk_piece<T>(call, first, turn, x, sm);
    }
}

} // namespace sm90_gate

#endif
