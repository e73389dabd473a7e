/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * choose.cu - a block a list: forced blocks, and the best of the others by their scores. The rank of the last
 * one chosen is found bit by bit, by counting; then blocks enter in their order, so a list ascends and of
 * equal scores the lowest come first. Limit: some 40 barriers.
 */
#include "index_decode/params.cuh"

namespace index_decode
{

enum { TEAM = 512, RANKS_MOST = 4096 };

struct choose_memory {
    team_room<TEAM> team;
    uint32_t ranks[RANKS_MOST]; /* where there are no more candidates; each is read 33 times */
};

/* Writes the blocks chosen among n > want of them, `first` and those behind it. */
__device__ __forceinline__ void write_chosen(choose_memory &m, const float *scores, int n, int want,
                                             int32_t first, int32_t *to)
{
    const bool held = n <= RANKS_MOST;
    const auto rank = [&](int i) { return held ? m.ranks[i] : rank_of(scores[i]); };
    const auto sync = []() { __syncthreads(); };
    int equal = 0, count = 0, sames = 0;
    for (int i = threadIdx.x; held && i < n; i += TEAM) m.ranks[i] = rank_of(scores[i]);
    __syncthreads();
    const uint32_t kth = team_kth(m.team, rank, n, want, &equal);
    for (int from = 0, set = 0; from < n; from += TEAM, set ^= 1) {
        const int i = from + (int)threadIdx.x;
        const uint32_t own = i < n ? rank(i) : 0;
        const bool more = own > kth, same = i < n && own == kth;
        const team_place p = team_count(m.team, set, threadIdx.x, same, more, sync);
        const int room = equal - sames;
        if (more || (same && p.same < room))
            to[count + p.more + (p.same < room ? p.same : room)] = first + i;
        count += p.all_more + (p.all_same < room ? p.all_same : room);
        sames += p.all_same < room ? p.all_same : room;
    }
}

__global__ void __launch_bounds__(TEAM) index_choice(const __grid_constant__ index_kernel a)
{
    __shared__ choose_memory m;
    const int lists = a.list.units * a.list.hs, head = (int)(blockIdx.x % (unsigned)lists);
    const int64_t t = a.first + blockIdx.x / (unsigned)lists;
    index_query q;
    const bool there = find_query(a, t, &q);
    wait_for_before();
    if (!there) return;
    if (q.position < 0 && threadIdx.x == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    const index_contest c = contest_at(a, q.position);
    if (threadIdx.x < 32) index_write_forced(a.list, c, 0, head, t);
    if (c.want == 0) return;
    int32_t *const list = a.list.blocks + head * a.list.blocks_row[1] + t * a.list.blocks_row[2];
    write_chosen(m, a.scores + ((t - a.first) * lists + head) * a.width + c.first, c.local - c.first, c.want,
                 c.first, list + c.first);
}

quern_status index_choose(const stage_exec *exec, const index_kernel &a)
{
    const dim3 grid((unsigned)(a.rows * a.list.units * a.list.hs));
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    if (exec->compute >= 90)
        return launch_behind(stream, index_choice, grid, TEAM, 0, "lists of the block indexer", a);
    index_choice<<<grid, TEAM, 0, stream>>>(a);
    return LAUNCHED("lists of the block indexer");
}

} // namespace index_decode
