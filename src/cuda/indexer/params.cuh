/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* params.cuh - what the indexer's kernels have in common: their arguments, what a query sees, how a key's
 * codes become 16-bit operands, and how a list is stored. */
#ifndef QUERN_CUDA_INDEXER_PARAMS_CUH
#define QUERN_CUDA_INDEXER_PARAMS_CUH

#include "common/decode.cuh"
#include "common/fp4.cuh"
#include "common/gather.cuh"
#include "common/launch.cuh"
#include "common/rows.cuh"
#include "common/topk.cuh"

struct index_kernel {
    view4 q;
    row_source keys;
    entry_format format;
    const void *w;
    int64_t w_row[3];
    quern_dtype w_dtype;
    int32_t *idx, *count;
    int64_t idx_row[2], count_row[2];
    float *scores; /* or NULL */
    int64_t scores_row[2], scores_n;
    const int32_t *positions;
    /* Of a varlen batch, whose rows are queries of one each, else NULL: a row's sequence, -1 where it has
     * none, and the entries of that. */
    const int32_t *sequence, *limit;
    /* Of such a batch that is not spread, else NULL: its offsets and the sequences' positions, and how many
     * sequences and rows there are; `row`: the batch's first here. */
    const int32_t *cu, *starts;
    int64_t cu_s, starts_s;
    int32_t sequences, rows, row;
    int64_t position, entries; /* entries: of a sequence, at most */
    uint32_t ratio;
    int32_t batch, queries, heads, width, k;
    float scale;
    bool q_wide;
    bool rounded;    /* queries, to e4m3, head by head */
    int32_t *status; /* of queries that are rounded; or NULL */
};

/* Whether sequence b of a varlen batch has row t. */
__device__ __forceinline__ bool index_has_row(const index_kernel &a, int b, int t)
{
    return t >= cu_seqlens_at(a.cu, b * a.cu_s, a.rows) && t < cu_seqlens_at(a.cu, (b + 1) * a.cu_s, a.rows);
}

/* A row of a batch: the row of the table, the end of its sequence, and how many entries its query sees. */
struct index_place {
    int sequence, limit, seen;
};

/* That of row b of single queries. Of a batch that is not spread equal numbers of rows are found first. */
__device__ __forceinline__ index_place index_place_of(const index_kernel &a, int b)
{
    const auto whole = [&](int64_t tokens) {
        const int64_t entries = tokens / a.ratio;
        return (int)(entries < a.entries ? entries : a.entries);
    };
    if (a.cu == NULL) {
        const int64_t start = a.positions != NULL ? a.positions[b] : a.position;
        return {a.sequence != NULL ? a.sequence[b] : b, a.limit != NULL ? a.limit[b] : INT32_MAX,
                start < 0 ? 0 : whole(start + 1)};
    }
    const int t = a.row + b;
    int s = (int)((int64_t)t * a.sequences / a.rows);
    if (s >= a.sequences || !index_has_row(a, s, t))
        for (s = 0; s < a.sequences && !index_has_row(a, s, t);) s++;
    if (s == a.sequences) return {-1, 0, 0};
    const int64_t start = a.starts[s * a.starts_s], first = cu_seqlens_at(a.cu, s * a.cu_s, a.rows),
                  end = start + cu_seqlens_at(a.cu, (s + 1) * a.cu_s, a.rows) - first;
    if (start < 0 || end > INT32_MAX) return {-1, 0, 0};
    return {s, (int)(end / a.ratio), whole(start + t - first + 1)};
}

/* The row of the table. */
__device__ __forceinline__ int index_sequence(const index_kernel &a, int b)
{
    return a.sequence != NULL ? a.sequence[b] : b;
}

/* The end of the scores that a row's query gets: its sequence's entries, or all. */
__device__ __forceinline__ int64_t index_scores(const index_kernel &a, int b)
{
    return a.limit != NULL && a.limit[b] < a.scores_n ? a.limit[b] : a.scores_n;
}

/* How many entries of a sequence, from the first on, a query sees. */
__device__ __forceinline__ int index_seen(const index_kernel &a, int b, int query)
{
    const int64_t start = a.positions != NULL ? a.positions[b] : a.position;
    if (query >= a.queries || start < 0) return 0;
    const int64_t whole = (start + query + 1) / a.ratio;
    return (int)(whole < a.entries ? whole : a.entries);
}

__device__ __forceinline__ float index_weight(const index_kernel &a, int b, int query, int head)
{
    const int64_t at = b * a.w_row[0] + query * a.w_row[1] + head * a.w_row[2];
    if (a.w_dtype == QUERN_F32) return ((const float *)a.w)[at];
    return a.w_dtype == QUERN_BF16 ? to_float(((const bf16 *)a.w)[at])
                                   : __half2float(((const __half *)a.w)[at]);
}

/* NaN and infinity of a query that is rounded count as 0. */
__device__ __forceinline__ float index_finite(const index_kernel &a, float x)
{
    if (fabsf(x) <= 3.402823466e38f) return x;
    raise_status(a.status, QUERN_STATUS_NOT_FINITE);
    return 0.0f;
}

/* The scale of a head whose largest magnitude is this. */
__device__ __forceinline__ float index_round_scale(float most)
{
    return __fdiv_rn(fmaxf(most, 1e-4f), 448.0f);
}

/* ReLU that keeps NaN. */
__device__ __forceinline__ float relu(float x)
{
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/*
 * A key of bytes: its codes go into the products, its scale multiplies the score, as a positive factor
 * commutes with ReLU. A negative scale's sign goes to the codes. FP4 has a scale for every 32 codes: the
 * largest multiplies the score and the codes are multiplied by the ratio of their own to it.
 */
struct index_scale {
    float score;
    uint32_t fp4; /* the scales' bytes */
    int most;
    bool negative;
};

__device__ __forceinline__ index_scale index_scale_of(const index_kernel &a, const char *scales)
{
    index_scale s = {1.0f, 0, 0, false};
    if (a.format == ENTRY_ROWS || scales == NULL) return s;
    if (a.format != ENTRY_FP4) {
        const float x = __uint_as_float(load_four(scales, a.keys.wide));
        s.negative = (__float_as_uint(x) & 0x80000000) != 0;
        s.score = s.negative ? -x : x;
        return s;
    }
    for (int i = 0; i < a.width / 32; i++) s.most = max(s.most, (int)(uint8_t)scales[i]);
    s.score = s.most == 255 ? NAN : s.most == 0 ? __uint_as_float(0x00400000) : __uint_as_float(s.most << 23);
    return s;
}

/* Channels c ... c + 7 of a row of codes, as bf16. */
__device__ __forceinline__ uint4 index_codes(const index_kernel &a, const row_place &row, int c,
                                             const index_scale &s)
{
    if (a.format == ENTRY_FP4)
        return e2m1_bf16x8(load_four(row.data + c / 2, a.keys.wide),
                           e8m0_bf16x2((int)(uint8_t)row.scales[c / 32] - s.most + 127));
    uint4 x = e4m3_bf16x8(load_eight(row.data + c, a.keys.wide), 0x3f803f80);
    const uint32_t sign = s.negative ? 0x80008000 : 0;
    return make_uint4(x.x ^ sign, x.y ^ sign, x.z ^ sign, x.w ^ sign);
}

/* Stores a query's k best, and the scores of what it does not see; by one warp. */
__device__ inline void index_store(const index_kernel &a, int b, int query, best_list &best)
{
    const int lane = threadIdx.x % 32;
    best_cut(best, a.k, 0);
    int32_t *const idx = a.idx + b * a.idx_row[0] + query * a.idx_row[1];
    for (int i = lane; i < a.k; i += 32) idx[i] = i < best.n ? best.index[i] : -1;
    if (lane == 0) a.count[b * a.count_row[0] + query * a.count_row[1]] = best.n;
    float *const scores = a.scores + b * a.scores_row[0] + query * a.scores_row[1];
    const int64_t end = index_scores(a, b);
    for (int64_t i = index_seen(a, b, query) + lane; a.scores != NULL && i < end; i += 32)
        scores[i] = -INFINITY;
}

/* Whether the kernels take a call; if not, says so. */
bool index_takes(const indexer_args *args, char why[STAGE_WHY_BYTES]);
/* `spread`: index_spread_bytes() in the workspace, which index_spread_rows() fills; NULL: a varlen batch is
 * not spread, for kernels that find its rows' places. */
index_kernel index_kernel_of(const indexer_args *args, void *spread);
size_t index_spread_bytes(const indexer_args *args);
quern_status index_spread_rows(const stage_exec *exec, const indexer_args *args, const index_kernel &a);
/* Faults of the data, into the caller's status word, if there is one. */
quern_status index_report(const stage_exec *exec, const index_kernel &a);

#endif
