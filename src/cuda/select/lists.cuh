/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lists.cuh - the lists that the select stage fills: which rows a block owns, the contest of a list,
 * what is forced into it, and how it is written. */
#ifndef QUERN_CUDA_SELECT_LISTS_CUH
#define QUERN_CUDA_SELECT_LISTS_CUH

#include "select/contest.cuh"
#include "select/params.cuh"

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

/* The same for a list of at most 32, in registers: candidates of the lanes in `mask`, in the order of the
 * lanes. */
__device__ __forceinline__ void insert_lanes(const best_list &b, uint32_t mask, uint32_t key, int32_t index,
                                             int lane)
{
    const bool in = lane < b.size;
    uint32_t own = in ? b.key[lane] : 0;
    int32_t at = in ? b.index[lane] : 0;
    while (mask != 0) {
        const int from = __ffs(mask) - 1;
        const uint32_t k = __shfl_sync(~0u, key, from), left = __shfl_up_sync(~0u, own, 1);
        const int32_t x = __shfl_sync(~0u, index, from), left_at = __shfl_up_sync(~0u, at, 1);
        if (own < k) { /* moves right, or gives its place to the candidate */
            const bool here = lane == 0 || left >= k;
            own = here ? k : left;
            at = here ? x : left_at;
        }
        mask &= mask - 1;
        mask &= __ballot_sync(~0u, key > __shfl_sync(~0u, own, b.size - 1));
    }
    if (in) {
        b.key[lane] = own;
        b.index[lane] = at;
    }
    __syncwarp();
}

/* Offers 32 candidates at once; `valid` lanes hold one each, rising with the lane. */
__device__ __forceinline__ void offer(const best_list &b, bool valid, float score, int32_t index, int lane)
{
    if (b.size == 0) return;
    const uint32_t key = valid ? order_of(score) : 0;
    uint32_t mask = __ballot_sync(~0u, key > b.key[b.size - 1]);
    if (mask == 0) return;
    if (b.size <= 32) {
        insert_lanes(b, mask, key, index, lane);
        return;
    }
    while (mask != 0) {
        const int from = __ffs(mask) - 1;
        mask &= mask - 1;
        insert(b, __shfl_sync(~0u, key, from), __shfl_sync(~0u, index, from), lane);
    }
}

/* The `size`-th largest of the lanes' x. `room`: 32 aligned words of the warp. */
__device__ __forceinline__ uint32_t largest_but(uint32_t x, int size, uint32_t *room, int lane)
{
    int above = 0;
    room[lane] = x;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint4 y = ((const uint4 *)room)[i];
        above += (y.x > x) + (y.y > x) + (y.z > x) + (y.w > x);
    }
    __syncwarp();
    return __reduce_min_sync(~0u, above < size ? x : ~0u);
}

/* Merges a list of at most 32 with `count` <= 32 candidates, which lie in `key` and `index` as they came.
 * `key`: 32 aligned words, 0 behind the candidates. */
__device__ __forceinline__ void merge(const best_list &b, const uint32_t *key, const int32_t *index,
                                      int count, int lane)
{
    const uint32_t own = lane < b.size ? b.key[lane] : 0, other = lane < count ? key[lane] : 0;
    const int32_t own_at = lane < b.size ? b.index[lane] : 0, other_at = lane < count ? index[lane] : 0;
    /* their places: how many come before them, of equal candidates those of lower lanes */
    int own_to = lane, other_to = __popc(__match_any_sync(~0u, other) & ((1u << lane) - 1));
#pragma unroll 2
    for (int j = 0; j < count; j += 4) {
        const uint4 k = *(const uint4 *)(key + j);
        own_to += (k.x > own) + (k.y > own) + (k.z > own) + (k.w > own);
        other_to += (k.x > other) + (k.y > other) + (k.z > other) + (k.w > other);
    }
    const int full = __popc(__ballot_sync(~0u, own != 0));
#pragma unroll 4
    for (int j = 0; j < full; j++) other_to += __shfl_sync(~0u, own, j) >= other;
    __syncwarp(); /* all have read */
    if (lane < b.size && own_to < b.size) {
        b.key[own_to] = own;
        b.index[own_to] = own_at;
    }
    if (lane < count && other_to < b.size) {
        b.key[other_to] = other;
        b.index[other_to] = other_at;
    }
    __syncwarp();
}

/* Offers 32 N candidates to a list of at most 32: lane l's i-th has index first + 32 i + l. `room`: shared
 * memory of the warp, 64 aligned words. */
template <int N>
__device__ __forceinline__ void offer_many(const best_list &b, const uint32_t (&key)[N], int32_t first,
                                           uint32_t *room, int lane)
{
    if (b.size == 0) return;
    uint32_t *const keys = room;
    int32_t *const indices = (int32_t *)room + 32;
    uint32_t least = b.key[b.size - 1] + 1; /* what enters a list is at least this */
    uint32_t top = key[0];
#pragma unroll
    for (int i = 1; i < N; i++) top = top > key[i] ? top : key[i];
    const uint32_t some = __ballot_sync(~0u, top >= least);
    if (some == 0) return;
    /* Of lanes enough to fill the list with their largest, only what reaches these can stay in it. */
    if (__popc(some) >= b.size) least = largest_but(top, b.size, room, lane);
    for (int from = 0, all = 32; from < all; from += 32) {
        int before = -from;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t mask = __ballot_sync(~0u, key[i] >= least);
            const int at = before + __popc(mask & ((1u << lane) - 1));
            if (key[i] >= least && (unsigned)at < 32) {
                keys[at] = key[i];
                indices[at] = first + i * 32 + lane;
            }
            before += __popc(mask);
        }
        all = before + from;
        if (lane >= before) keys[lane] = 0;
        __syncwarp();
        merge(b, keys, indices, before < 32 ? before : 32, lane);
    }
}

/* Writes forced entries [0, f0) and [g0, g1), and what the list holds, ascending and padded. Warp-wide. */
static __device__ void write_list(const best_list &b, int f0, int g0, int g1, int32_t *dst, int k,
                                  int32_t *count, int lane)
{
    const int forced = f0 + (g1 - g0);
    int kept = 0;
    for (int i = lane; i < b.size; i += 32) kept += b.key[i] != 0;
    kept = __reduce_add_sync(~0u, kept);
    for (int i = lane; i < forced + kept; i += 32) {
        const int x = i < f0 ? i : i < forced ? g0 + (i - f0) : b.index[i - forced];
        int at = 0;
#pragma unroll 4
        for (int j = 0; j < kept; j++) at += b.index[j] < x;
        at += (x < f0 ? x : f0) + (x < g0 ? 0 : x < g1 ? x - g0 : g1 - g0);
        dst[at] = x;
    }
    for (int i = forced + kept + lane; i < k; i += 32) dst[i] = -1;
    if (count != NULL && lane == 0) *count = forced + kept;
}

/* The lists of a block as they are filled, in shared memory behind what has a fixed size: keys [LISTS][each],
 * then their indices. */
template <int LISTS> struct list_tail {
    uint32_t *keys;
    int each;

    __device__ __forceinline__ list_tail(void *from, int entries) : keys((uint32_t *)from), each(entries) {}
    /* `size` entries of a list from `first` on. */
    __device__ __forceinline__ best_list list(int list, int first, int size) const
    {
        uint32_t *const key = keys + list * each + first;
        return {key, (int32_t *)key + LISTS * each, size};
    }
    static size_t bytes(int entries) { return 2 * (size_t)LISTS * entries * 4; }
};

/* Consecutive list rows of one sequence, which share keys. */
template <typename T> struct list_run {
    sequence seq;
    int64_t q_first, row_begin; /* the first query and list row */
    int lists, head0, unit;
    const T *q, *k;
};

/* The groups of a list (mean_logit), as they are chosen. */
struct own_groups {
    int seen_last;             /* entries that the last query sees */
    int keep_last, keep_first; /* kept always: the newest visible to the last, and to the first query */
    best_list best;
};

__device__ __forceinline__ int kept_groups(const own_groups &x)
{
    return x.keep_last < 0 ? 0 : x.keep_first < 0 || x.keep_first == x.keep_last ? 1 : 2;
}

/* List rows that no tile has: padding. One warp calls. */
static __device__ __forceinline__ void pad_lists(const select_kernel &s, int64_t vb, int u, int64_t row,
                                                 int64_t end)
{
    const int lane = threadIdx.x & 31;
    for (; row < s.list_rows && row < end; row++) {
        for (int i = lane; i < s.rule.k; i += 32)
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

/* The score of the block whose last entry's score is *last: each entry counts as often as it overlaps. */
__device__ __forceinline__ float block_score(const select_kernel &s, const float *last)
{
    const int span = s.l_over_d - 1 + s.s_over_d, most = s.l_over_d < s.s_over_d ? s.l_over_d : s.s_over_d;
    if (span == 1) return *last;
    float score = 0.0f;
    for (int i = 0; i < span; i++) { /* the first is the earliest that overlaps */
        const int up = i + 1 < span - i ? i + 1 : span - i;
        score += (float)(up < most ? up : most) * last[i - (span - 1)];
    }
    return score;
}

/* Offers the selection blocks whose last entry is in [e0, e0 + entries); out[i] is the score of entry e0 + i.
 */
static __device__ __forceinline__ void close_blocks(const select_kernel &s, const contest &in,
                                                    const best_list &best, int e0, int entries,
                                                    const float *out)
{
    const int lane = threadIdx.x & 31, from = s.s_over_d == 1 ? e0 : e0 / s.s_over_d,
              end = s.s_over_d == 1 ? e0 + entries : (e0 + entries) / s.s_over_d,
              to = end < in.candidates ? end : in.candidates;
    for (int j0 = from; j0 < to; j0 += 32) {
        const int block = j0 + lane;
        const bool valid = block < to && block >= in.f0 && !(block >= in.g0 && block < in.g1);
        const float score = valid ? block_score(s, out + (block + 1) * s.s_over_d - 1 - e0) : 0.0f;
        offer(best, valid, score, block, lane);
    }
}

/* The same for lists of at most 32, 32 N blocks at once; `out` has room for as many scores. SUMS: they are
 * sums of probabilities, so none is below 0. */
template <int N, bool SUMS>
__device__ __forceinline__ void close_many(const select_kernel &s, const contest &in, const best_list &best,
                                           int e0, int entries, const float *out, uint32_t *room)
{
    const int lane = threadIdx.x & 31, from = s.s_over_d == 1 ? e0 : e0 / s.s_over_d,
              end = s.s_over_d == 1 ? e0 + entries : (e0 + entries) / s.s_over_d,
              to = end < in.candidates ? end : in.candidates;
    const int past = in.g0 < in.g1 && in.g0 < to ? in.g0 : to; /* [g0, g1) are the last candidates */
    for (int j0 = from; j0 < past; j0 += 32 * N) {
        float score[N];
        uint32_t key[N];
        if (s.l_over_d == 1 && s.s_over_d == 1) { /* loads wait for no branch */
#pragma unroll
            for (int i = 0; i < N; i++) score[i] = out[j0 - e0 + i * 32 + lane];
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const int block = j0 + i * 32 + lane;
                score[i] = block < to ? block_score(s, out + (block + 1) * s.s_over_d - 1 - e0) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int block = j0 + i * 32 + lane;
            const uint32_t order = SUMS ? order_of_sum(score[i]) : order_of(score[i]);
            key[i] = block >= in.f0 && block < past ? order : 0;
        }
        offer_many<N>(best, key, j0, room, lane);
    }
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
static __device__ __forceinline__ void write_groups(const select_kernel &s, const own_groups &x, int64_t vb,
                                                    int u, int64_t row)
{
    const int lane = threadIdx.x & 31;
    const int ga = x.keep_first >= 0 && x.keep_first != x.keep_last ? x.keep_first : -1;
    int full = 0; /* empty slots of the contest go: the kept ones come behind the full ones */
    for (int i = 0; i < x.best.size; i++) full += x.best.key[i] != 0;
    __syncwarp();
    if (lane == 0) {
        int at = full;
        for (int w = 0; w < 2; w++) {
            const int g = w == 0 ? x.keep_last : ga;
            if (g < 0) continue;
            x.best.key[at] = ~0u;
            x.best.index[at++] = g;
        }
    }
    __syncwarp();
    const best_list all = {x.best.key, x.best.index, full + kept_groups(x)};
    write_list(all, 0, 0, 0,
               s.groups + vb * s.group_stride[0] + u * s.group_stride[1] + row * s.group_stride[2], s.c, NULL,
               lane);
}

static __device__ __forceinline__ void write_blocks(const select_kernel &s, const contest &in,
                                                    const best_list &best, int64_t vb, int u, int64_t row)
{
    if (s.idx == NULL) return;
    write_list(best, in.f0, in.g0, in.g1,
               s.idx + vb * s.idx_stride[0] + u * s.idx_stride[1] + row * s.idx_stride[2], s.rule.k,
               s.count != NULL
                   ? s.count + vb * s.count_stride[0] + u * s.count_stride[1] + row * s.count_stride[2]
                   : NULL,
               threadIdx.x & 31);
}

#endif
