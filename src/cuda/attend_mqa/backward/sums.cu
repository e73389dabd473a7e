/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sums.cu - the gradient of each row of keys from its partials, a block a row: each of eight warps adds every
 * eighth partial, then the warps' sums are added in order. Limit: the partials are read once. */
#include "attend_mqa/backward/backward.cuh"

enum { WARPS = 8, THREADS = WARPS * 32, AT_ONCE = 4 };

/* The queries of a slice that may see a row. */
struct seers {
    int64_t row; /* in dim 1 of the view */
    int64_t sequence;
    int first, end;     /* in the slice */
    bool before, after; /* queries before and after the slice may, too */
};

__device__ __forceinline__ seers seers_of(const mqa_sums &s, int64_t block)
{
    const int64_t in = s.cut ? 0 : block / s.n_kv, row = s.cut ? s.raw0 + block : block - in * s.n_kv,
                  see = row - (s.n_kv - s.n_q), first = s.cut ? s.first : 0, end = s.cut ? s.end : s.n_q,
                  from = see > first ? see : first, to = see + s.window < end ? see + s.window : end,
                  at = s.cut ? -first : in * s.n_q;
    return {row, s.b.sequence0 + in, (int)(from + at), (int)((to > from ? to : from) + at),
            see<first, see + s.window> end};
}

/* Partial i of a row: of group i % groups of an entry's or a query's; NULL: the query does not see it. */
template <typename T>
__device__ __forceinline__ const T *raw_partial(const mqa_sums &s, const seers &x, int i)
{
    const int in = i / s.b.groups, query = x.first + in;
    const mqa_query q = s.b.of.queries[query];
    const int64_t key = x.row - q.raw0;
    if (key < 0 || key >= q.raw) return NULL;
    return (const T *)s.b.partials +
           ((query * (int64_t)s.b.raw_most + key) * s.b.groups + i - in * s.b.groups) * s.b.of.dim;
}

template <typename T> __device__ __forceinline__ void add_eight(float (&sum)[8], const uint4 &x)
{
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 y = unpack2<T>(words[i]);
        sum[i * 2] += y.x;
        sum[i * 2 + 1] += y.y;
    }
}

/* to[at] = x; `to` is f32 where it is wide. */
template <typename T> __device__ __forceinline__ void store(void *to, int64_t at, float x, bool wide)
{
    if (wide) ((float *)to)[at] = x;
    else ((T *)to)[at] = from_float<T>(x);
}

template <typename T> __global__ void __launch_bounds__(THREADS) mqa_sum(const __grid_constant__ mqa_sums s)
{
    __shared__ float shares[WARPS][MQA_DIM];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = s.b.of.dim;
    const bool raw = blockIdx.x < s.raw_rows;
    const int64_t entry = blockIdx.x - s.raw_rows; /* of the slice's sequences */
    seers x = {};
    int count;
    const T *rows = NULL;
    if (raw) {
        x = seers_of(s, blockIdx.x);
        count = (x.end - x.first) * s.b.groups;
    } else {
        count = 0;
        if (s.b.words > 0) {
            const choice last = s.b.choices[entry * s.b.words + s.b.words - 1];
            count = (last.before + __popc(last.chose)) * s.b.groups;
            rows = (const T *)s.b.partials +
                   (s.b.first[entry] + (s.b.raw_wanted ? (int64_t)s.b.of.rows * s.b.raw_most : 0)) *
                       s.b.groups * dim;
        }
    }
    float sum[2][8] = {};
    for (int i = warp; i < count; i += WARPS * AT_ONCE) {
        uint4 part[AT_ONCE][2];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int at = i + j * WARPS;
            const T *from = NULL;
            if (at < count) from = raw ? raw_partial<T>(s, x, at) : rows + (int64_t)at * dim;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int c = h * 256 + lane * 8;
                part[j][h] =
                    from != NULL && c < dim ? __ldcs((const uint4 *)(from + c)) : make_uint4(0, 0, 0, 0);
            }
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) add_eight<T>(sum[h], part[j][h]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 8; c += 4)
            *(float4 *)&shares[warp][h * 256 + lane * 8 + c] =
                make_float4(sum[h][c], sum[h][c + 1], sum[h][c + 2], sum[h][c + 3]);
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += THREADS) {
        float all = 0.0f;
        for (int w = 0; w < WARPS; w++) all += shares[w][c];
        if (raw) {
            const int64_t held = s.cut && s.b.raw_most > 0 ? x.row % s.b.raw_most * dim + c : 0;
            if (s.cut && !s.begins && x.before) all += s.carried[held];
            if (s.cut && !s.ends && x.after) s.carry[held] = all;
            else store<T>(s.d_kv.p, x.sequence * s.d_kv.s[0] + x.row * s.d_kv.s[1] + c, all, s.wide_kv);
        } else {
            float *const held = s.cut ? s.entries + entry * dim + c : NULL;
            if (s.cut && !s.begins) all += *held;
            if (s.cut && !s.ends) *held = all;
            else {
                const int64_t in = entry / s.b.entry_rows;
                store<T>(s.d_entries.p,
                         (s.b.sequence0 + in) * s.d_entries.s[0] +
                             (entry - in * s.b.entry_rows) * s.d_entries.s[1] + c,
                         all, s.wide_entries);
            }
        }
    }
}

quern_status mqa_sum_partials(cudaStream_t stream, const mqa_sums &s, quern_dtype dtype)
{
    const int64_t rows = s.raw_rows + s.entry_rows;
    if (rows == 0) return QUERN_OK;
    if (dtype == QUERN_BF16) mqa_sum<bf16><<<(unsigned)rows, THREADS, 0, stream>>>(s);
    else mqa_sum<f16><<<(unsigned)rows, THREADS, 0, stream>>>(s);
    return LAUNCHED("sums of partials");
}
