/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the warps that plan and make lists in kernel.cuh's kernels; warp 0, which copies, is
 * attend/sm90_forward/feed.cuh's, but for the rows of which lists are made. */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_FEED_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_FEED_CUH

#include "attend_gate/sm90/turns.cuh"

namespace sm90_forward
{

/* One thread of warp 0 copies the rows of the tile's other piece. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::copy_others(const call &a, const work_plan &plan,
                                                            const maps &m, const turn &w, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    const int other = a.choice.here ? other_piece<at::M>(tile_of(a.branch[1], w), w) : -1;
    if (other < 0) return;
    mbar_expect(base + at::EXTRA + OTHER_FULL, DK / 64 * plan.queries * 128);
#pragma unroll
    for (int p = 0; p < DK / 64; p++)
        tma_load(base + at::SUMS + p * at::M * 128, m.q, base + at::EXTRA + OTHER_FULL, p * 64, w.head0,
                 w.q0 + other, w.view);
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
template <int KEYS>
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
template <int KEYS>
__device__ __forceinline__ void find_branch(const sm90_gated &call, int32_t number, bool other, gated_turn *w)
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
template <int DK, int DV, typename W>
__device__ __forceinline__ void end_turns(int turn, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    typename W::turn &left = ((typename W::turn *)(smem + at::TURN))[turn % W::TURNS];
    if ((threadIdx.x & 31) == 0) left.queries = -1;
    mbar_arrive(base + at::TURN_FULL + 8 * (turn % W::TURNS)); /* each lane's, for what it wrote */
}

/* Warp 3 of the feeder: plans the turns, as far ahead as there are places. A piece that ended with something
 * that is not finite comes again; whether it did is known when the piece after the next one is planned. */
template <int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::plan_pieces(const call &a, const work_plan &plan, char *smem,
                                                            uint32_t base)
{
    typedef layout<DK, DV, W> at;
    int32_t next = W::first_piece(a, plan), before[2] = {-1, -1}; /* planned before, the last one first */
    pad_lists(a.choice, a.branch[1]);
    for (int turn = 0;;) {
        const int piece = turn / SM90_BRANCHES;
        int32_t index = next;
        wait_end_before<DK, DV, W>(base, turn);
        const bool drained = next >= plan.total;
        bool again = before[1] >= 0 && *odd_piece<at>(smem, piece - 2) != 0;
        if (again) {
            index = before[1];
        } else if (drained) {
            for (int i = 1; i < SM90_BRANCHES; i++) wait_end_before<DK, DV, W>(base, turn + i);
            again = before[0] >= 0 && *odd_piece<at>(smem, piece - 1) != 0;
            if (!again) return end_turns<DK, DV, W>(turn, smem, base);
            index = before[0];
            before[0] = -1;
        }
        before[1] = before[0];
        before[0] = again ? -1 : index;
        __syncwarp(); /* all have read */
        if ((threadIdx.x & 31) == 0) *odd_piece<at>(smem, piece) = 0;
        typename W::turn w = {};
        int32_t number = 0;
        w.again = again;
        W::find(a, plan, index, &w, &number);
#pragma unroll 1
        for (int i = 0; i < SM90_BRANCHES; i++, turn++) {
            begin_turn(turn, &w);
            find_branch<at::KEYS>(a, number, i > 0, &w);
            if (W::MASKS && a.choice.here && w.queries > 0 && w.slots == 0) w.slots = 1; /* all hidden */
            W::share(a, plan, index, &w);
            w.list_later = W::listed(w) && a.choice.here;
            if (w.list_later) w.slots = 0;
            if (turn == 1 && !a.choice.here) wait_for_before(); /* what chooses waits itself */
            leave_turn<DK, DV, W>(a, w, turn, smem, base);
        }
        if (!again && !drained) next = W::piece_after(a, plan, next);
    }
}

/* Warp 1 of the feeder: searches the tiles of V of a piece that is computed again. The end of the turn before
 * tells it that the tiles are those that it counts: `step` before this turn's, which it adds. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ int search_again(const typename W::turn &w, int turn, int step, char *smem,
                                            uint32_t base)
{
    typedef layout<DK, DV, W> at;
    const int tiles = (w.slots + at::KEYS - 1) / at::KEYS;
    if (w.again && tiles > 0) {
        if (turn > 0)
            mbar_wait(base + at::TURN_FREE + 8 * ((turn - 1) % W::TURNS), (turn - 1) / W::TURNS & 1);
        for (int t = 0; t < tiles; t++) {
            const int stage = (step + t) % STAGES;
            mbar_wait(base + at::V_FULL + 8 * stage, (step + t) / STAGES & 1);
            search_tile<T, DK, DV, W>(smem, base, stage, 0);
        }
    }
    return step + tiles;
}

/* Warp 1 of the feeder: makes lists. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void three_branches::leave_lists(const call &a, char *smem, uint32_t base)
{
    typedef layout<DK, DV, W> at;
    int step = 0, made = 0;
    int32_t entry0 = 0, entries = 0;
    float sum[DK / 32] = {}; /* of the rows of a piece's tile */
    for (int turn = 0;; turn++) {
        typename W::turn &w = *(typename W::turn *)&wait_turn<DK, DV, W>(smem, base, turn);
        if (w.queries < 0) return;
        if (w.branch == 0) entry0 = w.k0, entries = w.nk;
        if (w.first && w.queries > 0 && a.choice.here) {
            mbar_wait(base + at::EXTRA + SUMS_FULL, made & 1);
            read_sums<T, DK>(a.branch[1], w, (const float *)(smem + at::SUMS + at::Q_STAGE), sum);
            mbar_arrive(base + at::EXTRA + SUMS_READ); /* each lane's, for what it read */
            made++;
        }
        if (w.list_later) {
            int kept = 0;
            if (w.queries > 0)
                kept = choose_by_mean<T, DK>(sum, a.choice, a.branch[0], a.branch[1], w, entry0, entries,
                                             (int32_t *)(smem + at::LIST));
            find_whole<at::KEYS>(w, (const int32_t *)(smem + at::LIST), kept, a.branch[1].list_block);
            if ((threadIdx.x & 31) == 0) w.slots = kept * a.branch[1].list_block;
            mbar_arrive(base + at::LIST_FULL); /* each lane's, for what it wrote */
            __syncwarp();
        }
        step = search_again<T, DK, DV, W>(w, turn, step, smem, base);
        free_turn<DK, DV, W>(base, turn);
    }
}

} // namespace sm90_forward

#endif
