/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - what the kernels of attention whose heads share their keys have in common: a plan of the
 * queries, made by a launch of its own, and the end of an output row.
 *
 * The plan says of every query which raw rows it sees and which entries: the first n, or those of its
 * list, cleaned: visible, each once, ascending. So the kernels know neither masks nor sequences, and a list's
 * order and padding change no bit. A query without keys, and a row past the last sequence, has none of both.
 */
#ifndef QUERN_CUDA_ATTEND_MQA_PARAMS_CUH
#define QUERN_CUDA_ATTEND_MQA_PARAMS_CUH

#include "common/decode.cuh"
#include "common/gather.cuh"
#include "common/launch.cuh"

enum {
    MQA_DIM = 512,
    MQA_LIST_MOST = 8192, /* entries of a list: the plan sorts it in shared memory */
    MQA_CODES = 576       /* bytes of a row of bytes before its scales: 448 e4m3 and 64 bf16 */
};

struct mqa_query {
    int32_t sequence, row; /* in dims 0 and 1 of q */
    int32_t position;
    int32_t raw0, raw; /* its raw rows */
    int32_t entry0, entries;
    int32_t b; /* of tables */
};

/* What a plan is made from. */
struct mqa_planner {
    seqs of;
    row_source raw, entries;
    const int32_t *positions, *list, *count;
    int64_t list_row[2], count_row[2];
    int64_t position, window, entry_rows;
    fast_div ratio, n_q;
    int32_t k;
    int64_t row0; /* the first query that is planned; its plan and list come first */
    mqa_query *queries;
    int32_t *kept, *status;
};

/* The rotation of an output row: for each position dim / 2 cosines, then the sines, in f32 or q's dtype. */
struct mqa_rotation {
    const void *table;
    int64_t row;
    quern_dtype dtype;
    int32_t dim; /* channels that are rotated, the last ones; 0: none */
};

struct mqa_kernel {
    const mqa_query *queries;
    const int32_t *list; /* cleaned lists [queries][list_row]; NULL: the first entries */
    int64_t list_row;
    int32_t rows; /* queries of the call */
    row_source raw, entries;
    bool bytes; /* rows of 584 bytes */
    view4 q, o;
    view3 lse, lse_win; /* p may be NULL */
    const float *sink;  /* or NULL */
    mqa_rotation rotation;
    int32_t heads, dim;
    float scale, scale2; /* scale2: times log2(e) */
    bool q_wide, o_wide;
};

/* Which row of its source is key `key` of a query, of its raw rows or else of its entries; -1: none. */
__device__ __forceinline__ int mqa_find_key(const mqa_kernel &a, const mqa_query &q, int query, bool raw,
                                            int key)
{
    if (raw) return key < q.raw ? q.raw0 + key : -1;
    if (key >= q.entries) return -1;
    return q.entry0 + (a.list != NULL ? __ldg(a.list + query * a.list_row + key) : key);
}

/* Where row `found` of a query's raw rows, or else of its entries, stands; no address where it is -1. */
__device__ __forceinline__ row_place mqa_row_at(const row_source &source, const mqa_query &q, int found)
{
    if (found < 0) return {NULL, NULL};
    return row_at(source, source.table != NULL ? q.b : q.sequence, found);
}

/* The eight channels from panel * 64 + c on of a row of bytes: seven panels of e4m3 with a scale each, then
 * one of bf16. */
__device__ __forceinline__ uint4 mqa_decode(const row_place &row, int panel, int c, bool wide)
{
    const bool coded = panel < MQA_DIM / 64 - 1;
    const char *const at = row.data + (coded ? panel * 64 + c : 448 + c * 2);
    const uint2 low = load_eight(at, wide), high = coded ? low : load_eight(at + 8, wide);
    return coded ? e4m3_bf16x8(low, e8m0_bf16x2((uint8_t)row.scales[panel]))
                 : make_uint4(low.x, low.y, high.x, high.y);
}

/* Rotates channels c and c + 1, c even, of an output row back. A: the table's dtype. */
template <typename A>
__device__ __forceinline__ void mqa_rotate_back(const mqa_kernel &a, int position, int c, float &x, float &y)
{
    const mqa_rotation &r = a.rotation;
    const int at = c - (a.dim - r.dim);
    if (at < 0) return;
    const A *const cosine = (const A *)r.table + position * r.row + at / 2;
    const float cos = to_float<A>(cosine[0]), sin = to_float<A>(cosine[r.dim / 2]), held = x;
    x = x * cos + y * sin;
    y = y * cos - held * sin;
}

/* From a head's sum of 2^(score - base): what its values are multiplied by, and its log sum. */
__device__ __forceinline__ float mqa_log_sum(float base, float sum)
{
    return sum == 0.0f ? -INFINITY : fmaf(base == -INFINITY ? 0.0f : base, 0.69314718056f, logf(sum));
}
__device__ __forceinline__ float mqa_factor(float sink, float lse, float sum)
{
    return lse == -INFINITY ? 0.0f : 1.0f / (sum * (1.0f + expf(sink - lse)));
}

/* Whether the kernels take a call: 16-bit queries and rows of their dtype, or bytes; if not, says so. */
bool mqa_takes(const attend_mqa_args *args, char why[STAGE_WHY_BYTES]);
size_t attend_mqa_bytes(const stage_exec *exec, const attend_mqa_args *args);
/* The arguments of the kernels and of a plan; launches the plan. */
mqa_kernel mqa_kernel_of(const attend_mqa_args *args, const mqa_planner &plan);
mqa_planner mqa_planner_of(const stage_exec *exec, const attend_mqa_args *args, void *workspace);
quern_status mqa_make_plan(const stage_exec *exec, const mqa_planner &plan, int64_t rows);

#endif
