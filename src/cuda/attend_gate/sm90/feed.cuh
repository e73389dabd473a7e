/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warps of the feeding warpgroup that copy (0), plan (3) and make lists (1). */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_FEED_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_FEED_CUH

#include "attend_gate/sm90/turns.cuh"

namespace sm90_gate
{

/* Leaves the plan of a turn, and its list. */
template <int D, typename W>
__device__ __forceinline__ void publish_turn(const sm90_gated &call, gated_turn &w, int turn,
                                             shared<D, W> &sm)
{
    wait_end_before(sm, turn);
    gated_turn &left = sm.plan[turn % SM90_BRANCHES];
    const bool lead = (threadIdx.x & 31) == 0;
    __syncwarp();
    if (lead) left = w;
    __syncwarp();
    if (W::listed(left) && left.queries > 0 && !W::makes_list(call)) {
        const attend_kernel &a = W::mask(call, left);
        const int32_t *list = a.list + left.view * a.list_stride[0] + left.unit * a.list_stride[1] +
                              left.list_row * a.list_stride[2];
        const int kept = clean_by_warp(list, a.list_k, a.list_block, left.end, sm.list, sm.scratch);
        if (lead) left.slots = kept * a.list_block;
        W::find_whole(left, sm.list, kept, a.list_block);
    }
    if constexpr (W::MASKS) W::make_masks(call, left, sm);
    sm.plans.give(ring_place<SM90_BRANCHES>::of(turn)); /* each lane's, for what it wrote */
}

/* One thread of warp 0 copies the rows of the tile's other piece. */
template <int D, typename W>
__device__ __forceinline__ void three_branches::copy_others(const call &a, const work_plan &plan,
                                                            const maps &m, const turn &w, shared<D, W> &sm)
{
    const int other = a.choice.here ? other_piece<M>(tile_of(a.branch[1], w), w) : -1;
    if (other < 0) return;
    const uint32_t full = sm.other_full.expect({}, D / 64 * plan.queries * 128);
#pragma unroll
    for (int p = 0; p < D / 64; p++)
        tma_load(stage_address(sm.other.q, p), m.q, full, p * 64, w.head0, w.q0 + other, w.view);
}

/* Warp 0 of the feeder: one thread copies. */
template <int D, typename W>
__device__ __forceinline__ void feed(const sm90_gated &call, const work_plan &plan, const typename W::maps &m,
                                     shared<D, W> &sm)
{
    const bool lead = (threadIdx.x & 31) == 0;
    int step = 0, used = 0; /* tiles and pieces so far */
    for (int turn = 0;; turn++) {
        const gated_turn &w = wait_turn(sm, turn);
        if (w.queries < 0) return;
        if (turn == 1) wait_for_before();
        wait_list(w, sm, turn);
        const int32_t *list = sm.list;
        const attend_kernel &a = W::mask(call, w);
        const int tiles = (w.slots + KEYS - 1) / KEYS, box = W::box(call, plan, w);
        if (W::needs_q(w) && lead) {
            const auto at = ring_place<1>::of(used);
            sm.queries.wait_free(at);
            const uint32_t full = sm.queries.expect(at, D / 64 * plan.queries * a.hs * 128);
#pragma unroll
            for (int p = 0; p < D / 64; p++)
                tma_load(stage_address(sm.q, p), m.q, full, p * 64, w.head0, w.q0 + w.query, w.view);
            if constexpr (!W::MASKS) W::copy_others(call, plan, m, w, sm);
            used++;
        }
        auto copy = [&](const CUtensorMap &map, uint32_t to, uint32_t bar, int t) {
            for (int r = 0; r < KEYS; r += box) {
                const int slot = t * KEYS + r;
                int key = w.k0 + w.base + slot;
                if (W::listed(w)) {
                    const int e = (int)quotient((uint32_t)slot, a.by_block);
                    key = slot < w.slots ? w.k0 + list[e] * a.list_block + (slot - e * a.list_block)
                                         : (int)a.sq.n_kv;
                }
                for (int p = 0; p < D / 64; p++)
                    tma_load(to + p * KEYS * 128 + r * 128, map, bar, p * 64, w.kvh, key, w.view);
            }
        };
        if (lead)
            for (int t = tiles - 1; t >= 0; t--, step++) {
                const auto at = ring_place<STAGES>::of(step);
                sm.keys.wait_free(at);
                const uint32_t keys_full = sm.keys.expect(at, sizeof sm.k[0]);
                copy(W::k(m, w), stage_address(sm.k, at.stage), keys_full, t);
                sm.values.wait_free(at);
                const uint32_t values_full = sm.values.expect(at, sizeof sm.v[0]);
                copy(W::v(m, w), stage_address(sm.v, at.stage), values_full, t);
            }
        free_turn(sm, turn);
    }
}

/* Varlen: list rows that no tile has, of those that the kernel makes. The planner of each block calls. */
static __device__ __forceinline__ void pad_lists(const sm90_choice &c, const attend_kernel &a)
{
    const seqs &s = a.sq;
    if (!c.here || c.blocks == NULL || s.cu_q == NULL) return;
    const int lane = threadIdx.x & 31;
    int64_t rows = 0;
    for (int64_t b = lane; b < s.batch; b += 32) {
        const int64_t n = cu_seqlens_at(s.cu_q, b + 1, s.n_q) - cu_seqlens_at(s.cu_q, b, s.n_q);
        rows += n > 0 ? (n + a.tile - 1) / a.tile : 0;
    }
    for (int i = 16; i > 0; i /= 2) rows += __shfl_xor_sync(~0u, rows, i);
    for (int64_t row = rows + blockIdx.x; row < c.rows; row += gridDim.x)
        for (int u = 0; u < a.units; u++) {
            for (int i = lane; i < c.rule.k; i += 32) c.blocks[u * c.stride[1] + row * c.stride[2] + i] = -1;
            if (c.count != NULL && lane == 0) c.count[u * c.count_stride[1] + row * c.count_stride[2]] = 0;
        }
}

/* Of a clean list's slots, the tiles that every row sees whole. All lanes of the warp call. */
__device__ __forceinline__ void three_branches::find_whole(turn &w, const int32_t *list, int kept, int block)
{
    int whole = 0;
    for (int i0 = 0; i0 < kept; i0 += 32) {
        const int i = i0 + (threadIdx.x & 31);
        whole += __popc(__ballot_sync(~0u, i < kept && (int64_t)(list[i] + 1) * block <= w.hi));
    }
    if ((threadIdx.x & 31) == 0) {
        w.base = w.whole_from = 0; /* slots stand for keys */
        w.whole_to = whole * block / KEYS;
    }
}

/* Fills in what the rows of a turn see in its branch; `number`: the rows' sequence, whose keys in other
 * branches than the first may be others. */
static __device__ __forceinline__ void find_branch(const sm90_gated &call, int32_t number, bool other,
                                                   gated_turn *w)
{
    const attend_kernel &a = call.branch[w->branch];
    const sm90_seen &seen = call.seen[w->branch];
    if (other && a.sq.cu_q == NULL) w->nk = (int32_t)a.sq.n_kv;
    else if (other) {
        const int32_t *const cu = a.sq.cu_kv != NULL ? a.sq.cu_kv : a.sq.cu_q;
        w->k0 = (int32_t)cu_seqlens_at(cu, number, a.sq.n_kv);
        w->nk = (int32_t)cu_seqlens_at(cu, number + 1, a.sq.n_kv) - w->k0;
        w->nk = w->nk > 0 ? w->nk : 0;
    }
    const int position = seen.from_end ? w->nk - w->nq : 0;
    w->before = seen.before + position;
    w->after = seen.after + position;
    w->stride_m = seen.stride.m;
    w->stride_s = seen.stride.s;
    w->scale_log2 = a.scale_log2;
    w->slots = 0;
    if (w->queries == 0) return;
    keys_of_row(*w, w->query, &w->base, &w->hi);
    keys_of_row(*w, w->query + w->queries - 1, &w->lo, &w->end);
    w->slots = w->end > w->base ? w->end - w->base : 0;
    const seen_tiles whole = find_seen<KEYS, false>(*w);
    w->whole_from = whole.from;
    w->whole_to = whole.to;
}

/* Says that there are no more turns than `turn`. */
template <int D, typename W> __device__ __forceinline__ void end_turns(int turn, shared<D, W> &sm)
{
    gated_turn &left = sm.plan[turn % SM90_BRANCHES];
    if ((threadIdx.x & 31) == 0) left.queries = -1;
    sm.plans.give(ring_place<SM90_BRANCHES>::of(turn)); /* each lane's, for what it wrote */
}

/* Warp 3 of the feeder: plans the turns, as far ahead as there are places. A piece that ended with something
 * that is not finite comes again; whether it did is known when the piece after the next one is planned. */
template <int D, typename W>
__device__ __forceinline__ void three_branches::plan_pieces(const call &a, const work_plan &plan,
                                                            shared<D, W> &sm)
{
    int32_t next = W::first_piece(a, plan), before[2] = {-1, -1}; /* planned before, the last one first */
    pad_lists(a.choice, a.branch[1]);
    for (int turn = 0;;) {
        const int piece = turn / SM90_BRANCHES;
        int32_t index = next;
        wait_end_before(sm, turn);
        const bool drained = next >= plan.total;
        bool again = before[1] >= 0 && sm.again[(piece - 2) % PIECES] != 0;
        if (again) {
            index = before[1];
        } else if (drained) {
            for (int i = 1; i < SM90_BRANCHES; i++) wait_end_before(sm, turn + i);
            again = before[0] >= 0 && sm.again[(piece - 1) % PIECES] != 0;
            if (!again) return end_turns(turn, sm);
            index = before[0];
            before[0] = -1;
        }
        before[1] = before[0];
        before[0] = again ? -1 : index;
        __syncwarp(); /* all have read */
        if ((threadIdx.x & 31) == 0) sm.again[piece % PIECES] = 0;
        gated_turn w = {};
        int32_t number = 0;
        w.again = again;
        W::find(a, plan, index, &w, &number);
#pragma unroll 1
        for (int i = 0; i < SM90_BRANCHES; i++, turn++) {
            begin_turn(turn, &w);
            find_branch(a, number, i > 0, &w);
            if (W::MASKS && a.choice.here && w.queries > 0 && w.slots == 0) w.slots = 1; /* all hidden */
            W::share(a, plan, index, &w);
            w.list_later = W::listed(w) && a.choice.here;
            if (w.list_later) w.slots = 0;
            if (turn == 1 && !a.choice.here) wait_for_before(); /* what chooses waits itself */
            publish_turn(a, w, turn, sm);
        }
        if (!again && !drained) next = W::piece_after(a, plan, next);
    }
}

/* A tile of V becomes finite. */
template <typename T, int D, typename W>
__device__ __forceinline__ void search_tile(shared<D, W> &sm, int stage)
{
    const bool found = find_nonfinite<T, sizeof sm.v[0], 1, true>((char *)sm.v[stage], 0);
    if ((threadIdx.x & 31) == 0) sm.nonfinite[stage] = found;
    sm.searched.arrive(stage); /* each lane's, for what it wrote */
}

/* Warp 1 of the feeder: searches the tiles of V of a piece that is computed again. The end of the turn before
 * tells it that the tiles are those that it counts: `step` before this turn's, which it adds. */
template <typename T, int D, typename W>
__device__ __forceinline__ int search_again(const gated_turn &w, int turn, int step, shared<D, W> &sm)
{
    const int tiles = (w.slots + KEYS - 1) / KEYS;
    if (w.again && tiles > 0) {
        if (turn > 0) {
            const auto at = ring_place<SM90_BRANCHES>::of(turn - 1);
            sm.plans.wait_used(at);
        }
        for (int t = 0; t < tiles; t++) {
            const auto at = ring_place<STAGES>::of(step + t);
            sm.values.wait_full(at);
            search_tile<T>(sm, at.stage);
        }
    }
    return step + tiles;
}

/* Warp 1 of the feeder: makes lists. */
template <typename T, int D, typename W>
__device__ __forceinline__ void three_branches::make_lists(const call &a, shared<D, W> &sm)
{
    int step = 0, made = 0;
    int32_t entry0 = 0, entries = 0;
    float sum[D / 32] = {}; /* of the rows of a piece's tile */
    for (int turn = 0;; turn++) {
        gated_turn &w = wait_turn(sm, turn);
        if (w.queries < 0) return;
        if (w.branch == 0) entry0 = w.k0, entries = w.nk;
        if (w.first && w.queries > 0 && a.choice.here) {
            sm.sums_full.wait(ring_place<1>::of(made));
            read_sums<T, D>(a.branch[1], w, sm.other.sum, sum);
            sm.sums_read.arrive({}); /* each lane's, for what it read */
            made++;
        }
        if (w.list_later) {
            int kept = 0;
            if (w.queries > 0)
                kept = choose_by_mean<T, D>(sum, a.choice, a.branch[0], a.branch[1], w, entry0, entries,
                                            sm.list);
            find_whole(w, sm.list, kept, a.branch[1].list_block);
            if ((threadIdx.x & 31) == 0) w.slots = kept * a.branch[1].list_block;
            sm.list_full.arrive({}); /* each lane's, for what it wrote */
            __syncwarp();
        }
        step = search_again<T>(w, turn, step, sm);
        free_turn(sm, turn);
    }
}

} // namespace sm90_gate

#endif
