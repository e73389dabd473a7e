/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention's backward on Hopper for bf16 and f16, where keys are a range; after
 * FlashAttention-3 (arXiv 2407.08608).
 *
 *   P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta)
 *   dV = P^T row_scale dO, dK = scale dS^T Q, dQ = scale dS K: five products.
 * A block owns 128 keys, 64 each of two computing warpgroups, and walks the rows that see them: tiles of 64
 * queries from the last to the first, each with the heads of the group one after another. S and dP are
 * transposed: S^T = K Q^T has P^T and dS^T in registers as the A operands of dV and dK, which stay in
 * registers. dS^T also goes to shared memory, of which dQ is made: up to D = 128 by a warpgroup of its own
 * (dq_warpgroup.cuh; the walks: walk_64.cuh, walk_128.cuh), above by the two (walk_192.cuh).
 *
 * With lists of blocks, a block of threads owns 128 slots of one list: its rows are those of the list's tile,
 * all of which chose these keys. What it makes of dK and dV is that list's share (lists.cu adds them).
 *
 * Every key block adds its share of dQ to f32 sums in global memory: in d_q by boxes of TMA, in workspace a
 * tile at once (dq_sums.cuh). A counter for each tile and head says how many key blocks have added, and a
 * block waits until all before it have: the order is that of the keys, whoever computes them. A block waits
 * only for blocks that took a lower ticket, so some block can always go on. First keys, which see most rows,
 * go first. Blocks that start together walk the rows from the end, one step behind another; those that follow
 * (sm90_backward_plan's wave) begin one after the other, at their diagonals, and walk the other way: so they
 * stay beside each other, too, and L2 serves them all. Sums in workspace are stored in d_q by blocks without
 * keys (dq_sums.cuh); up to D = 128, a tile to which one block of keys alone comes is stored by that block.
 *
 * At D = 128, where no row of a tile sees one half of the keys, as at both ends of a window, that half's
 * warpgroup writes zeros for dQ and has nothing else to do.
 *
 * Warp 0 of the feeding warpgroup copies Q and dO by TMA; warp 1 fetches the rows' statistics, a step ahead
 * of their stage, and looks for what is not finite in rows that may hold it and do not see all of these keys;
 * warps 2 and 3 add dQ, every second step each. What is not finite in Q and dO becomes 0 between the products
 * that read it for S and dP and those for dK and dV, and the keys that such a row sees get it (NaN in dK). K
 * that is not finite becomes 0 for dQ's product, and the rows that see it get NaN.
 *
 * Shared memory at D = 64: K, V 32 KB, Q, dO 64 KB, dS 64 KB, dQ 32 KB; 128: 64, 64, 32 and 64 KB; 192/128:
 * 80, 80, 16 and 48 KB. Limit: shared memory, 1470, 2880 and 4030 clocks a step; the tensor cores need 1280,
 * 2560 and 3328.
 */
#ifndef QUERN_CUDA_ATTEND_SM90_BACKWARD_KERNEL_CUH
#define QUERN_CUDA_ATTEND_SM90_BACKWARD_KERNEL_CUH

#include "common/launch.cuh"
#include "attend/sm90_backward/walk_64.cuh"
#include "attend/sm90_backward/walk_128.cuh"
#include "attend/sm90_backward/walk_192.cuh"

namespace sm90_backward
{

template <int DK, int DV> struct shared {
    enum { STAGES = DK > 64 ? 2 : 4, DS_BUFFERS = DK > 128 ? 1 : STAGES, DQ_BUFFERS = DK > 128 ? 1 : 2 };
    typedef uint16_t panel_row[64];
    panel_row k[DK / 64][KEYS], v[DV / 64][KEYS], q[STAGES][DK / 64][ROWS], d_o[STAGES][DV / 64][ROWS];
    panel_row ds[DS_BUFFERS][KEYS]; /* transposed */
    float dq[DQ_BUFFERS][ROWS * DK];
    statistics stats[STAGES];
    /* Barriers: K and V are there; rows, and their statistics; dQ's buffers; both computing warpgroups; dS's
     * buffers; K is as it was. */
    uint64_t own_full, full[STAGES], free[STAGES], stats_full[STAGES], dq_free[DQ_BUFFERS], clean,
        ds_free[DS_BUFFERS], keys_back;
    int32_t ds_part[DS_BUFFERS]; /* `part` of the statistics of dS's step */
    key_block block;
};

/* Offsets into shared memory, where addresses are computed in 32 bits. */
template <int DK, int DV> struct layout {
    typedef shared<DK, DV> memory;
    static constexpr int DIM_K = DK, DIM_V = DV, KEYS = sm90_backward::KEYS, ROWS = sm90_backward::ROWS,
                         STAGES = memory::STAGES, DS_BUFFERS = memory::DS_BUFFERS,
                         DQ_BUFFERS = memory::DQ_BUFFERS;
    static constexpr int Q_BYTES = sizeof(memory::q[0]), DO_BYTES = sizeof(memory::d_o[0]),
                         DS_BYTES = sizeof(memory::ds[0]), DQ_BYTES = sizeof(memory::dq[0]);
    static constexpr int K = offsetof(memory, k), V = offsetof(memory, v), Q = offsetof(memory, q),
                         DO = offsetof(memory, d_o), DS = offsetof(memory, ds), DQ = offsetof(memory, dq),
                         STAT = offsetof(memory, stats);
    static constexpr bool DQ_WARPGROUP = DK <= 128; /* dQ has a warpgroup of its own */
    static constexpr int DQ_THREADS = DQ_WARPGROUP ? 128 : 128 * GROUPS,
                         THREADS = 128 * (1 + GROUPS + DQ_WARPGROUP);
    static constexpr int FEED = DQ_WARPGROUP ? 32 : 24, COMPUTE = DQ_WARPGROUP ? 208 : 240,
                         MAKE_DQ = 64; /* registers a thread */
    static_assert(FEED + GROUPS * COMPUTE + (DQ_WARPGROUP ? MAKE_DQ : 0) <= (DQ_WARPGROUP ? 512 : 504),
                  "setmaxnreg waits for registers that a launch does not have");
    static constexpr int DS_PART = offsetof(memory, ds_part), BLOCK = offsetof(memory, block);
    typedef ring_place<STAGES> place;
    typedef barriers_at<offsetof(memory, own_full), 1> own_full;
    typedef barriers_at<offsetof(memory, full), STAGES> full;
    typedef barriers_at<offsetof(memory, free), STAGES> free;
    typedef barriers_at<offsetof(memory, stats_full), STAGES> stats_full;
    typedef barriers_at<offsetof(memory, dq_free), DQ_BUFFERS> dq_free;
    typedef barriers_at<offsetof(memory, clean), 1> clean;
    typedef barriers_at<offsetof(memory, ds_free), DS_BUFFERS> ds_free;
    typedef barriers_at<offsetof(memory, keys_back), 1> keys_back;
    static constexpr bool FOURS = DK != 128;    /* a thread loads the statistics of four rows at once */
    static constexpr bool HALVES = DK == 128;   /* at D 64 steps are too short for it to pay */
    static constexpr bool ALONE = DQ_WARPGROUP; /* dQ's warpgroup stores tiles that no other block comes to */
    static_assert(store_ring<DK, THREADS / 128 - 1>::BYTES <= BLOCK, "the ring reaches into key_block");
    static_assert(sizeof(memory) <= 227 * 1024, "more than a block can have");
};

template <typename T, int DK, int DV>
__global__ void __launch_bounds__(layout<DK, DV>::THREADS, 1)
    attend_backward_sm90(const __grid_constant__ attend_kernel a,
                         const __grid_constant__ sm90_backward_plan plan, const __grid_constant__ maps m)
{
#ifdef QUERN_WGMMA
    typedef layout<DK, DV> at;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_address(smem);
    key_block &b = *(key_block *)(smem + at::BLOCK);
    if (threadIdx.x < 32) {
        const int ticket = take_ticket(plan);
        const bool stores = ticket >= plan.blocks,
                   found = !stores && find_keys<KEYS, ROWS>(a, plan, ticket, &b);
        if (threadIdx.x == 0 && !found) {
            b.tiles = -1;
            b.stores = stores;
        }
    }
    if (threadIdx.x == 0) {
        at::own_full::init(base, 0, 1);
        for (int i = 0; i < at::STAGES; i++) {
            at::full::init(base, i, 1);
            at::free::init(base, i, 128 * GROUPS);
            at::stats_full::init(base, i, WARP_ARRIVALS);
        }
        for (int i = 0; i < at::DQ_BUFFERS; i++) at::dq_free::init(base, i, 1);
        at::clean::init(base, 0, 128 * GROUPS);
        for (int i = 0; i < at::DS_BUFFERS; i++) at::ds_free::init(base, i, at::DQ_THREADS);
        at::keys_back::init(base, 0, at::DQ_THREADS);
        mbar_init_done();
    }
    __syncthreads();
    if (b.tiles < 0) {
        if (b.stores) store_tiles<T, DK, at::THREADS / 128 - 1>(a, plan, smem, base);
        else if (plan.done != NULL && threadIdx.x == 0) add_release(plan.done, ADDERS);
        return;
    }
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<at::FEED>();
        if (warp == 0) feed<at>(a, plan, b, m, base);
        else if (warp == 1) fetch_statistics<T, at>(a, plan, b, smem, base);
        else add_rows<at>(a, plan, b, m, base, warp - 2);
    } else if (group <= GROUPS) {
        registers_up<at::COMPUTE>();
        if constexpr (DK == 64) compute_64<T, at>(a, plan, b, smem, base, group - 1);
        else if constexpr (DK == 128) compute_128<T, at>(a, plan, b, smem, base, group - 1);
        else compute_192<T, at>(a, plan, b, smem, base, group - 1);
    } else if constexpr (at::DQ_WARPGROUP) {
        registers_down<at::MAKE_DQ>();
        make_dq<T, at>(a, plan, b, smem, base);
    }
#endif
}

template <typename T, int DK, int DV>
static quern_status run(const attend_args *args, const attend_launch &l, const sm90_backward_plan &plan,
                        const quern_tensor &d_q, cudaStream_t stream)
{
    const int box = plan.lists.box > 0 ? plan.lists.box : KEYS;
    maps m = {};
    quern_status status = tma_describe(&m.q, args->q, 1, ROWS);
    if (status == QUERN_OK) status = tma_describe(&m.d_o, args->d_o, 1, ROWS);
    if (status == QUERN_OK) status = tma_describe(&m.k, args->k, 1, box);
    if (status == QUERN_OK) status = tma_describe(&m.v, args->v, 1, box);
    if (status == QUERN_OK && plan.sums == NULL) status = tma_describe(&m.d_q, d_q, 1, ROWS);
    if (status != QUERN_OK) return status;
    const unsigned blocks = (unsigned)plan.blocks + plan.beside + plan.behind;
    return launch_shared({stream, NULL}, attend_backward_sm90<T, DK, DV>, dim3(blocks),
                         layout<DK, DV>::THREADS, sizeof(shared<DK, DV>), "attend_backward_sm90", l.kernel,
                         plan, m);
}

} // namespace sm90_backward

#endif
