/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention's forward on Hopper for bf16 and f16, every mask; after FlashAttention-3
 * (arXiv 2407.08608).
 *
 * A persistent block is one warpgroup that feeds (feed.cuh) and GROUPS that compute, each with
 * 64 of the block's rows. The feeder's warp 0 copies Q, K and V by TMA into two stages; warps 1 and 2 look
 * for what is not finite in V's tiles that some row does not see whole; warp 3 plans (sm90/work.cuh) and
 * sorts lists. A computing warpgroup walks its keys from the last to the first: S = Q K^T (wgmma, of ranges
 * at D = 128 with Q from registers), softmax in registers, O += P V with P from registers. The next tile's
 * Q K^T starts before this tile's softmax, and named barriers let the warpgroups take turns, so that one's
 * softmax runs beside another's products. O leaves by TMA from where its rows' Q was, while the next piece
 * begins.
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

#include "common/launch.cuh"
#include "attend/sm90_forward/feed.cuh"

namespace sm90_forward
{

/* Q of a warp's rows, from row0 on of the tile at `q`, as the operand of Q K^T. */
template <int DK, int M>
__device__ __forceinline__ void load_queries(uint32_t (&held)[DK / 16][4], uint32_t q, int row0)
{
#pragma unroll
    for (int i = 0; i < DK / 16; i++) load_a<M>(held[i], q, row0, i * 16, threadIdx.x & 31);
}

/* Begins S = Q K^T of the first TILES * 8 keys of a tile: Q as `held`, or the warpgroup's rows at `q`. */
template <typename T, int DK, int DV, typename W, int TILES, int HELD>
__device__ __forceinline__ void multiply_queries(float (&s)[TILES][4], const uint32_t (&held)[HELD][4],
                                                 uint32_t q, uint32_t k)
{
    typedef layout<DK, DV, W> at;
    const uint64_t rows = wg_fresh(wg_tile(q, 0)), keys = wg_fresh(wg_tile(k, 0));
#pragma unroll
    for (int c = 0; c < DK; c += 16) {
        const uint64_t da = wg_further(rows, (c >> 6) * (at::M * 128) + (c & 63) * 2),
                       db = wg_further(keys, (c >> 6) * (at::KEYS * 128) + (c & 63) * 2);
        if constexpr (shape<DK, DV, W>::HELD) {
            if (c == 0) wg_rs_wide<T, TILES * 8, false, false>(s, held[c / 16], db);
            else wg_rs_wide<T, TILES * 8, true, false>(s, held[c / 16], db);
        } else {
            if (c == 0) wg_ss_wide<T, TILES * 8, false>(s, da, db);
            else wg_ss_wide<T, TILES * 8, true>(s, da, db);
        }
    }
    wg_commit();
}

/* O += P V of a tile. */
template <typename T, int DV, int KEYS>
__device__ __forceinline__ void multiply_values(float (&o)[DV / 8][4], const uint32_t (&p)[KEYS / 16][4],
                                                uint32_t tile)
{
    const uint64_t v = wg_fresh(wg_tile(tile, KEYS * 128));
    wg_start();
#pragma unroll
    for (int c = 0; c < KEYS; c += 16) wg_rs_wide<T, DV, true, true>(o, p[c / 16], wg_further(v, c * 128));
    wg_commit();
}

/* Waits until V of a tile is searched; whether something was not finite. */
template <int DK, int DV, typename W>
__device__ __forceinline__ bool wait_clean(const char *smem, uint32_t base, int stage, uint32_t *parities)
{
    typedef layout<DK, DV, W> at;
    mbar_wait(base + at::V_CLEAN + 8 * stage, *parities >> stage & 1);
    *parities ^= 1u << stage;
    const int32_t *found = (const int32_t *)(smem + at::ODD) + stage * HELPERS;
    const int odd = (threadIdx.x & 31) == 0 ? found[0] | found[W::SEARCHERS - 1] : 0;
    return __shfl_sync(~0u, odd, 0) != 0; /* lane 0 frees V */
}

/* Leaves O of a warp's rows to the copy engine, which reads it from their place in the tile of Q at `tile`;
 * false where the piece is not whole or O's rows are none of its boxes. */
template <typename T, int DK, int DV, typename W, int OT>
__device__ __forceinline__ bool
send_rows(const float (&o)[OT][4], const attend_kernel &a, const work_plan &plan, const typename W::maps &m,
          const typename W::turn &w, const row_state &r, const int (&place)[2], uint32_t tile)
{
    if (m.heads == 0 || w.queries < plan.queries) return false;
    constexpr int M = layout<DK, DV, W>::M;
    const int row0 = __shfl_sync(~0u, place[0], 0), n = (int)quotient((uint32_t)row0, a.by_hs);
    leave_tile<T, M>(o, a, w, r, place, tile, row0);
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
        for (int p = 0; p < DV / 64; p++)
            tma_store(m.o, tile + p * (M * 128) + row0 * 128, p * 64, w.head0 + row0 - n * a.hs,
                      w.q0 + w.query + n, w.view);
        tma_commit();
    }
    return true;
}

/* A computing warpgroup. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void compute(const typename W::call &call, const work_plan &plan,
                                        const typename W::maps &m, char *smem, uint32_t base, int group)
{
    typedef layout<DK, DV, W> at;
    typedef shape<DK, DV, W> sh;
    constexpr int KEYS = at::KEYS, GROUPS = sh::GROUPS, NT = KEYS / 8, OT = DV / 8, QS = at::Q_STAGES;
    const int lane = threadIdx.x & 31, row0 = group * 64 + (threadIdx.x >> 5 & 3) * 16, own = 1 + group,
              next = 1 + (group + 1) % GROUPS;
    const int place[2] = {row0 + (lane >> 2), row0 + (lane >> 2) + 8};
    int step = 0, used = 0, owed = -1; /* owed: the stage of Q where a copy may still read O */
    uint32_t clean = 0;                /* the parity of each stage's V_CLEAN */
    auto arrive = [&](uint32_t bar) {
        if (lane == 0) mbar_arrive(base + bar);
    };
    if (group == GROUPS - 1) named_arrive(1, 256); /* the first warpgroup goes first */
    for (int turn = 0;; turn++) {
        const typename W::turn &w = wait_turn<DK, DV, W>(smem, base, turn);
        if (w.queries < 0) break;
        const attend_kernel &a = W::mask(call, w);
        const int32_t *list = list_of<DK, DV, W>(smem, turn);
        const int tiles = (w.slots + KEYS - 1) / KEYS;
        const uint32_t q_tile = base + at::Q + used % QS * at::Q_STAGE;
        const seen_tiles seen = seen_of<KEYS, W>(w); /* at DV = 256 registers are too few to keep it */
        bool sent = false;
        row_state r = begin_rows(a, w, place);
        float o[OT][4] = {}, s[NT][4], shrink[2];
        uint32_t p[NT / 2][4], held[sh::HELD ? DK / 16 : 1][4];
        auto sees = [&](int t) {
            return sees_tile<KEYS, W>(a, w, DV > 128 ? seen_of<KEYS, W>(w) : seen, list, t);
        };
        auto searches = [&](int t) { return !sees(t); }; /* whether the feeder searches V */
        auto scores = [&](auto &part, int stage) {
            multiply_queries<T, DK, DV, W>(part, held, q_tile + group * 64 * 128,
                                           base + at::K + stage * at::K_STAGE);
        };
        auto weigh = [&](auto &part, int stage, int t) {
            arrive(at::K_FREE + 8 * stage);
            if (!sees(t)) hide_turn_unseen<W>(part, a, w, list, r, t * KEYS);
            softmax(part, r, shrink, a.scale_log2);
        };
        auto begin = [&](auto &part, auto &packed, int stage) {
            wg_start();
            scores(part, stage);
            wg_wait<0>(part);
            weigh(part, stage, tiles - 1);
            pack_rows<T>(part, packed);
        };
        auto values = [&](int at_step, int t) {
            const int stage = at_step % STAGES;
            mbar_wait(base + at::V_FULL + 8 * stage, at_step / STAGES & 1);
            if (searches(t) && wait_clean<DK, DV, W>(smem, base, stage, &clean))
                add_turn_nonfinite<T, KEYS, W>(o, a, w, list, r, t * KEYS);
            multiply_values<T, DV, KEYS>(o, p, base + at::V + stage * at::V_STAGE);
        };
        if (tiles > 0) {
            mbar_wait(base + at::Q_FULL + 8 * (used % QS), used / QS & 1);
            if constexpr (sh::HELD) load_queries<DK, at::M>(held, q_tile, row0);
            mbar_wait(base + at::K_FULL + 8 * (step % STAGES), step / STAGES & 1);
            if (sh::HALVES && w.slots - (tiles - 1) * KEYS <= KEYS / 2) {
                begin(first_half(s), first_half(p), step % STAGES);
                clear_second_half(p);
            } else {
                begin(s, p, step % STAGES);
            }
            if (owed >= 0 && lane == 0) tma_wait_read();
            if (owed >= 0) arrive(at::Q_FREE + 8 * owed);
            owed = -1;
            for (int t = tiles - 2; t >= 0; t--) {
                step++;
                mbar_wait(base + at::K_FULL + 8 * (step % STAGES), step / STAGES & 1);
                named_sync(own, 256);
                wg_start();
                scores(s, step % STAGES);
                values(step - 1, t + 1);
                named_arrive(next, 256);
                wg_wait<1>(s);
                weigh(s, step % STAGES, t);
                wg_wait<0>(o);
                arrive(at::V_FREE + 8 * ((step - 1) % STAGES));
                pack_rows<T>(s, p);
                if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) shrink_rows(o, shrink);
            }
            if (!sh::BULK) arrive(at::Q_FREE + 8 * (used % QS));
            values(step, 0);
            wg_wait<0>(o);
            arrive(at::V_FREE + 8 * (step % STAGES));
            step++;
            if constexpr (sh::BULK) sent = send_rows<T, DK, DV, W>(o, a, plan, m, w, r, place, q_tile);
            if (sent) owed = used % QS;
            else if (sh::BULK) arrive(at::Q_FREE + 8 * (used % QS));
            used++;
        }
        if (w.queries > 0 && !sent) store_rows<T, OT>(o, a, w, r, place);
        free_turn<DK, DV, W>(base, turn);
    }
    if (sh::BULK && lane == 0) tma_wait_read();
}

/* A block of threads. */
template <typename T, int DK, int DV, typename W>
__device__ __forceinline__ void take_turns(const typename W::call &call, const work_plan &plan,
                                           const typename W::maps &m)
{
#ifdef QUERN_WGMMA
    typedef layout<DK, DV, W> at;
    typedef shape<DK, DV, W> sh;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    if constexpr (W::GATED) W::fetch_maps(m);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbar_init(base + at::Q_FULL + 8 * i, 1), mbar_init(base + at::Q_FREE + 8 * i, 4 * sh::GROUPS);
            mbar_init(base + at::K_FULL + 8 * i, 1), mbar_init(base + at::K_FREE + 8 * i, 4 * sh::GROUPS);
            mbar_init(base + at::V_FULL + 8 * i, 1),
                mbar_init(base + at::V_FREE + 8 * i, 4 * sh::GROUPS + (W::GATED ? 0 : W::SEARCHERS));
            mbar_init(base + at::V_CLEAN + 8 * i, W::SEARCHERS * WARP_ARRIVALS);
        }
        for (int i = 0; i < W::TURNS; i++)
            mbar_init(base + at::TURN_FULL + 8 * i, WARP_ARRIVALS),
                mbar_init(base + at::TURN_FREE + 8 * i, (1 + HELPERS + 4 * sh::GROUPS) * WARP_ARRIVALS);
        if constexpr (W::GATED)
            mbar_init(base + at::GATES_FULL, W::GATE_WARPS * WARP_ARRIVALS),
                mbar_init(base + at::LIST_FULL, WARP_ARRIVALS), W::template init_more<W>(base + at::EXTRA);
        mbar_init_done();
    }
    if constexpr (W::GATED) W::meet(call);
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<sh::FEED>();
        if (warp == 0) feed<DK, DV, W>(call, plan, m, smem, base);
        else if constexpr (!W::GATED) {
            if (warp <= HELPERS) search<T, DK, DV, W>(call, smem, base);
            else plan_turns<DK, DV, W>(call, plan, smem, base);
        } else if (W::GATE_WARPS < 2 && warp == 1) W::template leave_lists<T, DK, DV, W>(call, smem, base);
        else if (warp <= 2) W::template leave_gates<T, DK, DV, W>(call, 2 - warp, smem, base);
        else W::template plan_pieces<DK, DV, W>(call, plan, smem, base);
        if constexpr (W::GATED) W::meet_wait(call), W::part(call);
    } else {
        registers_up<sh::COMPUTE>();
        if constexpr (W::GATED) W::template walk<T, DK, DV, W>(call, smem, base, group - 1), W::part(call);
        else compute<T, DK, DV, W>(call, plan, m, smem, base, group - 1);
    }
#endif
}

template <typename T, int DK, int DV, bool LISTED>
__global__ void __launch_bounds__(128 * (shape<DK, DV, one_mask<LISTED>>::GROUPS + 1), 1)
    attend_forward_sm90(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                        const __grid_constant__ maps m)
{
    take_turns<T, DK, DV, one_mask<LISTED>>(a, plan, m);
}

/* Pieces of at most `rows` rows, tiles of `keys` keys; of no tile of queries but one where `listed`. */
static inline work_plan plan_of(const attend_args *args, const attend_kernel &a, bool listed, int rows,
                                int keys)
{
    work_plan plan = {0, 0, rows / a.hs, 1, keys, NULL};
    if (listed) {
        if (plan.queries > a.tile) plan.queries = a.tile;
        plan.per_tile = (a.tile + plan.queries - 1) / plan.queries;
        plan.box = 16;
        while (plan.box < keys && a.list_block % (2 * plan.box) == 0) plan.box *= 2;
    }
    plan.pieces = (int32_t)(piece_bound(args->seqs, listed ? a.tile : plan.queries, 1) * plan.per_tile);
    plan.total = plan.pieces * a.units;
    return plan;
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
    typedef shape<DK, DV, one_mask<LISTED>> sh;
    work_plan plan = plan_of(args, a, LISTED, sh::M, sh::KEYS);
    if (plan.total == 0) return QUERN_OK;
    maps m;
    quern_status status = tma_describe(&m.q, args->q, a.hs, plan.queries);
    m.heads = sh::BULK && tma_can(args->o) ? box_heads(a.hs) : 0;
    if (status == QUERN_OK && m.heads > 0) status = tma_describe(&m.o, args->o, m.heads, 16 / m.heads);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, plan.box);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, plan.box);
    if (status == QUERN_OK) status = sm90_count_from_zero(plan.total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    return launch_shared({stream, NULL}, attend_forward_sm90<T, DK, DV, LISTED>, dim3(blocks),
                         128 * (sh::GROUPS + 1), layout<DK, DV, one_mask<LISTED>>::BYTES,
                         "attend_forward_sm90", a, plan, m);
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
