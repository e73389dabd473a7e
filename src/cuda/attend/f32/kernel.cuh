/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - attention forward and backward for f32 inputs, every mask, on the f32 cores (the tensor
 * cores would round the operands).
 *
 * 256 threads as 16 x 16 own TS rows x TS keys; thread (ty, tx) holds rows ty RT ... and keys or columns
 * tx, tx + 16, ...; operands stand in shared memory with rows of DP + 1 floats, so that both row and column
 * walks are free of bank conflicts. Streams of rows and keys are those of attend/attend.cuh, the two backward
 * kernels those of backward/dq.cuh and backward/dkv.cuh. TS = 64 up to D = 128 (150 KB in
 * the backward), 32 at D = 256.
 *
 * Before the two backward kernels a third says of each row what its P = exp((S - x) scale - y) is made of:
 * (0, lse), or where lse is coarse (stages/attend.h) the row's maximum and the logarithm of its sum, with
 * delta, from all its scores, and of both what a sink leaves (attend/sink.cu). That is two products more for
 * blocks with such a row.
 */
#ifndef QUERN_CUDA_ATTEND_F32_KERNEL_CUH
#define QUERN_CUDA_ATTEND_F32_KERNEL_CUH

#include "attend/any.cuh"
#include "attend/ranges.cuh"

#include <math.h>

enum { SIDE = 16, THREADS = SIDE * SIDE };

/* The factor of a pair that does not see each other: left out, so that NaN and infinity do not pass. Other
 * factors get + 0, which makes -0 of theirs 0. */
#define UNSEEN (-0.0f)
#define UNSEEN_BITS 0x80000000u

template <int DP> struct shape {
    static constexpr int TS = DP > 128 ? 32 : 64, RT = TS / SIDE, LD = DP + 1, CT = DP / SIDE;
};

/* Shared memory; behind `column`, with lists, a.list_k entries each of the clean list, flags and the raw
 * list. */
template <int DP> struct weigh_memory {
    enum { TS = shape<DP>::TS, LD = shape<DP>::LD };
    float q[TS * LD], d_o[TS * LD], k[TS * LD], v[TS * LD];
    int32_t column[TS];
};
template <int DP, bool BACKWARD> struct rows_memory {
    enum { TS = shape<DP>::TS, LD = shape<DP>::LD };
    float q[TS * LD], d_o[BACKWARD ? TS * LD : 0], k[TS * LD], v[TS * LD], p[TS * (TS + 1)];
    int32_t column[TS];
};
template <int DP> struct keys_memory {
    enum { TS = shape<DP>::TS, LD = shape<DP>::LD };
    float k[TS * LD], v[TS * LD], q[TS * LD], d_o[TS * LD], p[TS * (TS + 1)];
    float stat[6 * TS]; /* maximum, log sum, delta, row_scale; as integers lo, hi */
};

/* acc[i][j] += sum_c A[ty RT + i][c] B[tx + 16 j][c] */
template <int DP>
__device__ __forceinline__ void mm_nt(float (&acc)[shape<DP>::RT][shape<DP>::RT], const float *a,
                                      const float *b, int dim)
{
    constexpr int RT = shape<DP>::RT, LD = shape<DP>::LD;
    const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
    for (int c = 0; c < dim; c++)
#pragma unroll
        for (int i = 0; i < RT; i++)
#pragma unroll
            for (int j = 0; j < RT; j++)
                acc[i][j] = fmaf(a[(ty * RT + i) * LD + c], b[(tx + SIDE * j) * LD + c], acc[i][j]);
}

/* acc[i][n] += sum_k P[(ty RT + i), k] B[k][tx + 16 n]; P element (r, k) at p[r * ps + k * pk] */
template <int DP>
__device__ __forceinline__ void mm_nn(float (&acc)[shape<DP>::RT][shape<DP>::CT], const float *p, int ps,
                                      int pk, const float *b)
{
    constexpr int RT = shape<DP>::RT, LD = shape<DP>::LD, CT = shape<DP>::CT;
    const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
    for (int k = 0; k < shape<DP>::TS; k++)
#pragma unroll
        for (int n = 0; n < CT; n++) {
            const float x = b[k * LD + tx + SIDE * n];
#pragma unroll
            for (int i = 0; i < RT; i++) {
                const float y = p[(ty * RT + i) * ps + k * pk];
                if (__float_as_uint(y) != UNSEEN_BITS) acc[i][n] = fmaf(y, x, acc[i][n]);
            }
        }
}

template <int DP> __device__ __forceinline__ void load_row(float *dst, const float *src, int dim, int lane)
{
    for (int c = lane; c < DP; c += 32) dst[c] = src != NULL && c < dim ? src[c] : 0.0f;
}

struct block_rows {
    sequence seq;
    int64_t first, end;
    int u, kvh, head0;
    const int32_t *list_row;
};

/* The rows of this block (the same cut as in forward/kernel.cuh). */
static __device__ bool find_rows(const attend_kernel &a, int m, bool listed, block_rows *r)
{
    r->u = blockIdx.y;
    const int64_t piece = (int64_t)gridDim.x - 1 - blockIdx.x;
    r->list_row = NULL;
    if (listed) {
        const int64_t tile_rows = (int64_t)a.tile * a.hs, per = (tile_rows + m - 1) / m;
        int64_t q0;
        if (!piece_at(a.sq, piece / per, a.tile, 1, &r->seq, &q0)) return false;
        r->first = q0 * a.hs + piece % per * m;
        const int64_t tile_end = (q0 + a.tile) * a.hs, end = r->seq.nq * a.hs;
        r->end = tile_end < end ? tile_end : end;
        const int64_t row = a.sq.cu_q == NULL ? q0 / a.tile : piece / per;
        r->list_row =
            a.list + r->seq.view_b * a.list_stride[0] + r->u * a.list_stride[1] + row * a.list_stride[2];
    } else {
        if (!piece_at(a.sq, piece, m, a.hs, &r->seq, &r->first)) return false;
        r->end = r->seq.nq * a.hs;
    }
    r->kvh = a.units == a.heads ? r->u / a.group : r->u;
    r->head0 = a.units == a.heads ? r->u : r->u * a.group;
    return r->first < r->end;
}

__device__ __forceinline__ const float *row_of(const view4 &v, const sequence &seq, int64_t at0, int64_t n,
                                               int64_t head)
{
    return (const float *)v.p + seq.view_b * v.s[0] + (at0 + n) * v.s[1] + head * v.s[2];
}

__device__ __forceinline__ float stat_of(const view3 &v, const sequence &seq, int64_t n, int64_t head)
{
    return v.p[seq.view_b * v.s[0] + head * v.s[1] + (seq.q0 + n) * v.s[2]];
}

/* Takes a tile's scores of one row in, which become P, and the row's running maximum and sum. Returns what
 * earlier sums shrink by. */
template <int RT>
__device__ __forceinline__ float soften_row(float (&s)[RT], const int32_t *column, int lo, int hi,
                                            float scale, float *row_max, float *row_sum)
{
    const int tx = threadIdx.x % SIDE;
    float top = *row_max;
    for (int j = 0; j < RT; j++) {
        const int key = column[tx + SIDE * j];
        if (key < lo || key >= hi) s[j] = -INFINITY;
        top = fmaxf(top, s[j]);
    }
    for (int w = 8; w > 0; w /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, w));
    const float from = top == -INFINITY ? 0.0f : top, shrink = expf((*row_max - from) * scale);
    *row_max = top;
    float sum = 0.0f;
    for (int j = 0; j < RT; j++) {
        const int key = column[tx + SIDE * j];
        const float p = expf((s[j] - from) * scale);
        s[j] = key >= lo && key < hi ? p : UNSEEN;
        sum += p;
    }
    *row_sum = *row_sum * shrink + sum;
    return shrink;
}

/* A sum over the 16 threads of a row, the same in each of them. */
__device__ __forceinline__ float row_total(float x)
{
    for (int w = 8; w > 0; w /= 2) x += __shfl_xor_sync(~0u, x, w);
    return x;
}

/* A tile's dS of one row. */
template <int RT>
__device__ __forceinline__ void differentiate_row(const float (&s)[RT], const float (&dp)[RT],
                                                  const int32_t *column, int lo, int hi, float scale,
                                                  float2 norm, float row_scale, float delta, float *ds_row)
{
    const int tx = threadIdx.x % SIDE;
    for (int j = 0; j < RT; j++) {
        const int key = column[tx + SIDE * j];
        const bool seen = key >= lo && key < hi;
        const float p = seen ? expf((s[j] - norm.x) * scale - norm.y) : 0.0f;
        ds_row[tx + SIDE * j] = seen ? p * (dp[j] * row_scale - delta) + 0.0f : UNSEEN;
    }
}

/* The block's rows of `view` as a tile of TS; rows that it does not have become zeros. */
template <int DP>
__device__ __forceinline__ void load_rows(const attend_kernel &a, const block_rows &r, const view4 &view,
                                          int dim, float *tile)
{
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < shape<DP>::TS; i += THREADS / 32) {
        const int64_t row = r.first + i;
        load_row<DP>(tile + i * shape<DP>::LD,
                     row < r.end ? row_of(view, r.seq, r.seq.q0, row / a.hs, r.head0 + row % a.hs) : NULL,
                     dim, lane);
    }
}

/* The stream of keys that the block's rows see: of a range, from key `base` on, or of a clean list. */
struct key_slots {
    int64_t base, slots;
    const int32_t *list;
};

/* `list`: shared memory of three lists. All threads call. */
template <int TS>
__device__ __forceinline__ key_slots find_slots(const attend_kernel &a, const block_rows &r, bool listed,
                                                int32_t *list)
{
    const int64_t last = (r.first + TS < r.end ? r.first + TS : r.end) - 1;
    int lo, hi, unused;
    row_keys(a, r.seq, r.first / a.hs, &lo, &unused);
    row_keys(a, r.seq, last / a.hs, &unused, &hi);
    if (!listed) return {lo, hi - lo, NULL};
    const int kept =
        clean_list(r.list_row, a.list_k, a.list_block, hi, list, list + a.list_k, list + 2 * a.list_k);
    return {0, (int64_t)kept * a.list_block, list};
}

/* K and V of slots [slot0, slot0 + TS) as tiles; `column` gets their keys. */
template <int DP>
__device__ __forceinline__ void load_keys(const attend_kernel &a, const block_rows &r, const key_slots &keys,
                                          int64_t slot0, float *sk, float *sv, int32_t *column)
{
    constexpr int TS = shape<DP>::TS, LD = shape<DP>::LD;
    const sequence &seq = r.seq;
    const int lane = threadIdx.x & 31;
    for (int i = threadIdx.x >> 5; i < TS; i += THREADS / 32) {
        int64_t key = seq.nk;
        const int64_t slot = slot0 + i;
        if (slot < keys.slots)
            key = keys.list != NULL
                      ? (int64_t)keys.list[slot / a.list_block] * a.list_block + slot % a.list_block
                      : keys.base + slot;
        const bool in = key < seq.nk;
        load_row<DP>(sk + i * LD, in ? row_of(a.k, seq, seq.k0, key, r.kvh) : NULL, a.dim_k, lane);
        load_row<DP>(sv + i * LD, in ? row_of(a.v, seq, seq.k0, key, r.kvh) : NULL, a.dim_v, lane);
        if (lane == 0) column[i] = (int32_t)key;
    }
}

__device__ __forceinline__ float2 *norm_of(const attend_kernel &a, float2 *norms, const sequence &seq,
                                           int64_t n, int64_t head)
{
    return norms + (seq.view_b * a.heads + head) * a.sq.n_q + seq.q0 + n;
}

__device__ __forceinline__ bool is_coarse(float lse)
{
    return fabsf(lse) > ATTEND_LSE_COARSE && fabsf(lse) < INFINITY;
}

/* Writes the norm of each row, and delta of those whose lse is coarse. */
template <int DP>
__global__ void __launch_bounds__(THREADS, 1)
    attend_weigh_f32(const __grid_constant__ attend_kernel a, float2 *norms, bool listed, const float *sinks)
{
    constexpr int TS = shape<DP>::TS, RT = shape<DP>::RT;
    extern __shared__ float smem_f[];
    weigh_memory<DP> &m = *(weigh_memory<DP> *)smem_f;
    float *sq = m.q, *sg = m.d_o, *sk = m.k, *sv = m.v;
    int32_t *column = m.column, *list = (int32_t *)(&m + 1);
    const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
    block_rows r;
    if (!find_rows(a, TS, listed, &r)) return;
    bool coarse = false;
    const int64_t own = r.first + threadIdx.x;
    if (threadIdx.x < TS && own < r.end) {
        const float lse = stat_of(a.lse, r.seq, own / a.hs, r.head0 + own % a.hs);
        *norm_of(a, norms, r.seq, own / a.hs, r.head0 + own % a.hs) = make_float2(0.0f, lse);
        coarse = is_coarse(lse);
    }
    if (!__syncthreads_or(coarse)) return;
    load_rows<DP>(a, r, a.q, a.dim_k, sq);
    load_rows<DP>(a, r, a.d_o, a.dim_v, sg);
    int lo[RT] = {}, hi[RT] = {};
    float row_max[RT], row_sum[RT] = {}, mean[RT] = {};
    for (int i = 0; i < RT; i++) {
        const int64_t row = r.first + ty * RT + i;
        row_max[i] = -INFINITY;
        if (row < r.end) row_keys(a, r.seq, row / a.hs, &lo[i], &hi[i]);
    }
    const key_slots keys = find_slots<TS>(a, r, listed, list);
    for (int64_t slot0 = 0; slot0 < keys.slots; slot0 += TS) {
        __syncthreads();
        load_keys<DP>(a, r, keys, slot0, sk, sv, column);
        __syncthreads();
        float s[RT][RT] = {}, dp[RT][RT] = {};
        mm_nt<DP>(s, sq, sk, a.dim_k);
        mm_nt<DP>(dp, sg, sv, a.dim_v);
        for (int i = 0; i < RT; i++) {
            mean[i] *= soften_row<RT>(s[i], column, lo[i], hi[i], a.scale, &row_max[i], &row_sum[i]);
            for (int j = 0; j < RT; j++)
                if (__float_as_uint(s[i][j]) != UNSEEN_BITS) mean[i] = fmaf(s[i][j], dp[i][j], mean[i]);
        }
    }
    for (int i = 0; i < RT; i++) {
        const float sum = row_total(row_sum[i]), of_dp = row_total(mean[i]);
        const int64_t row = r.first + ty * RT + i, n = row / a.hs, head = r.head0 + row % a.hs;
        if (tx != 0 || row >= r.end || sum == 0.0f) continue;
        float2 *norm = norm_of(a, norms, r.seq, n, head);
        if (!is_coarse(norm->y)) continue;
        const float log_sum = logf(sum), sink = sinks != NULL ? sinks[head] : -INFINITY,
                    more = log1pf(expf(sink - fmaf(row_max[i], a.scale, log_sum)));
        *norm = make_float2(row_max[i], log_sum + more);
        const float row_scale = a.row_scale.p != NULL ? stat_of(a.row_scale, r.seq, n, head) : 1.0f;
        a.delta.p[r.seq.view_b * a.delta.s[0] + head * a.delta.s[1] + (r.seq.q0 + n) * a.delta.s[2]] =
            row_scale * (of_dp / sum) * expf(-more);
    }
}

template <int DP, bool BACKWARD>
__global__ void __launch_bounds__(THREADS, 1)
    attend_rows_f32(const __grid_constant__ attend_kernel a, float2 *norms, bool listed, key_ranges ranges)
{
    constexpr int TS = shape<DP>::TS, RT = shape<DP>::RT, CT = shape<DP>::CT;
    extern __shared__ float smem_f[];
    rows_memory<DP, BACKWARD> &m = *(rows_memory<DP, BACKWARD> *)smem_f;
    float *sq = m.q, *sg = m.d_o, *sk = m.k, *sv = m.v, *sp = m.p;
    int32_t *column = m.column, *list = (int32_t *)(&m + 1);
    const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE;
    block_rows r;
    if (!find_rows(a, TS, listed, &r)) return;
    if (!BACKWARD) keep_range(ranges, &r.seq);
    const sequence &seq = r.seq;
    load_rows<DP>(a, r, a.q, a.dim_k, sq);
    if (BACKWARD) load_rows<DP>(a, r, a.d_o, a.dim_v, sg);
    int lo[RT] = {}, hi[RT] = {};
    float row_max[RT], row_sum[RT] = {}, delta[RT] = {}, row_scale[RT];
    float2 norm[RT] = {};
    for (int i = 0; i < RT; i++) {
        const int64_t row = r.first + ty * RT + i, head = r.head0 + row % a.hs;
        row_max[i] = -INFINITY;
        row_scale[i] = 1.0f;
        if (row >= r.end) continue;
        row_keys(a, seq, row / a.hs, &lo[i], &hi[i]);
        if (!BACKWARD) continue;
        norm[i] = *norm_of(a, norms, seq, row / a.hs, head);
        if (norm[i].y == -INFINITY) hi[i] = 0;
        delta[i] = stat_of(a.delta, seq, row / a.hs, head);
        if (a.row_scale.p != NULL) row_scale[i] = stat_of(a.row_scale, seq, row / a.hs, head);
    }
    const key_slots keys = find_slots<TS>(a, r, listed, list);
    float acc[RT][CT] = {};
    for (int64_t slot0 = 0; slot0 < keys.slots; slot0 += TS) {
        __syncthreads();
        load_keys<DP>(a, r, keys, slot0, sk, sv, column);
        __syncthreads();
        float s[RT][RT] = {}, dp[RT][RT] = {};
        mm_nt<DP>(s, sq, sk, a.dim_k);
        if (BACKWARD) mm_nt<DP>(dp, sg, sv, a.dim_v);
        for (int i = 0; i < RT; i++) {
            float *const p_row = sp + (ty * RT + i) * (TS + 1);
            if (BACKWARD) {
                differentiate_row<RT>(s[i], dp[i], column, lo[i], hi[i], a.scale, norm[i], row_scale[i],
                                      delta[i], p_row);
                continue;
            }
            const float shrink =
                soften_row<RT>(s[i], column, lo[i], hi[i], a.scale, &row_max[i], &row_sum[i]);
            for (int j = 0; j < RT; j++) p_row[tx + SIDE * j] = s[i][j];
            for (int n = 0; n < CT; n++) acc[i][n] *= shrink;
        }
        __syncthreads();
        float part[RT][CT] = {}; /* each tile from zero: adding in place would cost precision */
        mm_nn<DP>(part, sp, TS + 1, 1, BACKWARD ? sk : sv);
        for (int i = 0; i < RT; i++)
            for (int n = 0; n < CT; n++) acc[i][n] += part[i][n];
    }
    for (int i = 0; i < RT; i++) {
        const float sum = row_total(row_sum[i]);
        const int64_t row = r.first + ty * RT + i;
        if (row >= r.end) continue;
        const int64_t n_at = row / a.hs, head = r.head0 + row % a.hs;
        const view4 &out = BACKWARD ? a.d_q : a.o;
        float *dst = (float *)row_of(out, seq, seq.q0, n_at, head);
        const float factor = BACKWARD ? a.scale : sum == 0.0f ? 0.0f : 1.0f / sum;
        if (out.p != NULL)
            for (int n = 0; n < CT; n++) {
                const int c = tx + SIDE * n;
                if (c < (BACKWARD ? a.dim_k : a.dim_v))
                    dst[c] = (BACKWARD && a.add_q ? dst[c] : 0.0f) + acc[i][n] * factor;
            }
        if (!BACKWARD && a.lse.p != NULL && tx == 0)
            a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + (seq.q0 + n_at) * a.lse.s[2]] =
                sum == 0.0f ? -INFINITY : fmaf(row_max[i], a.scale, logf(sum));
    }
}

/* Copies TS rows of a unit's stream, from position row0 on, with their statistics. `tiles`: of a list, or
 * NULL. */
template <int DP>
__device__ __forceinline__ void load_stream(const attend_kernel &a, float2 *norms, const sequence &seq,
                                            const int32_t *tiles, int head0, int64_t row0, int64_t rows,
                                            float *sq, float *sg, float *stat)
{
    constexpr int TS = shape<DP>::TS, LD = shape<DP>::LD;
    const int lane = threadIdx.x & 31, tile_rows = a.tile * a.hs;
    for (int i = threadIdx.x >> 5; i < TS; i += THREADS / 32) {
        int64_t row = row0 + i < rows ? row0 + i : -1;
        if (tiles != NULL && row >= 0) row = (int64_t)tiles[row / tile_rows] * tile_rows + row % tile_rows;
        if (row >= seq.nq * a.hs) row = -1;
        const int64_t n = row >= 0 ? row / a.hs : 0, head = head0 + (row >= 0 ? row % a.hs : 0);
        load_row<DP>(sq + i * LD, row >= 0 ? row_of(a.q, seq, seq.q0, n, head) : NULL, a.dim_k, lane);
        load_row<DP>(sg + i * LD, row >= 0 ? row_of(a.d_o, seq, seq.q0, n, head) : NULL, a.dim_v, lane);
        if (lane != 0) continue;
        int lo = 0, hi = 0;
        float2 norm = {};
        float delta = 0.0f, row_scale = 1.0f;
        if (row >= 0) {
            row_keys(a, seq, n, &lo, &hi);
            norm = *norm_of(a, norms, seq, n, head);
            if (norm.y == -INFINITY) hi = 0;
            delta = stat_of(a.delta, seq, n, head);
            if (a.row_scale.p != NULL) row_scale = stat_of(a.row_scale, seq, n, head);
        }
        stat[i] = norm.x;
        stat[TS + i] = norm.y;
        stat[2 * TS + i] = delta;
        stat[3 * TS + i] = row_scale;
        ((int *)stat)[4 * TS + i] = lo;
        ((int *)stat)[5 * TS + i] = hi;
    }
}

template <int DP>
__global__ void __launch_bounds__(THREADS, 1)
    attend_keys_f32(const __grid_constant__ attend_kernel a, float2 *norms, bool listed)
{
    constexpr int TS = shape<DP>::TS, RT = shape<DP>::RT, LD = shape<DP>::LD, CT = shape<DP>::CT;
    extern __shared__ float smem_f[];
    keys_memory<DP> &m = *(keys_memory<DP> *)smem_f;
    float *sk = m.k, *sv = m.v, *sq = m.q, *sg = m.d_o, *sp = m.p, *stat = m.stat;
    const int ty = threadIdx.x / SIDE, tx = threadIdx.x % SIDE, lane = threadIdx.x & 31,
              warp = threadIdx.x >> 5;
    const int kvh = blockIdx.y;
    seqs by_key = a.sq;
    by_key.n_q = a.sq.n_kv;
    by_key.n_kv = a.sq.n_q;
    by_key.cu_q = a.sq.cu_kv != NULL ? a.sq.cu_kv : a.sq.cu_q;
    by_key.cu_kv = a.sq.cu_q;
    sequence flipped;
    int64_t key0;
    const int sub = listed ? (a.list_block + TS - 1) / TS : 1;
    if (!piece_at(by_key, blockIdx.x / sub, listed ? a.list_block : TS, 1, &flipped, &key0)) return;
    const int64_t block = listed ? key0 / a.list_block : 0;
    const sequence seq = {flipped.b, flipped.view_b, flipped.k0, flipped.nk, flipped.q0, flipped.nq};
    int64_t key_end = seq.nk;
    if (listed) {
        key_end = key0 + a.list_block < seq.nk ? key0 + a.list_block : seq.nk;
        key0 += (int64_t)(blockIdx.x % sub) * TS;
    }
    if (key0 >= key_end) return;
    if (key0 + TS < key_end) key_end = key0 + TS;
    for (int i = warp; i < TS; i += THREADS / 32) {
        const bool in = key0 + i < key_end;
        load_row<DP>(sk + i * LD, in ? row_of(a.k, seq, seq.k0, key0 + i, kvh) : NULL, a.dim_k, lane);
        load_row<DP>(sv + i * LD, in ? row_of(a.v, seq, seq.k0, key0 + i, kvh) : NULL, a.dim_v, lane);
    }
    float dk[RT][CT] = {}, dv[RT][CT] = {};
    const int units_here = a.units / a.kv_heads;
    for (int ui = 0; ui < units_here; ui++) {
        const int u = kvh * units_here + ui, head0 = a.units == a.heads ? u : u * a.group;
        const int tile_rows = a.tile * a.hs;
        int64_t rows = seq.nq * a.hs;
        const int32_t *tiles_here = NULL;
        if (listed) {
            const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1,
                          pair = seq.view_b * a.units + u;
            const int32_t *start = a.inverse_start + pair * capacity +
                                   (a.sq.cu_q == NULL ? 0 : seq.k0 / a.list_block + seq.b) + block;
            tiles_here = a.inverse_tile + pair * a.inverse_entries + start[0];
            rows = (int64_t)(start[1] - start[0]) * tile_rows;
        }
        for (int64_t row0 = 0; row0 < rows; row0 += TS) {
            if (!listed) { /* rows whose intervals all miss these keys */
                const int64_t end = row0 + TS < rows ? row0 + TS : rows;
                int lo, hi, ignore;
                row_keys(a, seq, row0 / a.hs, &lo, &ignore);
                row_keys(a, seq, (end - 1) / a.hs, &ignore, &hi);
                if (hi <= key0 || lo >= key_end) continue;
            }
            __syncthreads();
            load_stream<DP>(a, norms, seq, listed ? tiles_here : NULL, head0, row0, rows, sq, sg, stat);
            __syncthreads();
            float s[RT][RT] = {}, dp[RT][RT] = {};
            mm_nt<DP>(s, sk, sq, a.dim_k); /* transposed: keys by rows */
            mm_nt<DP>(dp, sv, sg, a.dim_v);
            for (int i = 0; i < RT; i++)
                for (int j = 0; j < RT; j++) {
                    const int x = tx + SIDE * j;
                    const int key = (int)key0 + ty * RT + i;
                    const bool seen = key >= ((int *)stat)[4 * TS + x] && key < ((int *)stat)[5 * TS + x];
                    const float p = seen ? expf((s[i][j] - stat[x]) * a.scale - stat[TS + x]) : 0.0f,
                                c = stat[3 * TS + x];
                    sp[(ty * RT + i) * (TS + 1) + x] = seen ? p * c + 0.0f : UNSEEN;
                    s[i][j] = seen ? p * (dp[i][j] * c - stat[2 * TS + x]) + 0.0f : UNSEEN;
                }
            __syncthreads();
            float part[RT][CT] = {};
            mm_nn<DP>(part, sp, TS + 1, 1, sg);
            for (int i = 0; i < RT; i++)
                for (int n = 0; n < CT; n++) {
                    dv[i][n] += part[i][n];
                    part[i][n] = 0.0f;
                }
            __syncthreads();
            for (int i = 0; i < RT; i++)
                for (int j = 0; j < RT; j++) sp[(ty * RT + i) * (TS + 1) + tx + SIDE * j] = s[i][j];
            __syncthreads();
            mm_nn<DP>(part, sp, TS + 1, 1, sq);
            for (int i = 0; i < RT; i++)
                for (int n = 0; n < CT; n++) dk[i][n] += part[i][n];
        }
    }
    for (int i = 0; i < RT; i++) {
        const int64_t key = key0 + ty * RT + i;
        if (key >= key_end) continue;
        float *pk = (float *)row_of(a.d_k, seq, seq.k0, key, kvh),
              *pv = (float *)row_of(a.d_v, seq, seq.k0, key, kvh);
        for (int n = 0; n < CT; n++) {
            const int c = tx + SIDE * n;
            if (c < a.dim_k) pk[c] = (a.add_k ? pk[c] : 0.0f) + dk[i][n] * a.scale;
            if (c < a.dim_v) pv[c] = (a.add_v ? pv[c] : 0.0f) + dv[i][n];
        }
    }
}

template <typename K, typename... More>
static quern_status launch(K kernel, const attend_launch &l, int64_t x, int y, size_t bytes,
                           const launcher &to, const More &...more)
{
    return launch_shared(to, kernel, dim3((unsigned)x, (unsigned)y), THREADS, bytes, "attend f32", l.kernel,
                         l.norm, l.listed, more...);
}

/* A grid of blocks of TS rows. */
template <int TS> static int64_t row_pieces(const attend_args *args, const attend_launch &l)
{
    if (!l.listed) return piece_bound(args->seqs, TS, l.kernel.hs);
    return piece_bound(args->seqs, l.kernel.tile, 1) * (((int64_t)l.kernel.tile * l.kernel.hs + TS - 1) / TS);
}

template <int DP, bool BACKWARD>
static quern_status by_rows(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int TS = shape<DP>::TS;
    const size_t bytes =
        sizeof(rows_memory<DP, BACKWARD>) + (l.listed ? 3 * (size_t)l.kernel.list_k * 4 : 0);
    return launch(attend_rows_f32<DP, BACKWARD>, l, row_pieces<TS>(args, l), l.kernel.units, bytes, to,
                  key_ranges_of(args));
}

template <int DP>
static quern_status weigh(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int TS = shape<DP>::TS;
    const size_t bytes = sizeof(weigh_memory<DP>) + (l.listed ? 3 * (size_t)l.kernel.list_k * 4 : 0);
    return launch(attend_weigh_f32<DP>, l, row_pieces<TS>(args, l), l.kernel.units, bytes, to,
                  present(args->sink) ? (const float *)args->sink.data : (const float *)NULL);
}

template <int DP>
static quern_status by_keys(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int TS = shape<DP>::TS;
    stage_seqs flipped = args->seqs;
    flipped.n_q = args->seqs.n_kv;
    int64_t pieces = piece_bound(flipped, l.listed ? l.kernel.list_block : TS, 1);
    if (l.listed) pieces *= (l.kernel.list_block + TS - 1) / TS;
    return launch(attend_keys_f32<DP>, l, pieces, l.kernel.kv_heads, sizeof(keys_memory<DP>), to);
}

template <int DP>
static quern_status backward_f32(const attend_args *args, const attend_launch &l, const launcher &to)
{
    quern_status status = weigh<DP>(args, l, to);
    if (status == QUERN_OK) status = by_rows<DP, true>(args, l, to);
    return status != QUERN_OK ? status : by_keys<DP>(args, l, to);
}

#endif
