/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select_lists.cuh - the lists that the select stage fills: which rows a block owns, the contest of a list,
 * what is forced into it, and how it is written. */
#ifndef QUERN_CUDA_SELECT_LISTS_CUH
#define QUERN_CUDA_SELECT_LISTS_CUH

#include "any/select/select_launch.cuh"

/* Larger is better; 0 is reserved for an empty slot. */
__device__ __forceinline__ uint32_t order_of(float x)
{
    if (isnan(x)) return 1;
    const uint32_t u = __float_as_uint(x == 0.0f ? 0.0f : x);
    return (u & 0x80000000u ? ~u : u | 0x80000000u);
}

__device__ __forceinline__ int64_t q_end_of(int64_t first, int64_t tile, int64_t nq)
{
    return first + tile < nq ? first + tile : nq;
}

/* One list being filled: sorted by falling order; entries of equal order in order of arrival. Warp-wide. */
struct best_list {
    uint32_t *key;
    int32_t *index;
    int size;
};

__device__ __forceinline__ void insert(const best_list &b, uint32_t key, int32_t index, int lane)
{
    if (b.size == 0 || key <= b.key[b.size - 1]) return;
    int at = 0; /* how many stay before it */
    for (int i = lane; i < b.size; i += 32) at += b.key[i] >= key;
    for (int w = 16; w > 0; w /= 2) at += __shfl_xor_sync(~0u, at, w);
    __syncwarp();                                     /* all have read the list; a shuffle orders no memory */
    for (int top = b.size - 1; top > at; top -= 32) { /* shift right, from the end */
        const int i = top - lane;
        uint32_t k = 0;
        int32_t x = 0;
        if (i > at) {
            k = b.key[i - 1];
            x = b.index[i - 1];
        }
        __syncwarp();
        if (i > at) {
            b.key[i] = k;
            b.index[i] = x;
        }
        __syncwarp();
    }
    if (lane == 0) {
        b.key[at] = key;
        b.index[at] = index;
    }
    __syncwarp();
}

/* Offers 32 candidates at once; `valid` lanes hold one each, rising with the lane. */
__device__ __forceinline__ void offer(const best_list &b, bool valid, float score, int32_t index, int lane)
{
    const uint32_t key = valid ? order_of(score) : 0;
    uint32_t mask = __ballot_sync(~0u, valid && b.size > 0 && key > b.key[b.size - 1]);
    while (mask != 0) {
        const int from = __ffs(mask) - 1;
        mask &= mask - 1;
        insert(b, __shfl_sync(~0u, key, from), __shfl_sync(~0u, index, from), lane);
    }
}

/* Writes forced entries [0, f0) and [g0, g1), and what the list holds, ascending and padded. Warp-wide. */
static __device__ void write_list(const best_list &b, int64_t f0, int64_t g0, int64_t g1, int32_t *dst, int k,
                                  int32_t *count, int lane)
{
    const int forced = (int)(f0 + (g1 - g0));
    int kept = 0;
    for (int i = lane; i < b.size; i += 32) kept += b.key[i] != 0;
    for (int w = 16; w > 0; w /= 2) kept += __shfl_xor_sync(~0u, kept, w);
    for (int i = lane; i < forced + kept; i += 32) {
        const int64_t x = i < f0 ? i : i < forced ? g0 + (i - f0) : b.index[i - forced];
        int at = 0;
        for (int j = 0; j < kept; j++) at += b.index[j] < x;
        at += (int)(x < f0 ? x : f0) + (int)(x < g0 ? 0 : x < g1 ? x - g0 : g1 - g0);
        dst[at] = (int32_t)x;
    }
    for (int i = forced + kept + lane; i < k; i += 32) dst[i] = -1;
    if (count != NULL && lane == 0) *count = forced + kept;
}

/* MODE 0: mean_logit; 1: softmax on f32 cores; 2: softmax on tensor cores, <= 16 rows a list; 3: the same,
 * any number of rows. */
template <int DP, int MODE> struct select_shape {
    static constexpr bool CORES = MODE >= 2;
    static constexpr int LISTS = MODE == 0 || MODE == 2 ? WARPS : 1; /* of a block */
    static constexpr int CHUNKS = DP / 8, NT = KEYS / 8, SCORES = MAX_HISTORY + KEYS;
    static constexpr int Q_ROWS = CORES ? 128 : MODE == 0 ? LISTS : 64;
};

/* A block's shared memory. */
template <int DP, int MODE> struct select_memory {
    using shape = select_shape<DP, MODE>;
    char *q, *k;
    float *history, *partial; /* [LISTS][SCORES], [WARPS][KEYS] */
    uint32_t *keys, *group_keys;
    int32_t *indices, *group_indices;
    int ld; /* elements of a row of q and k; f32 rows are of an odd length, free of bank conflicts */

    __device__ __forceinline__ select_memory(const select_kernel &s, char *from)
    {
        ld = shape::CORES ? DP : s.a.dim_k + 1;
        q = from;
        k = q + shape::Q_ROWS * ld * (shape::CORES ? 2 : 4);
        history = (float *)(k + (shape::CORES ? 2 * KEYS * DP * 2 : KEYS * ld * 4));
        partial = history + shape::LISTS * shape::SCORES;
        keys = (uint32_t *)(partial + WARPS * KEYS);
        indices = (int32_t *)(keys + shape::LISTS * s.k);
        group_keys = (uint32_t *)(indices + shape::LISTS * s.k);
        group_indices = (int32_t *)(group_keys + shape::LISTS * s.c);
    }
};

/* Consecutive list rows of one sequence, which share keys. */
template <typename T> struct list_run {
    sequence seq;
    int64_t q_first, row_begin; /* the first query and list row */
    int lists, head0, unit;
    const T *q, *k;
};

/* One warp's list as it is filled. */
struct own_list {
    bool mine;
    int64_t q0;                 /* the first query */
    int candidates, f0, g0, g1; /* blocks in the contest; forced: [0, f0) and [g0, g1) */
    int seen_first, seen_last;  /* entries that the first and the last query see */
    best_list best, best_group;
    int groups_seen, keep_last,
        keep_first; /* groups kept always: the newest visible to the last, and to the first query */
    int kept_groups;
};

/* List rows that no tile has: padding. One warp calls. */
static __device__ __forceinline__ void pad_lists(const select_kernel &s, int64_t vb, int u, int64_t row,
                                                 int64_t end)
{
    const int lane = threadIdx.x & 31;
    for (; row < s.list_rows && row < end; row++) {
        for (int i = lane; i < s.k; i += 32)
            s.idx[vb * s.idx_stride[0] + u * s.idx_stride[1] + row * s.idx_stride[2] + i] = -1;
        for (int i = lane; i < s.c; i += 32)
            s.groups[vb * s.group_stride[0] + u * s.group_stride[1] + row * s.group_stride[2] + i] = -1;
        if (s.count != NULL && lane == 0)
            s.count[vb * s.count_stride[0] + u * s.count_stride[1] + row * s.count_stride[2]] = 0;
    }
}

/* The lists from row `row_begin` on, at most `most`, that are of one sequence; false past the last. */
template <typename T>
__device__ __forceinline__ bool find_run(const select_kernel &s, int64_t vb, int64_t row_begin, int most,
                                         list_run<T> *run)
{
    const attend_kernel &a = s.a;
    const int64_t global = a.sq.cu_q == NULL ? vb * s.list_rows + row_begin : row_begin;
    sequence other;
    int64_t q_other;
    if (!piece_at(a.sq, global, a.tile, 1, &run->seq, &run->q_first)) return false;
    run->row_begin = row_begin;
    run->lists = 1;
    run->unit = blockIdx.y;
    while (run->lists < most && row_begin + run->lists < s.list_rows &&
           piece_at(a.sq, global + run->lists, a.tile, 1, &other, &q_other) && other.b == run->seq.b)
        run->lists++;
    const int u = run->unit, kvh = a.units == a.heads ? u / a.group : u;
    run->head0 = a.units == a.heads ? u : u * a.group;
    run->q = (const T *)a.q.p + run->seq.view_b * a.q.s[0] + run->seq.q0 * a.q.s[1] + run->head0 * a.q.s[2];
    run->k = (const T *)a.k.p + run->seq.view_b * a.k.s[0] + run->seq.k0 * a.k.s[1] + kvh * a.k.s[2];
    return true;
}

/* This warp's list of a run, empty. */
template <typename T, int DP, int MODE>
__device__ __forceinline__ own_list open_list(const select_kernel &s, const list_run<T> &run,
                                              const select_memory<DP, MODE> &m)
{
    const attend_kernel &a = s.a;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    constexpr int SCORES = select_shape<DP, MODE>::SCORES;
    own_list x;
    x.q0 = run.q_first + (int64_t)warp * a.tile;
    x.mine = warp < run.lists;
    const int64_t q_last = q_end_of(x.q0, a.tile, run.seq.nq) - 1;
    int ignore;
    x.seen_last = x.seen_first = 0;
    if (x.mine)
        row_keys(a, run.seq, q_last, &ignore, &x.seen_last),
            row_keys(a, run.seq, x.q0, &ignore, &x.seen_first);
    x.candidates = (int)mask_blocks_seen(a.causal != 0, run.seq.nq, q_last, s.select_block);
    x.f0 = s.forced_first < x.candidates ? s.forced_first : x.candidates, x.g0 = 0, x.g1 = 0;
    if (a.causal && s.forced_local > 0) {
        x.g1 = x.candidates;
        x.g0 = (int)(x.q0 / s.select_block) - (s.forced_local - 1);
        if (x.g0 < x.f0) x.g0 = x.f0;
        if (x.g0 > x.g1) x.g0 = x.g1;
    }
    const int contest = s.k - (x.f0 + (x.g1 - x.g0));
    x.best = {m.keys + warp * s.k, m.indices + warp * s.k, contest > 0 ? contest : 0};
    x.groups_seen = (x.seen_last + GROUP - 1) / GROUP;
    x.keep_last = a.causal && x.seen_last > 0 ? (x.seen_last - 1) / GROUP : -1;
    x.keep_first = a.causal && x.seen_first > 0 ? (x.seen_first - 1) / GROUP : -1;
    x.kept_groups = x.keep_last < 0 ? 0 : x.keep_first < 0 || x.keep_first == x.keep_last ? 1 : 2;
    x.best_group = {m.group_keys + warp * s.c, m.group_indices + warp * s.c,
                    s.c > x.kept_groups ? s.c - x.kept_groups : 0};
    if (x.mine) {
        for (int i = lane; i < s.k; i += 32) x.best.key[i] = 0;
        for (int i = lane; i < s.c; i += 32) x.best_group.key[i] = 0;
        for (int i = lane; i < SCORES; i += 32) m.history[warp * SCORES + i] = 0.0f;
    }
    return x;
}

/* Offers the selection blocks whose last entry is in [e0, e0 + KEYS); out[i] is the score of entry e0 + i. */
static __device__ __forceinline__ void close_blocks(const select_kernel &s, const own_list &x, int64_t e0,
                                                    const float *out)
{
    const int lane = threadIdx.x & 31,
              back = s.l_over_d - 1; /* back: entries before a block's first that overlap it */
    const int64_t from = (e0 + s.s_over_d) / s.s_over_d - 1, to = (e0 + KEYS) / s.s_over_d;
    for (int64_t j0 = from; j0 < to; j0 += 32) {
        const int64_t block = j0 + lane, last_entry = (block + 1) * s.s_over_d - 1;
        const bool valid = block < to && last_entry >= e0 && block < x.candidates && block >= x.f0 &&
                           !(block >= x.g0 && block < x.g1);
        float score = 0.0f;
        if (valid) {
            if (s.mean_logit) {
                score = out[last_entry - e0];
            } else {
                const int span = back + s.s_over_d;
                for (int i = 0; i < span;
                     i++) { /* entry = block start - back + i, counted as often as it overlaps */
                    const int64_t at = last_entry - e0 - (span - 1) + i;
                    const int up = i + 1 < span - i ? i + 1 : span - i;
                    const int most = s.l_over_d < s.s_over_d ? s.l_over_d : s.s_over_d;
                    score += (float)(up < most ? up : most) * out[at];
                }
            }
        }
        offer(x.best, valid, score, (int32_t)block, lane);
    }
}

/* Adds a step's scores to those of their group, and offers it at its end. */
static __device__ __forceinline__ void close_group(const own_list &x, int64_t e0, bool last, const float *out,
                                                   float *group_sum)
{
    const int lane = threadIdx.x & 31;
    for (int j = lane; j < KEYS; j += 32)
        if (e0 + j < x.seen_last) *group_sum += out[j];
    if (e0 % GROUP != GROUP - KEYS && !last) return;
    for (int w = 16; w > 0; w /= 2) *group_sum += __shfl_xor_sync(~0u, *group_sum, w);
    const int64_t g = e0 / GROUP, seen = x.seen_last - g * GROUP < GROUP ? x.seen_last - g * GROUP : GROUP;
    if (g < x.groups_seen && g != x.keep_last && g != x.keep_first)
        offer(x.best_group, lane == 0, *group_sum / (float)seen, (int32_t)g, lane);
    *group_sum = 0.0f;
}

/* Keeps the last `count` scores, which a later block may overlap, before the next step's. */
static __device__ __forceinline__ void keep_scores(float *scores, int count)
{
    const int lane = threadIdx.x & 31;
    float *h = scores - count;
    for (int i0 = 0; i0 < count; i0 += 32) {
        const float x = h[i0 + lane + KEYS];
        __syncwarp();
        h[i0 + lane] = x;
        __syncwarp();
    }
}

/* Writes the groups: those of the contest and those that are kept always, ascending. */
static __device__ __forceinline__ void write_groups(const select_kernel &s, const own_list &x, int64_t vb,
                                                    int u, int64_t row)
{
    const int lane = threadIdx.x & 31;
    const int ga = x.keep_first >= 0 && x.keep_first != x.keep_last ? x.keep_first : -1;
    for (int w = 0; w < 2; w++) { /* put the kept ones behind the contest's */
        const int g = w == 0 ? x.keep_last : ga;
        if (g >= 0 && lane == 0) {
            x.best_group.key[x.best_group.size + w] = ~0u;
            x.best_group.index[x.best_group.size + w] = g;
        }
        __syncwarp();
    }
    const best_list all = {x.best_group.key, x.best_group.index, x.best_group.size + x.kept_groups};
    int full = 0; /* empty slots of the contest go: the kept ones move up */
    for (int i = 0; i < x.best_group.size; i++) full += x.best_group.key[i] != 0;
    __syncwarp();
    if (full < x.best_group.size && lane == 0)
        for (int w = 0; w < x.kept_groups; w++) {
            all.key[full + w] = ~0u;
            all.index[full + w] = all.index[x.best_group.size + w];
        }
    __syncwarp();
    const best_list compact = {all.key, all.index, full + x.kept_groups};
    write_list(compact, 0, 0, 0,
               s.groups + vb * s.group_stride[0] + u * s.group_stride[1] + row * s.group_stride[2], s.c, NULL,
               lane);
}

static __device__ __forceinline__ void write_lists(const select_kernel &s, const own_list &x, int64_t vb,
                                                   int u, int64_t row)
{
    if (s.idx != NULL)
        write_list(x.best, x.f0, x.g0, x.g1,
                   s.idx + vb * s.idx_stride[0] + u * s.idx_stride[1] + row * s.idx_stride[2], s.k,
                   s.count != NULL
                       ? s.count + vb * s.count_stride[0] + u * s.count_stride[1] + row * s.count_stride[2]
                       : NULL,
                   threadIdx.x & 31);
    if (s.c > 0) write_groups(s, x, vb, u, row);
}

#endif
