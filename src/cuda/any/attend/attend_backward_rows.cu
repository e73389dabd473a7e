/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_backward_rows.cu - dQ of blockwise attention on the tensor cores, for bf16 and f16, every mask.
 *
 * With P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta), dQ = scale dS K: a block owns
 * packed rows and walks their keys 64 at a time, as the forward does, the next tile of K and V on its way. dS goes
 * straight from the accumulators to the A operand. dK and dV are attend_backward_keys.cu's; two kernels recompute
 * S and dP (seven products for five) and need no atomics and no order but their own.
 *
 * At D = 128: 128 rows, registers a thread dQ 64, S 32, dP 32; shared memory 128 KB. Limit: the tensor cores.
 */
#include "any/attend/attend_backward.cuh"

enum { KEYS = 64 };

template <typename T, int DP, int WM, int WN, bool LISTED>
__global__ void __launch_bounds__(32 * WM * WN, 1) attend_backward_rows(const __grid_constant__ attend_kernel a)
{
    constexpr int M = 16 * WM, WK = KEYS / WN, NT = WK / 8, OT = DP / 8, CHUNKS = DP / 8, THREADS = 32 * WM * WN;
    constexpr int TILE = KEYS * DP * 2, STEP = THREADS / CHUNKS;
    constexpr bool WG = WN == 1;
    extern __shared__ __align__(1024) char smem[];
    char *sq = smem, *sdo = sq + M * DP * 2, *sk = sdo + M * DP * 2, *sv = sk + 2 * TILE;
    int32_t *column = (int32_t *)(sv + 2 * TILE), *list = column + 2 * KEYS;
    const uint32_t aq = smem_address(sq), ado = smem_address(sdo), ak0 = smem_address(sk), av0 = smem_address(sv);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % WM, wn = warp / WM;

    row_block b;
    if (!find_rows<M>(a, LISTED, &b)) return;
    const sequence &seq = b.seq;
    const int nk = (int)seq.nk, mine = threadIdx.x % CHUNKS, row0 = threadIdx.x / CHUNKS;
    const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + b.head0 * a.q.s[2] + mine * 8;
    const T *g = (const T *)a.d_o.p + seq.view_b * a.d_o.s[0] + seq.q0 * a.d_o.s[1] + b.head0 * a.d_o.s[2] + mine * 8;
    const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + b.kvh * a.k.s[2] + mine * 8;
    const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + b.kvh * a.v.s[2] + mine * 8;
    const bool in_k = mine * 8 < a.dim_k, in_v = mine * 8 < a.dim_v;
    int n, head;
    for (int r = row0; r < M; r += STEP) {
        row_place(a, b.query, b.rem, r, &n, &head);
        const bool in = r < b.rows;
        load_chunk16<T>(aq, sq, tile_at<M>(r, mine), in ? q + n * a.q.s[1] + head * a.q.s[2] : q, in && in_k, a.vec_q);
        load_chunk16<T>(ado, sdo, tile_at<M>(r, mine), in ? g + n * a.d_o.s[1] + head * a.d_o.s[2] : g, in && in_v, a.vec_do);
    }
    int first_lo, first_hi, last_lo, last_hi;
    row_keys(a, seq, b.query, &first_lo, &first_hi);
    row_place(a, b.query, b.rem, b.rows - 1, &n, &head);
    row_keys(a, seq, n, &last_lo, &last_hi);
    int lo[2], hi[2];
    float lse2[2], delta[2], row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = wm * 16 + h * 8 + (lane >> 2);
        lo[h] = hi[h] = 0;
        lse2[h] = INFINITY, delta[h] = 0.0f, row_scale[h] = 1.0f;
        if (r >= b.rows) continue;
        row_place(a, b.query, b.rem, r, &n, &head);
        row_keys(a, seq, n, &lo[h], &hi[h]);
        row_statistics(a, seq, seq.q0 + n, b.head0 + head, &lse2[h], &delta[h], &row_scale[h]);
        if (lse2[h] == INFINITY) hi[h] = 0;
    }
    const int base = first_lo;
    int slots = last_hi - first_lo;
    if (LISTED) slots = clean_list(b.list_row, a.list_k, a.list_block, last_hi, list, list + a.list_k, list + 2 * a.list_k) * a.list_block;
    const int tiles = slots > 0 ? (slots + KEYS - 1) / KEYS : 0;
    auto load = [&](int t) {
        const int at = (t & 1) * TILE;
#pragma unroll
        for (int r = 0; r < KEYS; r += 64)
            load_slots<T, KEYS, THREADS, CHUNKS, LISTED>(a, k, v, in_k, in_v, nk, base, slots, list, t * KEYS + r, r, ak0 + at, av0 + at, sk + at,
                                                         sv + at, column + (t & 1) * KEYS + r);
        cp_async_commit();
    };

    float dq[OT][4] = {};
    if (tiles > 0) load(0);
    for (int t = 0; t < tiles; t++) {
        cp_async_wait<0>();
        wg_show();
        __syncthreads();
        if (t + 1 < tiles) load(t + 1);
        const uint32_t ak = ak0 + (t & 1) * TILE, av = av0 + (t & 1) * TILE;
        float s[NT][4] = {}, dp[NT][4] = {};
        wg_start();
        product_nt<T, DP, NT, M, KEYS, WG>(s, aq, wm * 16, ak, wn * WK, lane);
        product_nt<T, DP, NT, M, KEYS, WG>(dp, ado, wm * 16, av, wn * WK, lane);
        wg_finish();
        uint32_t ds[NT][2];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            int key[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int at = wn * WK + i * 8 + (lane & 3) * 2 + c;
                key[c] = LISTED ? column[(t & 1) * KEYS + at] : base + t * KEYS + at;
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float x[2];
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float p = exp2_fast(fmaf(s[i][h * 2 + c], a.scale_log2, -lse2[h]));
                    x[c] = key[c] >= lo[h] && key[c] < hi[h] ? p * fmaf(dp[i][h * 2 + c], row_scale[h], -delta[h]) : 0.0f;
                }
                ds[i][h] = pack2<T>(x[0], x[1]);
            }
        }
        char *keys = sk + (t & 1) * TILE;
        if (!all_seen<KEYS, LISTED>(a, list, base, t * KEYS, slots, last_lo, first_hi) &&
            __syncthreads_or(any_nonfinite<T, KEYS, THREADS, CHUNKS>(keys))) {
            spread_nonfinite<T, KEYS>(dq, keys, wn * WK, WK, true, [&](int j, int h) {
                const int key = LISTED ? column[(t & 1) * KEYS + j] : base + t * KEYS + j;
                return key >= lo[h] && key < hi[h];
            });
            __syncthreads();
            clear_nonfinite<T, KEYS, THREADS, CHUNKS>(keys);
            wg_show();
            __syncthreads();
        }
        wg_start();
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t f[4] = {ds[kk][0], ds[kk][1], ds[kk + 1][0], ds[kk + 1][1]};
            product_nn<T, DP, KEYS, WG>(dq, f, ak, wn * WK + kk * 8, lane);
        }
        wg_finish();
    }
    cp_async_wait<0>();
    if (WN > 1) { /* add the warps' shares, in warp order */
        float *part = (float *)sk;
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < OT; i++)
                *(float2 *)&part[(wn * 16 + h * 8 + (lane >> 2)) * DP + i * 8 + (lane & 3) * 2] = make_float2(dq[i][h * 2], dq[i][h * 2 + 1]);
        __syncthreads();
        if (wn != 0) return;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < OT; i++) {
                float x = 0.0f, y = 0.0f;
                for (int w = 0; w < WN; w++) {
                    const float2 f = *(float2 *)&part[(w * 16 + h * 8 + (lane >> 2)) * DP + i * 8 + (lane & 3) * 2];
                    x += f.x;
                    y += f.y;
                }
                dq[i][h * 2] = x;
                dq[i][h * 2 + 1] = y;
            }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = wm * 16 + h * 8 + (lane >> 2);
        if (r >= b.rows) continue;
        row_place(a, b.query, b.rem, r, &n, &head);
        const int64_t at = seq.view_b * a.d_q.s[0] + (seq.q0 + n) * a.d_q.s[1] + (b.head0 + head) * a.d_q.s[2];
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (lane & 3) * 2;
            if (c < a.dim_k) store_pair<T>(a.d_q.p, at + c, dq[i][h * 2] * a.scale, dq[i][h * 2 + 1] * a.scale, a.f32_dq, a.add_q);
        }
    }
}

template <typename T, int DP, int WM, int WN, bool LISTED>
static quern_status launch(const attend_args *args, const attend_kernel &a, const launcher &to)
{
    constexpr int M = 16 * WM;
    const size_t bytes = (size_t)(2 * M + 4 * KEYS) * DP * 2 + (LISTED ? (2 * KEYS + 3 * (size_t)a.list_k) * 4 : 0);
    int64_t pieces = piece_bound(args->seqs, M, a.hs);
    if (LISTED) pieces = piece_bound(args->seqs, a.tile, 1) * (((int64_t)a.tile * a.hs + M - 1) / M);
    return launch_shared(to, attend_backward_rows<T, DP, WM, WN, LISTED>, dim3((unsigned)pieces, (unsigned)a.units), 32 * WM * WN, bytes,
                         "attend_backward by rows", a);
}

template <typename T, int DP> static quern_status choose(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int WM = DP > 128 ? 4 : 8;
    if (!l.listed) return launch<T, DP, WM, 1, false>(args, l.kernel, to);
    if ((int64_t)l.kernel.tile * l.kernel.hs <= 16) return launch<T, DP, 1, 4, true>(args, l.kernel, to);
    return launch<T, DP, WM, 1, true>(args, l.kernel, to);
}

template <typename T> static quern_status choose_dim(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return l.dim == 64 ? choose<T, 64>(args, l, to) : l.dim == 128 ? choose<T, 128>(args, l, to) : choose<T, 256>(args, l, to);
}

quern_status attend_backward_by_rows(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return l.dtype == QUERN_BF16 ? choose_dim<bf16>(args, l, to) : choose_dim<f16>(args, l, to);
}
