/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * plan.cu - the plan of groups of tokens, a block each. The union of their lists is made of a byte an entry,
 * a bit a token, for 8192 entries at a time: lists in any order, padded, and with entries that stand twice
 * give the same union, in ascending order.
 */
#include "attend_mqa/plan.cuh"
#include "attend_mqa/sm90_tokens/groups.cuh"

using namespace mqa;

namespace sm90_mqa_tokens
{

enum {
    CHUNK = 8192,
    CHUNK_WORDS = CHUNK / 4,
    WARP_WORDS = CHUNK_WORDS / PLANNER_WARPS,
    WORDS_A_THREAD = WARP_WORDS / 32
};

struct group_room {
    plan_room plan;
    token_group group;
    int32_t entries_of[TOKENS_MOST]; /* of a token's sequence */
    int32_t listed[TOKENS_MOST];     /* how long its list is */
    uint32_t chose[CHUNK_WORDS];
};

/* Fills in what the tokens see, a thread a token, and the ranges of them all. */
__device__ __forceinline__ void find_ranges(const tokens_kernel &k, group_room &m, int64_t row0, int tokens)
{
    token_group &g = m.group;
    const int mine = threadIdx.x;
    int64_t query = 0, entry0 = 0, entries = 0;
    sequence s = {};
    bool found = false;
    for (int t = 0; t < tokens; t++) {
        int64_t its_query, its_entry0;
        sequence its;
        const bool is = find_query<0>(k.plan, m.plan, row0 + t, &its, &its_query, &its_entry0);
        if (t != mine) continue;
        s = its;
        query = its_query;
        entry0 = its_entry0;
        found = is;
    }
    planners_sync<0>();
    if (mine < TOKENS_MOST) {
        const mqa_planner &p = k.plan;
        token_range x = {};
        if (found) {
            const mqa_query q = query_of(p, s, query, entry0, &entries);
            x = {q.position, q.raw0, q.raw0 + q.raw, q.entry0, q.entry0 + q.entries};
        }
        g.of[mine] = x;
        m.entries_of[mine] = (int32_t)entries;
        int listed = mine < tokens ? p.k : 0;
        if (listed > 0 && p.count != NULL)
            listed = min(listed, p.count[g.sequence * p.count_row[0] + (g.row + mine) * p.count_row[1]]);
        m.listed[mine] = listed;
    }
    planners_sync<0>();
    if (threadIdx.x > 0) return;
    int raw[2] = {INT32_MAX, 0}, entry[2] = {INT32_MAX, 0};
    for (int t = 0; t < TOKENS_MOST; t++) {
        const token_range &x = g.of[t];
        if (x.raw_end > x.raw) raw[0] = min(raw[0], x.raw), raw[1] = max(raw[1], x.raw_end);
        if (x.entry_end > x.entry) entry[0] = min(entry[0], x.entry), entry[1] = max(entry[1], x.entry_end);
    }
    g.raw0 = raw[1] > 0 ? raw[0] : 0;
    g.raw = raw[1] - g.raw0;
    g.entry0 = entry[1] > 0 ? entry[0] : 0;
    g.entries = entry[1] - g.entry0;
}

/* Sets the bits of the entries [from, from + CHUNK) that the tokens chose. Returns whether some entry is of
 * no sequence. */
__device__ __forceinline__ bool mark_entries(const tokens_kernel &k, group_room &m, int from)
{
    const token_group &g = m.group;
    const mqa_planner &p = k.plan;
    const int32_t *const lists = p.list + g.sequence * p.list_row[0] + g.row * p.list_row[1];
    bool bad = false;
#pragma unroll 2
    for (int i = threadIdx.x; i < p.k; i += PLANNERS) {
        int entry[TOKENS_MOST];
#pragma unroll
        for (int t = 0; t < TOKENS_MOST; t++)
            entry[t] = i < m.listed[t] ? __ldg(lists + t * p.list_row[1] + i) : -1;
#pragma unroll
        for (int t = 0; t < TOKENS_MOST; t++) {
            const token_range &x = g.of[t];
            bad = bad || entry[t] < -1 || entry[t] >= m.entries_of[t];
            const uint32_t place = (uint32_t)(x.entry + entry[t] - from);
            if (entry[t] >= 0 && entry[t] < x.entry_end - x.entry && place < CHUNK)
                atomicOr(&m.chose[place / 4], 1u << (place % 4 * 8 + t));
        }
    }
    return bad;
}

/* How many of the warp's lanes' entries stand before this lane's `mine`, of at most four. */
__device__ __forceinline__ int entries_before(int mine)
{
    const uint32_t lower = (1u << threadIdx.x % 32) - 1;
    int before = 0;
#pragma unroll
    for (int b = 0; b < 3; b++) before += __popc(__ballot_sync(~0u, mine >> b & 1) & lower) << b;
    return before;
}

/* Appends the marked entries to the group's list, ascending; returns how many it then has. A warp has
 * consecutive words, of which its lanes take 32 at a time. */
__device__ __forceinline__ int append_entries(group_room &m, uint32_t *list, int from, int have)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * WARP_WORDS + lane;
    uint32_t words[WORDS_A_THREAD];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < WORDS_A_THREAD; i++) {
        words[i] = m.chose[first + i * 32];
        mine += __popc(__vcmpne4(words[i], 0)) / 8;
    }
    mine = (int)__reduce_add_sync(~0u, (uint32_t)mine);
    if (lane == 0) m.plan.count[warp] = mine;
    planners_sync<0>();
    int at = have;
    for (int w = 0; w < PLANNER_WARPS; w++) {
        if (w < warp) at += m.plan.count[w];
        have += m.plan.count[w];
    }
#pragma unroll
    for (int i = 0; i < WORDS_A_THREAD; i++) {
        const int some = __popc(__vcmpne4(words[i], 0)) / 8;
        int to = at + entries_before(some);
        at += (int)__reduce_add_sync(~0u, (uint32_t)some);
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const uint32_t tokens = words[i] >> b * 8 & 0xff;
            if (tokens != 0) list[to++] = tokens << ENTRY_BITS | (uint32_t)(from + (first + i * 32) * 4 + b);
        }
    }
    return have;
}

__global__ void __launch_bounds__(PLANNERS) mqa_plan_groups(const __grid_constant__ tokens_kernel k)
{
    __shared__ group_room m;
    const int item = blockIdx.x, in = item / k.a_sequence, first = (item - in * k.a_sequence) * k.tokens,
              left = (int)k.plan.of.n_q - first, tokens = left < k.tokens ? left : k.tokens;
    const int64_t row0 = in * k.plan.of.n_q + first;
    if (threadIdx.x == 0) {
        m.group.sequence = in;
        m.group.row = first;
        m.group.tokens = tokens;
    }
    find_ranges(k, m, row0, tokens);
    planners_sync<0>();
    const int entry0 = m.group.entry0, end = entry0 + m.group.entries;
    if (k.lists != NULL) {
        bool bad = false;
        int have = 0;
        for (int from = entry0; from == entry0 || from < end; from += CHUNK) {
            for (int i = threadIdx.x; i < CHUNK_WORDS; i += PLANNERS) m.chose[i] = 0;
            planners_sync<0>();
            bad = mark_entries(k, m, from) || bad;
            planners_sync<0>();
            have = append_entries(m, k.lists + item * k.list_row, from, have);
            planners_sync<0>();
        }
        bad = any_planner<0>(bad);
        if (threadIdx.x == 0) {
            m.group.entries = have;
            if (bad && k.plan.status != NULL) atomicOr(k.plan.status, QUERN_STATUS_BAD_INDEX);
        }
    }
    planners_sync<0>();
    if (threadIdx.x < sizeof(token_group) / 4)
        ((int32_t *)(k.groups + item))[threadIdx.x] = ((const int32_t *)&m.group)[threadIdx.x];
}

quern_status plan_groups(const stage_exec *exec, const tokens_kernel &k)
{
    mqa_plan_groups<<<(unsigned)k.items, PLANNERS, 0, (cudaStream_t)exec->stream>>>(k);
    return LAUNCHED("plan of groups of tokens");
}

} // namespace sm90_mqa_tokens
