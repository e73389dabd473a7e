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

namespace sm90_forward
{

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
template <int DK, int DV, typename W>
__device__ __forceinline__ const typename W::turn &plan_of_turn(char *smem, int turn)
{
    return ((const typename W::turn *)(smem + layout<DK, DV, W>::TURN))[turn % W::TURNS];
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
template <int DK, int DV, typename W>
__device__ __forceinline__ walked_branch enter_branch(char *smem, uint32_t base, int turn, row_state &r)
{
    typedef layout<DK, DV, W> at;
    const typename W::turn &w = wait_turn<DK, DV, W>(smem, base, turn);
    wait_list<DK, DV, W>(w, base, turn);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.top[h] = -INFINITY;
        r.sum[h] = 0.0f;
    }
    return {turn,
            same((w.slots + at::KEYS - 1) / at::KEYS),
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
template <typename AT, typename W>
__device__ __forceinline__ void end_branch(const typename W::call &call, const typename W::turn &w,
                                           const row_state &r, const int (&place)[2], const char *smem,
                                           float (&by)[2])
{
    const attend_kernel &b = call.branch[w.branch];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int query = (int)quotient((uint32_t)place[h], b.by_hs);
        const int head = place[h] - query * b.hs + w.head0;
        const bool mine = query < w.queries;
        const float sum = end_row(b, w, r, h, head, (int64_t)w.q0 + w.query + query, mine),
                    gate = ((const float *)(smem + AT::GATES))[place[h] * SM90_BRANCHES + w.branch];
        by[h] = sum == 0.0f || !mine ? 0.0f : gate / sum;
    }
}

/* The same as slots of a clean list, of which a row sees the first so many. The tiles before the first that
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
template <int OT, int THREADS>
__device__ __forceinline__ void add_branch(float (&o)[OT][4], const float (&by)[2], bool begun, uint32_t sums)
{
#pragma unroll
    for (int i = 0; i < OT; i++) {
        const uint32_t at = sums + i * THREADS * 16;
        float4 x = make_float4(o[i][0] * by[0], o[i][1] * by[0], o[i][2] * by[1], o[i][3] * by[1]);
        if (begun) {
            const float4 before = load_sums(at);
            x = make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w);
        }
        store_sums(at, x);
    }
}

/* Adds the sums that the other block of the pair found of the same rows. */
template <int OT, int THREADS>
__device__ __forceinline__ void borrow_sums(uint32_t sums, uint32_t theirs, bool begun)
{
#pragma unroll 8
    for (int i = 0; i < OT; i++) {
        float4 x = cluster_load(theirs + i * THREADS * 16);
        if (begun) {
            const float4 before = load_sums(sums + i * THREADS * 16);
            x = make_float4(before.x + x.x, before.y + x.y, before.z + x.z, before.w + x.w);
        }
        store_sums(sums + i * THREADS * 16, x);
    }
}

/* Stores O times `by` and the sums of the rows; notes if something is not finite. */
template <typename T, typename AT, typename W, int OT>
__device__ __forceinline__ void store_sums(float (&o)[OT][4], const typename W::call &a,
                                           const typename W::turn &w, const float (&by)[2], bool begun,
                                           const int (&place)[2], char *smem)
{
    const float4 *sums = (const float4 *)(smem + AT::SUMS) + (threadIdx.x - 128);
    float zero[2] = {0.0f, 0.0f}; /* of this thread's rows, unless something is not finite */
#pragma unroll
    for (int i = 0; i < OT; i++) {
        float4 before = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (begun) before = sums[i * AT::M * 2];
        o[i][0] = before.x + o[i][0] * by[0], o[i][1] = before.y + o[i][1] * by[0];
        o[i][2] = before.z + o[i][2] * by[1], o[i][3] = before.w + o[i][3] * by[1];
#pragma unroll
        for (int c = 0; c < 4; c++) zero[c >> 1] = fmaf(o[i][c], 0.0f, zero[c >> 1]);
    }
    const int query[2] = {(int)quotient((uint32_t)place[0], a.branch[1].by_hs),
                          (int)quotient((uint32_t)place[1], a.branch[1].by_hs)};
    const bool mine[2] = {query[0] < w.queries, query[1] < w.queries};
    if ((mine[0] && zero[0] != 0.0f) || (mine[1] && zero[1] != 0.0f))
        atomicOr(odd_piece<AT>(smem, w.piece), 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = place[h] - query[h] * a.branch[1].hs + w.head0;
        T *const to = (T *)a.o.p + (int64_t)w.view * a.o.s[0] +
                      ((int64_t)w.q0 + w.query + query[h]) * a.o.s[1] + head * a.o.s[2];
        store_row<T, OT>(o, h, 1.0f, to, mine[h], a.branch[1].dim_v);
    }
}

/* Adds what is not finite in the V of a tile to the rows that see it. */
template <typename T, int DK, int DV, typename W, int OT>
__device__ __forceinline__ void add_tile_nonfinite(float (&o)[OT][4], const typename W::call &call, int turn,
                                                   int t, const int (&place)[2], char *smem)
{
    typedef layout<DK, DV, W> at;
    const typename W::turn &w = plan_of_turn<DK, DV, W>(smem, turn);
    row_state r = {};
    find_keys(w, call.branch[1], place, r);
    if constexpr (W::MASKS) W::template add_nonfinite<T, at>(o, call, w, r, place, t, smem);
    else
        add_turn_nonfinite<T, at::KEYS, W>(o, call.branch[w.branch], w, list_of<DK, DV, W>(smem, turn), r,
                                           t * at::KEYS);
}

/* The keys of the tile at hand that this thread's rows do not see become -inf. */
template <int DK, int DV, typename W, int NT>
__device__ __forceinline__ void hide_tile(float (&s)[NT][4], const typename W::call &call,
                                          const walked_branch &b, const int (&place)[2], char *smem,
                                          row_state &r)
{
    constexpr int KEYS = layout<DK, DV, W>::KEYS;
    const typename W::turn &w = plan_of_turn<DK, DV, W>(smem, b.turn);
    find_keys(w, call.branch[1], place, r);
    if (!W::MASKS && b.branch == 1)
        find_slots(w, call.branch[1], list_of<DK, DV, W>(smem, b.turn), b.t * KEYS, r);
    if (b.t < b.whole_from) hide_range<NT, true>(s, r, b.base + b.t * KEYS);
    if (b.t >= b.whole_to) hide_range<NT, false>(s, r, b.base + b.t * KEYS);
}

/* Chooses the blocks of the thread's rows from the exponentials of all their entries. */
template <int DK, int DV, typename W, int NT>
__device__ __forceinline__ void choose_of_tile(const float (&s)[NT][4], const typename W::call &call,
                                               int turn, const int (&place)[2], char *smem, row_state &r)
{
    const typename W::turn &w = plan_of_turn<DK, DV, W>(smem, turn);
    find_keys(w, call.branch[1], place, r);
    W::template choose_blocks<layout<DK, DV, W>>(s, call, w, r, smem);
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
    bool rows, lent, borrows, begun;
};

/* Leaves the O of a piece whose last turn is `turn`: to the other block of the pair, or in memory. */
template <typename T, int DK, int DV, typename W, int OT>
__device__ __forceinline__ void leave_piece(float (&o)[OT][4], const typename W::call &call, int turn,
                                            piece_end end, const float (&by)[2], const int (&place)[2],
                                            uint32_t own_sums, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    if (!end.rows) return;
    if constexpr (W::MASKS) {
        const uint32_t peer = (blockIdx.x & 1) ^ 1;
        if (end.lent) {
            add_branch<OT, at::M * 2>(o, by, false, own_sums);
            cluster_arrive(cluster_address(base + at::EXTRA + W::SUMS_FULL, peer));
        }
        if (end.borrows) {
            cluster_wait(base + at::EXTRA + W::SUMS_FULL, 0);
            borrow_sums<OT, at::M * 2>(own_sums, cluster_address(own_sums, peer), end.begun);
            end.begun = true;
        }
    }
    if (!end.lent)
        store_sums<T, at, W>(o, call, plan_of_turn<DK, DV, W>(smem, turn), by, end.begun, place, smem);
}

/* A computing warpgroup on its way: tiles and pieces so far, and the parity of each stage's V_CLEAN. */
struct walker {
    int group, place[2], step, used;
    uint32_t clean, own_sums;
};

/* Leaves the sums of a tile's rows to the warp that makes its list; one warpgroup calls. `others`: how often
 * rows of another piece have come. Whether a loop goes on must not look different from lane to lane: ptxas
 * would do without uniform registers in all that follows, and a tile would take a tenth longer. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void leave_sums_of_rows(const typename W::call &call, const typename W::turn &w,
                                                   int used, int *others, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    const tile_rows tile = tile_of(call.branch[1], w);
    const int other = same(other_piece<at::M>(tile, w)), own = same(w.query);
    float sum[DK / 8][4] = {};
    mbar_wait(base + at::Q_FULL, used & 1);
    if (other >= 0) mbar_wait(base + at::EXTRA + W::OTHER_FULL, (*others)++ & 1);
#pragma unroll 1
    for (int n = same(tile.first); n >= 0; n = n < own ? own : n < other ? other : -1) {
        const int left = same(tile.end) - n;
        sum_rows<T, DK, at::M>(sum, base + (n == own ? at::Q : at::SUMS), left < at::M ? left : at::M);
    }
    if ((threadIdx.x & 127) < 4) {
        float2 *const to = (float2 *)(smem + at::SUMS + at::Q_STAGE) + (threadIdx.x & 3);
#pragma unroll
        for (int i = 0; i < DK / 8; i++) to[i * 4] = make_float2(sum[i][0], sum[i][1]);
    }
    mbar_arrive(base + at::EXTRA + W::SUMS_FULL); /* each lane's, for what it wrote */
}

/* Frees the turns from ... to. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void free_turns(uint32_t base, int from, int to)
{
    for (int i = from; i <= to; i++) free_turn<DK, DV, W>(base, i);
}

/* Frees the places of a piece's rows, if it has some, and of their sums: the copy engine may bring others. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void free_rows(bool rows, const typename W::call &call, uint32_t base)
{
    if (rows && !W::MASKS && call.choice.here) {
        async_fence();
        __syncwarp();
    }
    if (rows && (threadIdx.x & 31) == 0) mbar_arrive(base + layout<DK, DV, W>::Q_FREE);
}

/* Walks the piece whose first turn is `turn`. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void walk_piece(const typename W::call &call, const typename W::turn &first,
                                           int turn, walker &x, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    constexpr int KEYS = at::KEYS, GROUPS = shape<DK, DV, W>::GROUPS, NT = KEYS / 8, OT = DV / 8;
    const int own = 1 + x.group, next = 1 + (x.group + 1) % GROUPS;
    const bool rows = same(first.queries > 0), again = same(first.again), lent = same(first.lent),
               borrows = same(first.borrows);
    row_state r;
    float o[OT][4] = {}, s[NT][4], shrink[2], by[2] = {0.0f, 0.0f};
    uint32_t p[NT / 2][4] = {};
    const uint32_t none_held[1][4] = {};
    typename W::row_masks masks = {};
    bool gated = false, begun = false; /* gates are known; the sums have a branch */
    bool opens = true;                 /* no tile has been walked */
    auto arrive = [&](uint32_t bar) {
        if ((threadIdx.x & 31) == 0) mbar_arrive(base + bar);
    };
    walked_branch b = enter_branch<DK, DV, W>(smem, base, turn, r);
    if (rows) mbar_wait(base + at::Q_FULL, x.used & 1);
    int from = b.turn, from_t = 0;
    auto end = [&](float(&by)[2]) {
        if (!rows || plan_of_turn<DK, DV, W>(smem, b.turn).absent) return;
        if (!gated) mbar_wait(base + at::GATES_FULL, x.used & 1);
        gated = true;
        end_branch<at, W>(call, plan_of_turn<DK, DV, W>(smem, b.turn), r, x.place, smem, by);
    };
    auto values = [&]() { /* of the tile before */
                          const int stage = (x.step + 1) % STAGES;
                          if (!opens) mbar_wait(base + at::V_FULL + 8 * stage, (x.step - 1) / STAGES & 1);
                          if (again && !opens && wait_clean<DK, DV, W>(smem, base, stage, &x.clean))
                              add_tile_nonfinite<T, DK, DV, W>(o, call, from, from_t, x.place, smem);
                          multiply_values<T, DV, KEYS>(o, p, base + at::V + stage * at::V_STAGE);
    };
    for (; b.t == 0 && !W::last(b.turn); b = enter_branch<DK, DV, W>(smem, base, b.turn + 1, r)) {
        end(by);
        free_turn<DK, DV, W>(base, b.turn);
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
                    b = enter_branch<DK, DV, W>(smem, base, b.turn + 1, r);
                    if (b.t == 0) end(none);
                }
                if (b.t == 0) break;
            }
            b.t--;
            mbar_wait(base + at::K_FULL + 8 * (x.step % STAGES), x.step / STAGES & 1);
            named_sync(own, 256);
            wg_start();
            multiply_queries<T, DK, DV, W>(s, none_held, base + at::Q + x.group * 64 * 128,
                                           base + at::K + x.step % STAGES * at::K_STAGE);
            values();
            named_arrive(next, 256);
            if constexpr (W::MASKS) W::template find_halves<at>(masks, call, b.branch, x.place, b.t, smem);
            wg_wait<1>(s);
            arrive(at::K_FREE + 8 * (x.step % STAGES));
            if (b.t < b.whole_from || b.t >= b.whole_to) hide_tile<DK, DV, W>(s, call, b, x.place, smem, r);
            if constexpr (W::MASKS) W::weigh(s, r, shrink, b.scale_log2, masks, again);
            else softmax(s, r, shrink, b.scale_log2);
            wg_wait<0>(o);
            if (!opens) arrive(at::V_FREE + 8 * ((x.step + 1) % STAGES));
            if constexpr (W::MASKS)
                if (b.branch == 0 && call.choice.here)
                    choose_of_tile<DK, DV, W>(s, call, b.turn, x.place, smem, r);
            pack_rows<T>(s, p);
            x.step++;
            if (opens || ends) {
                if (!opens) {
                    if (!W::MASKS && !begun && call.choice.here)
                        mbar_wait(base + at::EXTRA + W::SUMS_READ, x.used & 1);
                    add_branch<OT, at::M * 2>(o, by, begun, x.own_sums);
                    begun = true;
                }
                clear_rows(o);
                if (ends) free_turns<DK, DV, W>(base, from, b.turn - 1);
                opens = false;
            } else if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
                shrink_rows(o, shrink);
            }
        }
        values();
        wg_wait<0>(o);
        arrive(at::V_FREE + 8 * ((x.step + 1) % STAGES));
    } else {
        from = b.turn;
        end(by);
    }
    leave_piece<T, DK, DV, W>(o, call, b.turn, {rows, lent, borrows, begun}, by, x.place, x.own_sums, smem,
                              base);
    free_turns<DK, DV, W>(base, from, b.turn);
    free_rows<DK, DV, W>(rows, call, base);
    x.used += rows;
}

/* A computing warpgroup. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::walk(const call &call, char *smem, uint32_t base, int group)
{
    const int row = group * 64 + (threadIdx.x >> 5 & 3) * 16 + ((threadIdx.x & 31) >> 2);
    walker x = {group, {row, row + 8}, 0, 0, 0, base + layout<DK, DV, W>::SUMS + (threadIdx.x - 128) * 16};
    const bool last = group == shape<DK, DV, W>::GROUPS - 1;
    int others = 0;
    if (last) named_arrive(1, 256); /* the first warpgroup goes first */
    W::meet_wait(call);
    for (int turn = 0;; turn += W::TURNS) {
        const typename W::turn &first = wait_turn<DK, DV, W>(smem, base, turn);
        if (first.queries < 0) break;
        if constexpr (!W::MASKS)
            if (last && same(first.queries > 0) && call.choice.here)
                leave_sums_of_rows<T, DK, DV, W>(call, first, x.used, &others, smem, base);
        walk_piece<T, DK, DV, W>(call, first, turn, x, smem, base);
    }
}

} // namespace sm90_forward

#endif
