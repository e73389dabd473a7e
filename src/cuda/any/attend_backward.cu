/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward.cu - gradients of blockwise attention on mma.m16n8k16, for bf16 and f16, every mask.
 *
 * With P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta):
 *   dQ = scale dS K            by rows: a block owns packed rows and walks their keys, as forward does;
 *   dV = P^T row_scale dO, dK = scale dS^T Q   by keys: a block owns keys and walks the rows that see them.
 * Two kernels recompute S and dP (seven products for five) and need no atomics, no partial sums in memory
 * and no order but their own: the packed heads of a group meet in one row stream, so dK and dV are whole.
 * By keys everything is transposed: S^T = K Q^T leaves P^T in registers as the A operand of P^T dO.
 * For listed blocks the row stream comes from the inverted index (inverse.cu).
 *
 * Registers a thread at D = 128: by rows dQ 64, S 32, dP 32; by keys dK 64, dV 64, S^T 32, dP^T 32. At
 * D = 256 dK and dV do not fit together and are two launches. Shared memory at D = 128: 128 KB.
 */
#include "any/attend.cuh"
#include "any/stages.cuh"

#include <math.h>

enum { KEYS = 64 };

/* P and dS of one score; lse2 is lse in the exp2 domain, +inf for a row without keys. */
__device__ __forceinline__ float weight_of(float s, float scale_log2, float lse2)
{
    return exp2_fast(fmaf(s, scale_log2, -lse2));
}

template <typename T>
__device__ __forceinline__ void store_pair(void *base, int64_t at, float x, float y, bool f32, bool add)
{
    if (f32) {
        float *p = (float *)base + at;
        p[0] = add ? p[0] + x : x;
        p[1] = add ? p[1] + y : y;
    } else {
        T *p = (T *)base + at;
        p[0] = from_float<T>(x);
        p[1] = from_float<T>(y);
    }
}

template <typename T, int DP, int WM, int WN, bool LISTED>
__global__ void __launch_bounds__(32 * WM * WN, 1) attend_backward_rows(const __grid_constant__ attend_kernel a)
{
    constexpr int M = 16 * WM, WK = KEYS / WN, NT = WK / 8, OT = DP / 8, CHUNKS = DP / 8, THREADS = 32 * WM * WN;
    constexpr int STAGE = KEYS * DP * 2;
    extern __shared__ __align__(128) char smem[];
    char *sq = smem, *sdo = sq + M * DP * 2, *sk = sdo + M * DP * 2, *sv = sk + 2 * STAGE;
    int32_t *column = (int32_t *)(sv + 2 * STAGE), *list = column + 2 * KEYS;
    const uint32_t aq = smem_address(sq), ado = smem_address(sdo), ak0 = smem_address(sk), av0 = smem_address(sv);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % WM, wn = warp / WM;

    sequence seq;
    int64_t first, rows_end;
    const int u = blockIdx.y;
    const int64_t piece = (int64_t)gridDim.x - 1 - blockIdx.x;
    const int32_t *list_row = NULL;
    if (LISTED) {
        const int64_t tile_rows = (int64_t)a.tile * a.hs, per = (tile_rows + M - 1) / M;
        int64_t q0;
        if (!piece_at(a.sq, piece / per, a.tile, 1, &seq, &q0)) return;
        first = q0 * a.hs + piece % per * M;
        const int64_t tile_end = (q0 + a.tile) * a.hs, end = seq.nq * a.hs;
        rows_end = tile_end < end ? tile_end : end;
        const int64_t row = a.sq.cu_q == NULL ? q0 / a.tile : piece / per;
        list_row = a.list + seq.view_b * a.list_stride[0] + u * a.list_stride[1] + row * a.list_stride[2];
    } else {
        if (!piece_at(a.sq, piece, M, a.hs, &seq, &first)) return;
        rows_end = seq.nq * a.hs;
    }
    if (first >= rows_end) return;
    const int kvh = a.units == a.heads ? u / a.group : u;
    const int head0 = a.units == a.heads ? u : u * a.group;
    const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + head0 * a.q.s[2];
    const T *g = (const T *)a.d_o.p + seq.view_b * a.d_o.s[0] + seq.q0 * a.d_o.s[1] + head0 * a.d_o.s[2];
    const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + kvh * a.k.s[2];
    const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + kvh * a.v.s[2];

    for (int i = threadIdx.x; i < M * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS;
        const int64_t row = first + r;
        const bool in = row < rows_end;
        load_row_chunk<T, DP>(aq, sq, r, i % CHUNKS, in ? q + row / a.hs * a.q.s[1] + row % a.hs * a.q.s[2] : NULL, a.dim_k, a.vec_q);
        load_row_chunk<T, DP>(ado, sdo, r, i % CHUNKS, in ? g + row / a.hs * a.d_o.s[1] + row % a.hs * a.d_o.s[2] : NULL, a.dim_v, a.vec_do);
    }
    const int64_t last = (first + M < rows_end ? first + M : rows_end) - 1;
    int first_lo, first_hi, last_lo, last_hi;
    row_keys(a, seq, first / a.hs, &first_lo, &first_hi);
    row_keys(a, seq, last / a.hs, &last_lo, &last_hi);
    int lo[2], hi[2];
    float lse2[2], delta[2], row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = first + wm * 16 + h * 8 + (lane >> 2);
        lo[h] = hi[h] = 0;
        lse2[h] = INFINITY, delta[h] = 0.0f, row_scale[h] = 1.0f;
        if (row >= rows_end) continue;
        const int64_t n = seq.q0 + row / a.hs, head = head0 + row % a.hs;
        row_keys(a, seq, row / a.hs, &lo[h], &hi[h]);
        const float lse = a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]];
        lse2[h] = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
        delta[h] = a.delta.p[seq.view_b * a.delta.s[0] + head * a.delta.s[1] + n * a.delta.s[2]];
        if (a.row_scale.p != NULL)
            row_scale[h] = a.row_scale.p[seq.view_b * a.row_scale.s[0] + head * a.row_scale.s[1] + n * a.row_scale.s[2]];
    }
    int64_t base = first_lo, slots = last_hi - first_lo;
    if (LISTED) {
        const int kept = clean_list(list_row, a.list_k, a.list_block, last_hi, list, list + a.list_k, list + 2 * a.list_k);
        slots = (int64_t)kept * a.list_block;
    }
    const int tiles = slots > 0 ? (int)((slots + KEYS - 1) / KEYS) : 0;
    auto load = [&](int t) {
        const int stage = t & 1;
        for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
            const int r = i / CHUNKS;
            const int64_t slot = (int64_t)t * KEYS + r;
            int64_t key = seq.nk;
            if (slot < slots) key = LISTED ? (int64_t)list[slot / a.list_block] * a.list_block + slot % a.list_block : base + slot;
            const bool in = key < seq.nk;
            load_row_chunk<T, DP>(ak0 + stage * STAGE, sk + stage * STAGE, r, i % CHUNKS, in ? k + key * a.k.s[1] : NULL, a.dim_k, a.vec_k);
            load_row_chunk<T, DP>(av0 + stage * STAGE, sv + stage * STAGE, r, i % CHUNKS, in ? v + key * a.v.s[1] : NULL, a.dim_v, a.vec_v);
            if (LISTED && i % CHUNKS == 0) column[stage * KEYS + r] = (int32_t)key;
        }
        cp_async_commit();
    };

    float dq[OT][4] = {};
    if (tiles > 0) load(0);
    for (int t = 0; t < tiles; t++) {
        cp_async_wait<0>();
        __syncthreads();
        if (t + 1 < tiles) load(t + 1);
        const uint32_t ak = ak0 + (t & 1) * STAGE, av = av0 + (t & 1) * STAGE;
        float s[NT][4] = {}, dp[NT][4] = {};
#pragma unroll
        for (int k0 = 0; k0 < DP; k0 += 16) {
            uint32_t fq[4], fg[4];
            load_a<DP>(fq, aq, wm * 16, k0, lane);
            load_a<DP>(fg, ado, wm * 16, k0, lane);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                uint32_t fb[4];
                load_b<DP>(fb, ak, wn * WK + n * 8, k0, lane);
                mma16816<T>(s[n], fq, fb[0], fb[1]);
                mma16816<T>(s[n + 1], fq, fb[2], fb[3]);
                load_b<DP>(fb, av, wn * WK + n * 8, k0, lane);
                mma16816<T>(dp[n], fg, fb[0], fb[1]);
                mma16816<T>(dp[n + 1], fg, fb[2], fb[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int at = wn * WK + n * 8 + (lane & 3) * 2 + c;
                const int key = LISTED ? column[(t & 1) * KEYS + at] : (int)(base + (int64_t)t * KEYS) + at;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float p = weight_of(s[n][h * 2 + c], a.scale_log2, lse2[h]);
                    const bool seen = key >= lo[h] && key < hi[h] && lse2[h] != INFINITY;
                    s[n][h * 2 + c] = seen ? p * fmaf(dp[n][h * 2 + c], row_scale[h], -delta[h]) : 0.0f;
                }
            }
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t ds[4] = {pack2<T>(s[kk][0], s[kk][1]), pack2<T>(s[kk][2], s[kk][3]),
                                    pack2<T>(s[kk + 1][0], s[kk + 1][1]), pack2<T>(s[kk + 1][2], s[kk + 1][3])};
#pragma unroll
            for (int n = 0; n < OT; n += 2) {
                uint32_t fb[4];
                load_b_trans<DP>(fb, ak, wn * WK + kk * 8, n * 8, lane);
                mma16816<T>(dq[n], ds, fb[0], fb[1]);
                mma16816<T>(dq[n + 1], ds, fb[2], fb[3]);
            }
        }
    }
    cp_async_wait<0>();
    if (WN > 1) { /* add the warps' shares, in warp order */
        float *part = (float *)sk;
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++)
            for (int n = 0; n < OT; n++)
                *(float2 *)&part[(wn * 16 + h * 8 + (lane >> 2)) * DP + n * 8 + (lane & 3) * 2] =
                    make_float2(dq[n][h * 2], dq[n][h * 2 + 1]);
        __syncthreads();
        if (wn != 0) return;
#pragma unroll
        for (int h = 0; h < 2; h++)
            for (int n = 0; n < OT; n++) {
                float x = 0.0f, y = 0.0f;
                for (int w = 0; w < WN; w++) {
                    const float2 f = *(float2 *)&part[(w * 16 + h * 8 + (lane >> 2)) * DP + n * 8 + (lane & 3) * 2];
                    x += f.x;
                    y += f.y;
                }
                dq[n][h * 2] = x;
                dq[n][h * 2 + 1] = y;
            }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t row = first + wm * 16 + h * 8 + (lane >> 2);
        if (row >= rows_end) continue;
        const int64_t at = seq.view_b * a.d_q.s[0] + (seq.q0 + row / a.hs) * a.d_q.s[1] + (head0 + row % a.hs) * a.d_q.s[2];
#pragma unroll
        for (int n = 0; n < OT; n++) {
            const int c = n * 8 + (lane & 3) * 2;
            if (c < a.dim_k)
                store_pair<T>(a.d_q.p, at + c, dq[n][h * 2] * a.scale, dq[n][h * 2 + 1] * a.scale, a.f32_dq, a.add_q);
        }
    }
}

/* The first query in [0, nq] for which `seen` holds; seen is false, then true. */
template <typename F> __device__ __forceinline__ int64_t first_query(int64_t nq, F seen)
{
    int64_t lo = 0, hi = nq;
    while (lo < hi) {
        const int64_t mid = (lo + hi) / 2;
        if (seen(mid)) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

/* PARTS: 1 dK, 2 dV, 3 both. */
template <typename T, int DP, int KW, int R, int PARTS, bool LISTED>
__global__ void __launch_bounds__(32 * KW, 1) attend_backward_keys(const __grid_constant__ attend_kernel a)
{
    constexpr int KT = 16 * KW, NT = R / 8, OT = DP / 8, CHUNKS = DP / 8, THREADS = 32 * KW, STAGE = R * DP * 2;
    constexpr bool DK = PARTS & 1, DV = PARTS & 2;
    extern __shared__ __align__(128) char smem[];
    char *sk = smem, *sv = sk + KT * DP * 2, *sq = sv + KT * DP * 2, *sdo = sq + 2 * STAGE;
    float *stat = (float *)(sdo + 2 * STAGE); /* [2][R] each of lse2, delta, row_scale, then lo, hi */
    const uint32_t ak = smem_address(sk), av = smem_address(sv), aq0 = smem_address(sq), ado0 = smem_address(sdo);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int kvh = blockIdx.y;

    /* Keys of this block: pieces of KT keys; listed: pieces of each listed block, so that all keys share rows. */
    seqs by_key = a.sq;
    by_key.n_q = a.sq.n_kv, by_key.n_kv = a.sq.n_q;
    by_key.cu_q = a.sq.cu_kv != NULL ? a.sq.cu_kv : a.sq.cu_q, by_key.cu_kv = a.sq.cu_q;
    sequence flipped;
    int64_t key0;
    const int sub = LISTED ? (a.list_block + KT - 1) / KT : 1;
    if (!piece_at(by_key, blockIdx.x / sub, LISTED ? a.list_block : KT, 1, &flipped, &key0)) return;
    const int64_t block = LISTED ? key0 / a.list_block : 0;
    const sequence seq = {flipped.b, flipped.view_b, flipped.k0, flipped.nk, flipped.q0, flipped.nq};
    int64_t key_end = seq.nk;
    if (LISTED) {
        key_end = key0 + a.list_block < seq.nk ? key0 + a.list_block : seq.nk;
        key0 += (int64_t)(blockIdx.x % sub) * KT;
    }
    if (key0 >= key_end) return;
    if (key0 + KT < key_end) key_end = key0 + KT;
    const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + kvh * a.k.s[2];
    const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + kvh * a.v.s[2];
    for (int i = threadIdx.x; i < KT * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS;
        const int64_t key = key0 + r;
        load_row_chunk<T, DP>(ak, sk, r, i % CHUNKS, key < key_end ? k + key * a.k.s[1] : NULL, a.dim_k, a.vec_k);
        load_row_chunk<T, DP>(av, sv, r, i % CHUNKS, key < key_end ? v + key * a.v.s[1] : NULL, a.dim_v, a.vec_v);
    }

    /* Queries that can see some of these keys. */
    const int64_t qa = first_query(seq.nq, [&](int64_t i) { int lo, hi; row_keys(a, seq, i, &lo, &hi); return hi > key0; });
    const int64_t qb = first_query(seq.nq, [&](int64_t i) { int lo, hi; row_keys(a, seq, i, &lo, &hi); return lo >= key_end; });

    float dk[DK ? OT : 1][4] = {}, dv[DV ? OT : 1][4] = {};
    const int units_here = a.units / a.kv_heads;
    for (int ui = 0; ui < units_here; ui++) {
        const int u = kvh * units_here + ui;
        const int head0 = a.units == a.heads ? u : u * a.group;
        const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + head0 * a.q.s[2];
        const T *g = (const T *)a.d_o.p + seq.view_b * a.d_o.s[0] + seq.q0 * a.d_o.s[1] + head0 * a.d_o.s[2];
        const int tile_rows = a.tile * a.hs;
        int64_t rows = (qb - qa) * a.hs;
        const int32_t *tiles_here = NULL;
        if (LISTED) {
            const int64_t capacity = a.sq.n_kv / a.list_block + a.sq.batch + 1;
            const int64_t at = (seq.view_b * a.units + u) * capacity;
            const int64_t index = (a.sq.cu_q == NULL ? 0 : seq.k0 / a.list_block + seq.b) + block;
            const int32_t *start = a.inverse_start + at + index;
            tiles_here = a.inverse_tile + (seq.view_b * a.units + u) * a.inverse_entries + start[0];
            rows = (int64_t)(start[1] - start[0]) * tile_rows;
        }
        const int steps = rows > 0 ? (int)((rows + R - 1) / R) : 0;
        /* Packed row of stream position i, or -1. */
        auto row_at = [&](int64_t i) -> int64_t {
            if (i >= rows) return -1;
            if (!LISTED) return qa * a.hs + i;
            const int64_t row = (int64_t)tiles_here[i / tile_rows] * tile_rows + i % tile_rows;
            return row < seq.nq * a.hs ? row : -1;
        };
        auto load = [&](int t) {
            const int stage = t & 1;
            for (int i = threadIdx.x; i < R * CHUNKS; i += THREADS) {
                const int r = i / CHUNKS;
                const int64_t row = row_at((int64_t)t * R + r);
                const bool in = row >= 0;
                const int64_t n = in ? row / a.hs : 0, h = in ? row % a.hs : 0;
                load_row_chunk<T, DP>(aq0 + stage * STAGE, sq + stage * STAGE, r, i % CHUNKS, in ? q + n * a.q.s[1] + h * a.q.s[2] : NULL, a.dim_k, a.vec_q);
                load_row_chunk<T, DP>(ado0 + stage * STAGE, sdo + stage * STAGE, r, i % CHUNKS, in ? g + n * a.d_o.s[1] + h * a.d_o.s[2] : NULL, a.dim_v, a.vec_do);
            }
            cp_async_commit();
            for (int r = threadIdx.x; r < R; r += THREADS) {
                const int64_t row = row_at((int64_t)t * R + r);
                float lse2 = INFINITY, delta = 0.0f, row_scale = 1.0f;
                int lo = 0, hi = 0;
                if (row >= 0) {
                    const int64_t n = seq.q0 + row / a.hs, head = head0 + row % a.hs;
                    row_keys(a, seq, row / a.hs, &lo, &hi);
                    const float lse = a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + n * a.lse.s[2]];
                    if (lse == -INFINITY) hi = 0;
                    lse2 = lse == -INFINITY ? INFINITY : lse * 1.4426950408889634f;
                    delta = a.delta.p[seq.view_b * a.delta.s[0] + head * a.delta.s[1] + n * a.delta.s[2]];
                    if (a.row_scale.p != NULL)
                        row_scale = a.row_scale.p[seq.view_b * a.row_scale.s[0] + head * a.row_scale.s[1] + n * a.row_scale.s[2]];
                }
                float *st = stat + stage * 5 * R + r;
                st[0] = lse2, st[R] = delta, st[2 * R] = row_scale;
                ((int *)st)[3 * R] = lo, ((int *)st)[4 * R] = hi;
            }
        };
        __syncthreads(); /* the last unit's stages are free */
        if (steps > 0) load(0);
        for (int t = 0; t < steps; t++) {
            cp_async_wait<0>();
            __syncthreads();
            if (t + 1 < steps) load(t + 1);
            const uint32_t aq = aq0 + (t & 1) * STAGE, ado = ado0 + (t & 1) * STAGE;
            const float *st = stat + (t & 1) * 5 * R;
            float s[NT][4] = {}, dp[DK ? NT : 1][4] = {};
#pragma unroll
            for (int k0 = 0; k0 < DP; k0 += 16) {
                uint32_t fk[4], fv[4];
                load_a<DP>(fk, ak, warp * 16, k0, lane);
                if (DK) load_a<DP>(fv, av, warp * 16, k0, lane);
#pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    uint32_t fb[4];
                    load_b<DP>(fb, aq, n * 8, k0, lane);
                    mma16816<T>(s[n], fk, fb[0], fb[1]);
                    mma16816<T>(s[n + 1], fk, fb[2], fb[3]);
                    if (DK) {
                        load_b<DP>(fb, ado, n * 8, k0, lane);
                        mma16816<T>(dp[n], fv, fb[0], fb[1]);
                        mma16816<T>(dp[n + 1], fv, fb[2], fb[3]);
                    }
                }
            }
            const int k_low = (int)key0 + warp * 16 + (lane >> 2);
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int r = n * 8 + (lane & 3) * 2 + c;
                    const float lse2 = st[r], delta = st[R + r], row_scale = st[2 * R + r];
                    const int lo = ((const int *)st)[3 * R + r], hi = ((const int *)st)[4 * R + r];
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int key = k_low + h * 8;
                        const float p = key >= lo && key < hi ? weight_of(s[n][h * 2 + c], a.scale_log2, lse2) : 0.0f;
                        if (DK) dp[n][h * 2 + c] = p == 0.0f ? 0.0f : p * fmaf(dp[n][h * 2 + c], row_scale, -delta);
                        s[n][h * 2 + c] = p * row_scale;
                    }
                }
#pragma unroll
            for (int kk = 0; kk < NT; kk += 2) {
                const uint32_t fp[4] = {pack2<T>(s[kk][0], s[kk][1]), pack2<T>(s[kk][2], s[kk][3]),
                                        pack2<T>(s[kk + 1][0], s[kk + 1][1]), pack2<T>(s[kk + 1][2], s[kk + 1][3])};
                uint32_t fs[4] = {0, 0, 0, 0};
                if (DK) {
                    fs[0] = pack2<T>(dp[kk][0], dp[kk][1]), fs[1] = pack2<T>(dp[kk][2], dp[kk][3]);
                    fs[2] = pack2<T>(dp[kk + 1][0], dp[kk + 1][1]), fs[3] = pack2<T>(dp[kk + 1][2], dp[kk + 1][3]);
                }
#pragma unroll
                for (int n = 0; n < OT; n += 2) {
                    uint32_t fb[4];
                    if (DV) {
                        load_b_trans<DP>(fb, ado, kk * 8, n * 8, lane);
                        mma16816<T>(dv[n], fp, fb[0], fb[1]);
                        mma16816<T>(dv[n + 1], fp, fb[2], fb[3]);
                    }
                    if (DK) {
                        load_b_trans<DP>(fb, aq, kk * 8, n * 8, lane);
                        mma16816<T>(dk[n], fs, fb[0], fb[1]);
                        mma16816<T>(dk[n + 1], fs, fb[2], fb[3]);
                    }
                }
            }
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t key = key0 + warp * 16 + h * 8 + (lane >> 2);
        if (key >= key_end) continue;
        const int64_t at_k = seq.view_b * a.d_k.s[0] + (seq.k0 + key) * a.d_k.s[1] + kvh * a.d_k.s[2];
        const int64_t at_v = seq.view_b * a.d_v.s[0] + (seq.k0 + key) * a.d_v.s[1] + kvh * a.d_v.s[2];
#pragma unroll
        for (int n = 0; n < OT; n++) {
            const int c = n * 8 + (lane & 3) * 2;
            if (DK && c < a.dim_k)
                store_pair<T>(a.d_k.p, at_k + c, dk[n][h * 2] * a.scale, dk[n][h * 2 + 1] * a.scale, a.f32_dkv, a.add_k);
            if (DV && c < a.dim_v)
                store_pair<T>(a.d_v.p, at_v + c, dv[n][h * 2], dv[n][h * 2 + 1], a.f32_dkv, a.add_v);
        }
    }
}

template <typename K>
static quern_status launch(K kernel, const attend_kernel &a, int64_t x, int y, int threads, size_t bytes, cudaStream_t stream, const char *what)
{
    if (x == 0 || y == 0) return QUERN_OK;
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess) return cuda_report(code, what);
    kernel<<<dim3((unsigned)x, (unsigned)y), threads, bytes, stream>>>(a);
    return LAUNCHED(what);
}

template <typename T, int DP, int WM, int WN, bool LISTED>
static quern_status by_rows(const attend_args *args, const attend_kernel &a, cudaStream_t stream)
{
    constexpr int M = 16 * WM;
    const size_t bytes = (size_t)(2 * M + 4 * KEYS) * DP * 2 + (LISTED ? (2 * KEYS + 3 * (size_t)a.list_k) * 4 : 0);
    int64_t pieces = piece_bound(args->seqs, M, a.hs);
    if (LISTED) pieces = piece_bound(args->seqs, a.tile, 1) * (((int64_t)a.tile * a.hs + M - 1) / M);
    return launch(attend_backward_rows<T, DP, WM, WN, LISTED>, a, pieces, a.units, 32 * WM * WN, bytes, stream, "attend_backward by rows");
}

template <typename T, int DP, int KW, int R, int PARTS, bool LISTED>
static quern_status by_keys(const attend_args *args, const attend_kernel &a, cudaStream_t stream)
{
    constexpr int KT = 16 * KW;
    const size_t bytes = (size_t)(2 * KT + 4 * R) * DP * 2 + 10 * R * 4;
    stage_seqs flipped = args->seqs;
    flipped.n_q = args->seqs.n_kv;
    int64_t pieces = piece_bound(flipped, LISTED ? a.list_block : KT, 1);
    if (LISTED) pieces *= (a.list_block + KT - 1) / KT;
    return launch(attend_backward_keys<T, DP, KW, R, PARTS, LISTED>, a, pieces, a.kv_heads, 32 * KW, bytes, stream, "attend_backward by keys");
}

template <typename T, int DP, int KW, bool LISTED>
static quern_status keys_parts(const attend_args *args, const attend_kernel &a, cudaStream_t stream)
{
    if constexpr (DP <= 128) {
        return by_keys<T, DP, KW, 64, 3, LISTED>(args, a, stream);
    } else {
        const quern_status status = by_keys<T, DP, 4, 32, 1, LISTED>(args, a, stream);
        return status != QUERN_OK ? status : by_keys<T, DP, 4, 32, 2, LISTED>(args, a, stream);
    }
}

template <typename T, int DP>
static quern_status choose(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    constexpr int WM = DP > 128 ? 4 : 8;
    quern_status status;
    if (!l.listed) status = by_rows<T, DP, WM, 1, false>(args, l.kernel, stream);
    else if ((int64_t)l.kernel.tile * l.kernel.hs <= 16) status = by_rows<T, DP, 1, 4, true>(args, l.kernel, stream);
    else status = by_rows<T, DP, WM, 1, true>(args, l.kernel, stream);
    if (status != QUERN_OK) return status;
    if (!l.listed) return keys_parts<T, DP, 8, false>(args, l.kernel, stream);
    if (l.kernel.list_block <= 64) return keys_parts<T, DP, 4, true>(args, l.kernel, stream);
    return keys_parts<T, DP, 8, true>(args, l.kernel, stream);
}

template <typename T> static quern_status choose_dim(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    if (l.dim == 64) return choose<T, 64>(args, l, stream);
    if (l.dim == 128) return choose<T, 128>(args, l, stream);
    return choose<T, 256>(args, l, stream);
}

quern_status attend_backward_half(const quern_exec *exec, const attend_args *args, void *workspace)
{
    attend_launch l = attend_launch_of(args);
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (l.listed) {
        const quern_status status = inverse_build(exec, args, &l.kernel, workspace);
        if (status != QUERN_OK) return status;
    }
    return l.dtype == QUERN_BF16 ? choose_dim<bf16>(args, l, stream) : choose_dim<f16>(args, l, stream);
}
