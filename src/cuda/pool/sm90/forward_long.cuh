/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * forward_long.cuh - entries of long blocks, HCA's of 128 rows: four teams a block of threads, an entry each,
 * which walk through their rows in step.
 *
 * The biases of an entry in f32 are as many bytes as its rows in 16 bits, and too many to keep, so the four
 * entries share each row of them. A warp feeds: four rows of each entry and of the biases a stage, by bulk
 * copies, three stages of 40 KB (f32 rows: of 72 KB); more of them make memory no faster. Teams take a
 * stage to registers, give it back, and merge. A merge is 13 instructions, half of the time that 16-bit rows
 * take at the copy rate. A call's code comes from memory, 13 clocks an instruction that nobody ran before: so
 * a stage is one turn of a loop, entries that are stored as rows have instances of half the instructions,
 * warps beside the teams look up what their ends need, and calls of rows without gaps have a short way to the
 * first copies. Limit: bytes read over the copy rate.
 */
#ifndef QUERN_CUDA_POOL_SM90_FORWARD_LONG_CUH
#define QUERN_CUDA_POOL_SM90_FORWARD_LONG_CUH

#include "pool/sm90/pooling.cuh"

/* The threads behind the teams and the feeding warp, which look up; the named barrier behind teams' own. */
enum {
    LONG_POOL_STAGES = 3,
    LONG_POOL_LOOKERS = POOL_THREADS - POOL_WARPS * 32 - 32,
    LONG_POOL_BEGIN = POOL_TEAMS + 1
};

/* As bulk_load(), of bytes that nobody reads again: they leave L2 before all others, so that biases stay. */
__device__ __forceinline__ uint64_t policy_once()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_load_once(uint32_t to, const void *from, uint32_t bytes, uint32_t bar,
                                               uint64_t policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1], %2, [%3], %4;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar), "l"(policy)
                 : "memory");
}

template <typename T>
__device__ __forceinline__ const T *pool_rows_at(const pool_kernel &a, const pool_facts &x)
{
    return (const T *)a.proj + x.view_b * a.proj_b + x.row * a.proj_row;
}

/* What a team needs of an entry that is stored as a row, and the entry's first row. */
struct long_facts {
    row_facts row;
    const void *rows;
};

template <typename T, typename B, int ENTRIES> struct long_pool_stage {
    T row[ENTRIES][POOL_ROWS][2][WIDTH]; /* values and logits */
    B bias[POOL_ROWS][WIDTH];
};

/* The arguments of a call of long blocks beside pool_kernel's. A line: one sequence, or several as one, whose
 * rows stand in memory without gaps, as the biases do. What its feeding warp needs is near each other, as
 * arguments come from memory too. */
struct long_pool_call {
    int64_t entries, entry_bytes;
    const char *rows, *biases;
    int32_t stages, live; /* of an entry; entries from the first one on */
};

/* Of a block of threads that has so many entries. */
template <typename T, typename B, int ENTRIES> struct long_pool_room {
    typedef ring_place<LONG_POOL_STAGES> place;
    /* Lanes of the feeding warp that bring rows, and then the biases. */
    enum { ROW_LANES = ENTRIES * POOL_ROWS, FEED_LANES = ROW_LANES + POOL_ROWS };
    enum { LINE_LANES = ENTRIES + 1 }; /* the same of a line */
    alignas(128) long_pool_stage<T, B, ENTRIES> stage[LONG_POOL_STAGES];
    float row[POOL_TEAMS][WIDTH]; /* of entries that are stored as rows, their angles */
    float norm[WIDTH];
    long_facts facts[POOL_TEAMS];
    team_parts parts;
    ring<LONG_POOL_STAGES> rows;
    ring<1> looked;
};

/* A lane has a row of each stage, or of rows without gaps the first one all four. ONE: one turn. */
template <bool ONE, typename T, typename B, int ENTRIES>
__device__ __forceinline__ void long_pool_feed(const pool_kernel &a, long_pool_room<T, B, ENTRIES> &m,
                                               int64_t entries)
{
    const int lane = (int)threadIdx.x % 32, index = lane / POOL_ROWS, u = lane % POOL_ROWS;
    const bool biases = lane >= m.ROW_LANES;
    const int64_t step = biases ? a.bias_a_row * (int64_t)sizeof(B) : a.proj_row * (int64_t)sizeof(T),
                  bytes = biases ? WIDTH * sizeof(B) : 2 * WIDTH * sizeof(T);
    const int at_once = step == bytes ? POOL_ROWS : 1;
    const uint32_t to =
        biases ? smem_address(&m.stage[0].bias[u][0]) : smem_address(&m.stage[0].row[index][u][0][0]);
    typename long_pool_room<T, B, ENTRIES>::place at;
    const uint64_t once = policy_once();
    if (lane >= m.FEED_LANES) return;
    for (int64_t e0 = blockIdx.x; e0 < (ONE ? blockIdx.x + 1 : entries); e0 += ENTRIES * gridDim.x) {
        const int64_t e = e0 + index * (int64_t)gridDim.x;
        const char *from = (const char *)a.bias_a + u * step;
        bool some = biases;
        if (!biases && e < entries) {
            const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
            some = x.live;
            from = (const char *)pool_rows_at<T>(a, x) + u * step;
        }
        some = some && u % at_once == 0;
        for (int j = 0; j < a.ratio; j += POOL_ROWS, from += POOL_ROWS * step, at.advance()) {
            m.rows.wait_free(at);
            const uint32_t place = to + at.stage * (uint32_t)sizeof(m.stage[0]),
                           all = (uint32_t)(at_once * bytes);
            if (!some) m.rows.give(at);
            else if (biases) bulk_load(place, from, all, m.rows.expect(at, all));
            else bulk_load_once(place, from, all, m.rows.expect(at, all), once);
        }
    }
}

/* The same of the one turn of a line, by few instructions: a lane has an entry, the last one the biases. */
template <typename T, typename B, int ENTRIES>
__device__ __forceinline__ void long_pool_feed_line(const long_pool_call &c, long_pool_room<T, B, ENTRIES> &m)
{
    enum { ROWS = sizeof(m.stage[0].row[0]), BIASES = sizeof(m.stage[0].bias) };
    const uint32_t lane = threadIdx.x % 32, e = blockIdx.x + lane * gridDim.x;
    const bool biases = lane == ENTRIES;
    const char *from = biases ? c.biases : c.rows + e * c.entry_bytes;
    const uint32_t rows = e < (uint32_t)c.live ? ROWS : 0, bytes = biases ? BIASES : rows,
                   to = smem_address(&m.stage[0]) + lane * ROWS;
    const uint64_t once = policy_once();
    typename long_pool_room<T, B, ENTRIES>::place at;
    if (lane >= m.LINE_LANES) return;
#pragma unroll 1
    for (int j = 0; j < c.stages; j++, from += bytes, at.advance()) {
        m.rows.wait_free(at);
        const uint32_t place = to + at.stage * (uint32_t)sizeof(m.stage[0]), bar = m.rows.expect(at, bytes);
        if (biases) bulk_load(place, from, bytes, bar);
        else if (bytes != 0) bulk_load_once(place, from, bytes, bar, once);
    }
}

/* Rows of a stage, and the merge of them. */
template <typename T, typename B, int N> struct taken_rows {
    raw_channels<T> value[N], logit[N];
    raw_channels<B> bias[N];
};

template <int N, typename T, typename B, typename Stage>
__device__ __forceinline__ taken_rows<T, B, N> take_rows(const Stage &from, int first, int team, int channel)
{
    taken_rows<T, B, N> to;
#pragma unroll
    for (int u = 0; u < N; u++) {
        to.value[u] = read_channels(&from.row[team][first + u][0][channel]);
        to.logit[u] = read_channels(&from.row[team][first + u][1][channel]);
        to.bias[u] = read_channels(&from.bias[first + u][channel]);
    }
    return to;
}

/* As merge_row(), but that a value that is not finite makes NaN of the weighted sum where its logit is -inf:
 * selects are instructions under a predicate, on another pipe than comparisons. */
__device__ __forceinline__ void merge_quickly(pool_sums &s, int i, float logit, float value)
{
    const float log2_e = 1.44269504089f, e = exp2_fast(-fabsf(logit - s.max[i]) * log2_e),
                part = __fmul_rn(e, value);
    asm("{\n.reg .pred up;\nsetp.gt.f32 up, %2, %3;\n@up fma.rn.f32 %0, %0, %4, 0f3F800000;\n"
        "@!up add.rn.f32 %0, %0, %4;\n@up fma.rn.f32 %1, %1, %4, %5;\n@!up add.rn.f32 %1, %1, %6;\n}"
        : "+f"(s.sum[i]), "+f"(s.weighted[i])
        : "f"(logit), "f"(s.max[i]), "f"(e), "f"(value), "f"(part));
    s.max[i] = fmaxf(s.max[i], logit);
}

/* Merges an entry's rows as they come, in a loop of few instructions. */
template <typename T, typename B>
__device__ __forceinline__ void merge_stages(pool_sums &sums, const pool_kernel &a,
                                             long_pool_room<T, B, POOL_TEAMS> &m, int team, int channel,
                                             typename long_pool_room<T, B, POOL_TEAMS>::place &at, bool some)
{
    constexpr int N = sizeof(T) == 2 ? POOL_ROWS : POOL_ROWS / 2;
#pragma unroll 1
    for (int j = 0; j < (int)a.ratio; j += POOL_ROWS) {
        m.rows.wait_full(at);
#pragma unroll 1
        for (int first = 0; first < POOL_ROWS; first += N) {
            const auto x = take_rows<N, T, B>(m.stage[at.stage], first, team, channel);
            if (first + N == POOL_ROWS) m.rows.give_back(at);
            if (!some) continue;
#pragma unroll
            for (int u = 0; u < N; u++)
#pragma unroll
                for (int i = 0; i < GROUP_CHANNELS; i++)
                    merge_quickly(sums, i, x.logit[u].at(i) + x.bias[u].at(i), x.value[u].at(i));
        }
        at.advance();
    }
}

/* Sums that are NaN, once more from memory: rows of no weight may have made them so. */
template <typename T, typename B>
__device__ __forceinline__ void merge_again(pool_sums &sums, const pool_kernel &a, const void *rows,
                                            int channel)
{
    const T *row = (const T *)rows + channel;
    const B *bias = (const B *)a.bias_a + channel;
    clear_sums(sums);
#pragma unroll 1
    for (int j = 0; j < (int)a.ratio; j++, row += a.proj_row, bias += a.bias_a_row) {
        const raw_channels<T> value = load_wide<T, false>(row), logit = load_wide<T, false>(row + WIDTH);
        const raw_channels<B> more = load_wide<B, false>(bias);
#pragma unroll
        for (int i = 0; i < GROUP_CHANNELS; i++) merge_row(sums, i, logit.at(i) + more.at(i), value.at(i));
    }
}

__device__ __forceinline__ bool sums_are_numbers(const pool_sums &s)
{
    const float all = (s.weighted[0] + s.weighted[1]) + (s.weighted[2] + s.weighted[3]);
    return all == all;
}

/* What teams need at the end of entries that are stored as rows, looked up by warps that do nothing else, so
 * that the code of it is on no team's way to the first rows or from the last ones. */
template <bool LINE, typename T, typename B>
__device__ __forceinline__ void long_pool_look(const pool_kernel &a, long_pool_room<T, B, POOL_TEAMS> &m,
                                               int64_t entries)
{
    const int thread = (int)threadIdx.x - (POOL_THREADS - LONG_POOL_LOOKERS);
    ring_place<1> at;
    if (a.entry.norm.p != NULL)
#pragma unroll 1
        for (int c = thread; c < WIDTH; c += LONG_POOL_LOOKERS) m.norm[c] = a.entry.norm.at(c);
#pragma unroll 1
    for (int64_t e0 = blockIdx.x; e0 < entries; e0 += POOL_TEAMS * gridDim.x) {
        m.looked.wait_free(at);
#pragma unroll 1
        for (int team = 0; team < POOL_TEAMS; team++) {
            const int64_t e = e0 + team * (int64_t)gridDim.x;
            if (e >= entries) break;
            const pool_facts x = pool_facts_of(a, pool_entry_at(a, e));
            const row_facts own = row_facts_of(a, x);
            if (own.live)
#pragma unroll 1
                for (int c = thread; c < a.entry.rotated; c += LONG_POOL_LOOKERS)
                    m.row[team][c] = a.entry.angles.at(own.angle + c);
            if (thread == 0) m.facts[team] = {own, pool_rows_at<T>(a, x)};
        }
        m.looked.give(at);
        if (LINE) break;
        at.advance();
    }
}

template <typename T, typename B, bool PLAIN, bool LINE>
__device__ __forceinline__ void long_pool_team(const pool_kernel &a, long_pool_room<T, B, POOL_TEAMS> &m,
                                               int64_t entries)
{
    const group g = team_group(m.parts);
    const int channel = g.lane * GROUP_CHANNELS, turned = channel - (WIDTH - a.entry.rotated);
    const bool rotated = turned + GROUP_CHANNELS > 0;
    typename long_pool_room<T, B, POOL_TEAMS>::place at;
    ring_place<1> looked;
    channels norm = {};
    if (!PLAIN) norm = norm_weights(a.entry, g);
    for (int64_t e0 = blockIdx.x; e0 < entries; e0 += POOL_TEAMS * gridDim.x) {
        const int64_t e = e0 + g.index * (int64_t)gridDim.x;
        pool_facts x = {};
        entry_factors angles = {};
        if (!PLAIN) {
            if (e < entries) x = pool_facts_of(a, pool_entry_at(a, e));
            angles = entry_angles(a.entry, g, x.position);
        }
        pool_sums sums;
        clear_sums(sums);
        merge_stages(sums, a, m, g.index, channel, at, e < entries);
        long_facts own = {};
        if (PLAIN) {
            m.looked.wait_full(looked);
            own = m.facts[g.index];
            if (a.entry.norm.p != NULL) {
                const float4 w = *(const float4 *)&m.norm[channel];
                norm = {{w.x, w.y, w.z, w.w}};
            }
            angles = {{1.0f, 1.0f}, {0.0f, 0.0f}};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int pair = turned / 2 + i;
                if (!rotated || turned + 2 * i < 0) continue;
                angles.cosine[i] = m.row[g.index][pair];
                angles.sine[i] = m.row[g.index][a.entry.rotated / 2 + pair];
            }
            m.looked.give_back(looked);
            looked.advance();
        }
        if (e < entries) {
            if ((PLAIN ? (bool)own.row.live : x.live) && !sums_are_numbers(sums))
                merge_again<T, B>(sums, a, PLAIN ? own.rows : pool_rows_at<T>(a, x), channel);
            if (PLAIN) row_emit(a, g, own.row, norm, angles, rotated, sums);
            else pool_emit(a, g, x, norm, angles, pooled_of(sums), m.row[g.index]);
        }
        if (LINE) break;
    }
}

/* PLAIN: entries are stored as rows, and each pair of channels that turn is one thread's. LINE: the call is a
 * line, and a team has at most one entry. The feeding warp asks for the first rows before the other warps
 * begin; teams without an entry walk along, so that it need not count them. */
template <typename T, typename B, bool PLAIN, bool LINE>
__global__ void __launch_bounds__(POOL_THREADS, 1)
    pool_long_forward(const __grid_constant__ pool_kernel a, const __grid_constant__ long_pool_call c)
{
    extern __shared__ __align__(128) char room[];
    auto &m = *(long_pool_room<T, B, POOL_TEAMS> *)room;
    if (threadIdx.x / 32 == POOL_WARPS) {
        if (threadIdx.x == POOL_WARPS * 32) {
            m.rows.init(LINE ? m.LINE_LANES : m.FEED_LANES, POOL_TEAMS * POOL_TEAM);
            m.looked.init(LONG_POOL_LOOKERS, POOL_TEAMS * POOL_TEAM);
            mbar_init_done();
        }
        __syncwarp();
        named_arrive(LONG_POOL_BEGIN, POOL_THREADS);
        wait_for_before();
        if (LINE) long_pool_feed_line(c, m);
        else long_pool_feed<false>(a, m, c.entries);
        return;
    }
    named_sync(LONG_POOL_BEGIN, POOL_THREADS);
    wait_for_before();
    if (threadIdx.x < POOL_WARPS * 32) long_pool_team<T, B, PLAIN, LINE>(a, m, c.entries);
    else if (PLAIN) long_pool_look<LINE>(a, m, c.entries);
}

#endif
