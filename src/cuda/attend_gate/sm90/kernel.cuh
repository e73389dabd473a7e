/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - NSA's three branches and their gate in one pass on Hopper: o = sum_b g_b o_b, without
 * o_b in memory.
 *
 * A block takes three turns a piece: the window's keys,
 * the compressed entries, the keys of a list, by one copy of the piece's rows. Their tiles are one walk
 * (walk.cuh). Where a branch ends each thread multiplies its O by gate / sum and adds it to what it has in
 * shared memory (f32, read and written by that thread alone); after the last it stores O.
 *
 * The feeder's warps work ahead of the walk: warp 0 copies, warp 3 plans, warp 1 makes lists by mean logits
 * (feed.cuh, choose_by_mean.cuh) and warp 2 finds the gates (gates.cuh). What a piece begins
 * with is run once and comes from memory, instructions too: so its plans are short, and the first tile is a
 * step of the loop like the others.
 *
 * V is not searched for what is not finite: a factor of 0 makes NaN of it, which no sum undoes. So where a
 * row ends with something that is not finite its piece is computed again, with V searched; finite rows get
 * the same bits.
 *
 * Limit: the tiles of keys, as for one branch: of 2k tokens the longest piece has 14, of lists of few rows
 * 22. Alone, each branch has a launch with its start and its end, and the gate reads what they wrote. For
 * that a piece's rows cannot be copied while the one before is computed: at D = 128 rows take 32 KB of shared
 * memory, K and V 128 KB, the sums 64 KB. Q is read from there: in registers, too, it made each tile slower.
 */
#ifndef QUERN_CUDA_ATTEND_GATE_SM90_KERNEL_CUH
#define QUERN_CUDA_ATTEND_GATE_SM90_KERNEL_CUH

#include "common/launch.cuh"
#include "attend_gate/sm90/feed.cuh"
#include "attend_gate/sm90/gates.cuh"
#include "attend_gate/sm90/walk.cuh"

namespace sm90_gate
{

/* A block of threads. */
template <typename T, int D, typename W>
__device__ __forceinline__ void take_turns(const sm90_gated &call, const work_plan &plan, const gated_maps &m)
{
#ifdef QUERN_WGMMA
    extern __shared__ __align__(1024) char smem[];
    shared<D, W> &sm = *(shared<D, W> *)smem;
    static_assert(sizeof sm <= 227 * 1024, "more than a block can have");
    W::fetch_maps(m);
    if (threadIdx.x == 0) sm.init();
    W::arrive_peer(call);
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<FEED>();
        if (warp == 0) feed(call, plan, m, sm);
        else if (W::GATE_WARPS < 2 && warp == 1) W::template make_lists<T>(call, sm);
        else if (warp <= 2) W::template make_gates<T>(call, 2 - warp, sm);
        else W::plan_pieces(call, plan, sm);
        W::wait_peer(call);
        W::end_peer(call);
    } else {
        registers_up<COMPUTE>();
        W::template walk<T>(call, sm, group - 1);
        W::end_peer(call);
    }
#endif
}

template <typename T, int D>
__global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attend_gated_sm90(const __grid_constant__ sm90_gated a, const __grid_constant__ work_plan plan,
                      const __grid_constant__ gated_maps m)
{
    take_turns<T, D, three_branches>(a, plan, m);
}

typedef void gated_kernel(sm90_gated a, work_plan plan, gated_maps m);

template <typename T, int D, typename W>
static quern_status launch_pieces(const attend_gate_args *args, sm90_gated a, const sm90_device &device,
                                  void *workspace, cudaStream_t stream, work_plan plan, gated_kernel *kernel)
{
    if (plan.total == 0) return QUERN_OK;
    a.by = divisions_of(a.branch[SM90_FIRST_BRANCH], plan, SECTION, !W::MASKS);
    gated_maps m;
    quern_status status = tma_describe(&m.q, args->branch[1].q, a.branch[1].hs, plan.queries);
    for (int i = 0; i < SM90_BRANCHES && status == QUERN_OK; i++) {
        const int box = i == 1 ? plan.box : KEYS;
        status = tma_describe(&m.k[i], args->branch[i].k, 1, box);
        if (status == QUERN_OK) status = tma_describe(&m.v[i], args->branch[i].v, 1, box);
    }
    if (status == QUERN_OK) status = sm90_count_from_zero(plan.total, device, workspace, stream, &plan.taken);
    if (status != QUERN_OK) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    const char *const name = "attend_gated_sm90";
    const int threads = 128 * (GROUPS + 1);
    const bool behind = a.behind && plan.taken == NULL; /* a kernel that makes entries or lists */
    if (behind || a.pairs)
        return launch_cluster(stream, kernel, dim3(blocks), threads, sizeof(shared<D, W>), name,
                              a.pairs ? 2 : 1, behind, a, plan, m);
    return launch_shared({stream, NULL}, kernel, dim3(blocks), threads, sizeof(shared<D, W>), name, a, plan,
                         m);
}

template <typename T, int D>
static quern_status launch_gated(const attend_gate_args *args, const sm90_gated &a, const sm90_device &device,
                                 void *workspace, cudaStream_t stream)
{
    const work_plan plan = work_plan_of(&args->branch[1], a.branch[1], true, M, KEYS);
    return launch_pieces<T, D, three_branches>(args, a, device, workspace, stream, plan,
                                               attend_gated_sm90<T, D>);
}

} // namespace sm90_gate

#endif
