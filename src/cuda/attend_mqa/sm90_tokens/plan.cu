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

enum { CHUNK = 8192, CHUNK_WORDS = CHUNK / 4, WORDS_A_THREAD = CHUNK_WORDS / PLANNERS };

struct group_room {
    plan_room plan;
    token_group group;
    int32_t entries_of[TOKENS_MOST]; /* of a token's sequence */
    uint32_t chose[CHUNK_WORDS];
};

/* Fills in what the tokens see, and the ranges of them all. */
__device__ __forceinline__ void find_ranges(const tokens_kernel &k, group_room &m, int64_t row0, int tokens)
{
    token_group &g = m.group;
    for (int t = 0; t < TOKENS_MOST; t++) {
        int64_t query, entry0, entries = 0;
        sequence s;
        token_range x = {};
        mqa_query q = {};
        if (t < tokens && find_query<0>(k.plan, m.plan, row0 + t, &s, &query, &entry0)) {
            q = query_of(k.plan, s, query, entry0, &entries);
            x = {q.position, q.raw0, q.raw0 + q.raw, q.entry0, q.entry0 + q.entries};
        }
        planners_sync<0>();
        if (threadIdx.x == 0) {
            g.of[t] = x;
            m.entries_of[t] = (int32_t)entries;
        }
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
    bool bad = false;
    for (int t = 0; t < g.tokens; t++) {
        const token_range &x = g.of[t];
        const int64_t row = g.row + t;
        const int32_t *const list = p.list + g.sequence * p.list_row[0] + row * p.list_row[1];
        const int visible = x.entry_end - x.entry, entries = m.entries_of[t],
                  most = p.count != NULL
                             ? min(p.k, p.count[g.sequence * p.count_row[0] + row * p.count_row[1]])
                             : p.k;
#pragma unroll 4
        for (int i = threadIdx.x; i < most; i += PLANNERS) {
            const int entry = __ldg(list + i);
            bad = bad || entry < -1 || entry >= entries;
            const uint32_t place = (uint32_t)(x.entry + entry - from);
            if (entry >= 0 && entry < visible && place < CHUNK)
                atomicOr(&m.chose[place / 4], 1u << (place % 4 * 8 + t));
        }
    }
    return bad;
}

/* Appends the marked entries to the group's list, ascending; returns how many it then has. */
__device__ __forceinline__ int append_entries(group_room &m, uint32_t *list, int from, int have)
{
    uint32_t words[WORDS_A_THREAD];
    int mine = 0;
#pragma unroll
    for (int i = 0; i < WORDS_A_THREAD; i++) {
        words[i] = m.chose[threadIdx.x * WORDS_A_THREAD + i];
        mine += __popc(__vcmpne4(words[i], 0)) / 8;
    }
    int before = mine;
#pragma unroll
    for (int w = 1; w < 32; w *= 2) {
        const int other = __shfl_up_sync(~0u, before, w);
        before += threadIdx.x % 32 >= w ? other : 0;
    }
    if (threadIdx.x % 32 == 31) m.plan.count[threadIdx.x / 32] = before;
    planners_sync<0>();
    int at = have + before - mine;
    for (int w = 0; w < PLANNER_WARPS; w++) {
        if (w < (int)threadIdx.x / 32) at += m.plan.count[w];
        have += m.plan.count[w];
    }
#pragma unroll
    for (int i = 0; i < WORDS_A_THREAD; i++)
        for (int b = 0; b < 4; b++) {
            const uint32_t tokens = words[i] >> b * 8 & 0xff;
            const int entry = from + (threadIdx.x * WORDS_A_THREAD + i) * 4 + b;
            if (tokens != 0) list[at++] = tokens << ENTRY_BITS | (uint32_t)entry;
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
