/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention's forward on Hopper for bf16 and f16, every mask; after FlashAttention-3
 * (arXiv 2407.08608).
 *
 * A persistent block is one warpgroup that feeds (feed.cuh) and GROUPS that compute, each with
 * 64 of the block's rows. The feeder's warp 0 copies Q, K and V by TMA into two stages; warps 1 and 2 look
 * for what is not finite in V's tiles that some row does not see whole; warp 3 plans (sm90/schedule.cuh) and
 * sorts lists. A computing warpgroup walks its keys from the last to the first: S = Q K^T (wgmma, of ranges
 * at D = 128 with Q from registers), softmax in registers, O += P V with P from registers. The next tile's
 * Q K^T starts before this tile's softmax, and up to D = 128 named barriers let the warpgroups take turns, so
 * that one's softmax runs beside another's products. TMA stores O from where its rows' Q was, while the next
 * piece begins.
 *
 * NaN and infinity in V reach the rows that see them and no others: a factor of 0 does not undo them. Where a
 * tile is not seen whole, the searching warps set them to 0 in shared memory, and the rows that see them add
 * them from global memory.
 *
 * Registers at D = 128: O 64, S 64, P 32, Q 32 of 232; shared memory: Q 64 KB (two stages), K and V 128 KB.
 * Limit: the tensor cores and the power they take, with the 16 exponentials a clock and SM close behind at
 * D = 64.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_FORWARD_KERNEL_CUH
#define QUERN_CUDA_ATTEND_SM90_FORWARD_KERNEL_CUH

#include "attend/sm90/products.cuh"
#include "attend/sm90_forward/feed.cuh"
#include "common/launch.cuh"

#include <type_traits>

namespace sm90_forward
{

/* Gives O of a warp's rows to the copy engine, which reads it from their place in the tile of Q at `tile`;
 * false where the piece is not whole or O's rows are none of its boxes. */
template <typename T, int M, int OT>
__device__ __forceinline__ bool send_rows(const float (&o)[OT][4], const attend_kernel &a,
                                          const work_plan &plan, const maps &m, const work &w,
                                          const row_state &r, const int (&place)[2], uint32_t tile)
{
    if (m.heads == 0 || w.queries < plan.queries) return false;
    const int row0 = __shfl_sync(~0u, place[0], 0), n = (int)quotient((uint32_t)row0, a.by_hs);
    stage_tile<T, M>(o, a, w, r, place, tile, row0);
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
        for (int p = 0; p < OT / 8; p++)
            tma_store(m.o, tile + p * (M * 128) + row0 * 128, p * 64, w.head0 + row0 - n * a.hs,
                      w.q0 + w.query + n, w.view);
        tma_commit();
    }
    return true;
}

/* An arrival as one predicated instruction: among products a branch would make ptxas wait for them. */
__device__ __forceinline__ void arrive_if(bool here, uint32_t bar)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(bar),
        "r"((uint32_t)here)
        : "memory");
}

/* One lane frees a stage. */
template <bool PREDICATED, typename RING>
__device__ __forceinline__ void free_stage(RING &of, int stage, bool first)
{
    if constexpr (PREDICATED) arrive_if(first, smem_address(of.free) + stage * 8);
    else if (first) of.give_back(stage);
}

/* After a tile's softmax: its P as an operand, and O rescaled. */
template <typename T, int NT, int OT>
__device__ __forceinline__ void end_tile(const float (&s)[NT][4], uint32_t (&p)[NT / 2][4], float (&o)[OT][4],
                                         const float (&shrink)[2])
{
    pack_rows<T>(s, p);
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) shrink_rows(o, shrink);
}

/* A computing warpgroup. A tile is `whole` where all rows see all of it and of the tile before: its products
 * then have no branch among them. V of a tile that some row does not see whole is searched. */
template <typename T, int DK, int DV, bool LISTED>
__device__ __forceinline__ void compute(const attend_kernel &a, const work_plan &plan, const maps &m,
                                        shared<DK, DV, LISTED> &sm, int group)
{
    typedef shape<DK, DV, LISTED> sh;
    typedef ring_place<STAGES> place_of;
    constexpr int KEYS = sh::KEYS, M = sh::M, NT = KEYS / 8, OT = DV / 8, QS = sh::Q_STAGES;
    const int lane = threadIdx.x & 31, row0 = group * 64 + (threadIdx.x >> 5 & 3) * 16, own = 1 + group,
              next = 1 + (group + 1) % sh::GROUPS;
    const int place[2] = {row0 + (lane >> 2), row0 + (lane >> 2) + 8};
    int step = 0, used = 0, owed = -1; /* owed: the stage of Q where a copy may still read O */
    uint32_t searched = 0;             /* the parity of each stage's barrier */
    auto give_back = [&](auto &of, int stage) { free_stage<sh::WHOLES>(of, stage, lane == 0); };
    if (sh::TURNS && group == sh::GROUPS - 1) named_arrive(1, 256); /* the first warpgroup goes first */
    for (int n = 0;; n++) {
        const work &w = sm.wait_plan(n);
        if (w.queries < 0) break;
        const int32_t *list = sm.list_of(n);
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        const uint32_t q_tile = stage_address(sm.q, used % QS);
        const seen_tiles seen = find_seen<KEYS, LISTED>(w); /* at DV = 256 registers are too few to keep it */
        bool sent = false;
        row_state r = begin_rows(a, w, place);
        float o[OT][4] = {}, s[NT][4], shrink[2];
        uint32_t p[NT / 2][4], held[sh::HELD ? DK / 16 : 1][4];
        auto sees = [&](int t) {
            return tile_seen(DV > 128 ? find_seen<KEYS, LISTED>(w) : seen, t);
        };
        auto scores = [&](auto &part, int stage) {
            multiply_queries<T, DK, M, KEYS>(part, held, q_tile + group * 64 * 128,
                                             stage_address(sm.k, stage));
        };
        auto weigh = [&](auto whole, auto &part, int t) {
            give_back(sm.keys, step % STAGES);
            if (!whole && !sees(t))
                hide_unseen<sizeof part / sizeof *part, LISTED>(part, a, w, list, r, t * KEYS);
            softmax(part, r, shrink, a.scale_log2);
        };
        auto begin = [&](auto &part, auto &packed) {
            wg_start();
            scores(part, step % STAGES);
            wg_wait<0>(part);
            weigh(std::false_type(), part, tiles - 1);
            pack_rows<T>(part, packed);
        };
        auto values = [&](auto whole, int at_step, int t) {
            const auto at = place_of::of(at_step);
            if (!whole) sm.values.wait_full(at);
            if (!whole && !sees(t) && sm.wait_searched(at.stage, &searched))
                add_nonfinite<T, KEYS, OT, LISTED>(o, a, w, list, r, t * KEYS);
            multiply_values<T, DV, KEYS>(o, p, stage_address(sm.v, at.stage));
        };
        if (tiles > 0) {
            sm.queries.wait_full(ring_place<QS>::of(used));
            if constexpr (sh::HELD) load_queries<DK, M>(held, q_tile, row0);
            sm.keys.wait_full(place_of::of(step));
            if (sh::HALVES && w.slots - (tiles - 1) * KEYS <= KEYS / 2) {
                begin(first_half(s), first_half(p));
                clear_second_half(p);
            } else {
                begin(s, p);
            }
            if (owed >= 0 && lane == 0) tma_wait_read();
            if (owed >= 0) give_back(sm.queries, owed);
            owed = -1;
            auto next_tile = [&](auto whole, int t) {
                step++;
                sm.keys.wait_full(place_of::of(step));
                if (whole) sm.values.wait_full(place_of::of(step - 1));
                if (sh::TURNS) named_sync(own, 256);
                wg_start();
                scores(s, step % STAGES);
                values(whole, step - 1, t + 1);
                if (sh::TURNS) named_arrive(next, 256);
                wg_wait<1>(s);
                weigh(whole, s, t);
                wg_wait<0>(o);
                give_back(sm.values, (step - 1) % STAGES);
                end_tile<T>(s, p, o, shrink);
            };
            for (int t = tiles - 2; t >= 0; t--) {
                if constexpr (sh::WHOLES) {
                    const seen_tiles all = DV > 128 ? find_seen<KEYS, LISTED>(w) : seen;
                    if (t + 1 < all.to)
                        for (; t >= all.from; t--) next_tile(std::true_type(), t);
                }
                if (!sh::WHOLES || t >= 0) next_tile(std::false_type(), t);
            }
            if (!sh::BULK) give_back(sm.queries, used % QS);
            values(std::false_type(), step, 0);
            wg_wait<0>(o);
            give_back(sm.values, step % STAGES);
            step++;
            if constexpr (sh::BULK) sent = send_rows<T, M>(o, a, plan, m, w, r, place, q_tile);
            if (sent) owed = used % QS;
            else if (sh::BULK) give_back(sm.queries, used % QS);
            used++;
        }
        if (w.queries > 0 && !sent) store_rows<T, OT>(o, a, w, r, place);
        sm.give_back_plan(n);
    }
    if (sh::BULK && lane == 0) tma_wait_read();
}

template <typename T, int DK, int DV, bool LISTED>
__global__ void __launch_bounds__(128 * (shape<DK, DV, LISTED>::GROUPS + 1), 1)
    attend_forward_sm90(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                        const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef shape<DK, DV, LISTED> sh;
    extern __shared__ __align__(1024) char smem[];
    shared<DK, DV, LISTED> &sm = *(shared<DK, DV, LISTED> *)smem;
    if (threadIdx.x == 0) sm.init();
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<sh::FEED>();
        if (warp == 0) copy_tiles(a, plan, m, sm);
        else if (warp <= SEARCHERS) search_values<T>(a, warp - 1, sm);
        else plan_pieces(a, plan, sm);
    } else {
        registers_up<sh::COMPUTE>();
        compute<T>(a, plan, m, sm, group - 1);
    }
#endif
}

/* Heads of a box of 16 rows, some queries with their `hs` heads or some heads of one; 0: rows fill none. */
static inline int box_heads(int hs)
{
    const int heads = hs < 16 ? hs : 16;
    return 16 % heads == 0 && hs % heads == 0 ? heads : 0;
}

template <typename T, int DK, int DV, bool LISTED>
static quern_status launch(const attend_args *args, const attend_kernel &a, const sm90_device &device,
                           void *workspace, cudaStream_t stream)
{
    typedef shape<DK, DV, LISTED> sh;
    work_plan plan = work_plan_of(args, a, LISTED, sh::M, sh::KEYS);
    if (plan.total == 0) return QUERN_OK;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, plan.queries);
    /* Where a piece's queries leave rows of the block empty, a box of these would reach the next piece. */
    m.heads = sh::BULK && plan.queries * a.hs == sh::M && tma_can(args->o) ? box_heads(a.hs) : 0;
    if (status == QUERN_OK && m.heads > 0) status = tma_describe(&m.o, args->o, m.heads, 16 / m.heads);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, plan.box);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, plan.box);
    if (status == QUERN_OK) status = sm90_count_from_zero(plan.total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    return launch_shared({stream, NULL}, attend_forward_sm90<T, DK, DV, LISTED>, dim3(blocks),
                         128 * (sh::GROUPS + 1), sizeof(shared<DK, DV, LISTED>), "attend_forward_sm90", a,
                         plan, m);
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_device &device,
                        void *workspace, cudaStream_t stream)
{
    return l.listed ? launch<T, DK, DV, true>(args, l.kernel, device, workspace, stream)
                    : launch<T, DK, DV, false>(args, l.kernel, device, workspace, stream);
}

} // namespace sm90_forward

#endif
