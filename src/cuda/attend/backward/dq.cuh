/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dq.cuh - dQ of blockwise attention on the tensor cores, for bf16 and f16, every mask.
 *
 * With P = exp(S - lse) recomputed, dP = dO V^T, dS = P (row_scale dP - delta), dQ = scale dS K: a block owns
 * rows and walks their keys 64 at a time, as the forward does, and copies the next tile of K and V meanwhile.
 * dS goes straight from the accumulators to the A operand. dK and dV are dkv.cuh's. Two
 * kernels recompute S and dP (seven products for five) and need neither atomics nor an order among blocks.
 *
 * At D = 128: 128 rows, registers a thread dQ 64, S 32, dP 32; shared memory 128 KB. Limit: the tensor cores.
 */
#ifndef QUERN_CUDA_ATTEND_BACKWARD_DQ_CUH
#define QUERN_CUDA_ATTEND_BACKWARD_DQ_CUH

#include "attend/backward/params.cuh"

/* The forward's statistics of a thread's two rows. */
struct row_pair {
    float lse2[2], delta[2], row_scale[2];
    int lo[2], hi[2];
};

__device__ __forceinline__ row_pair find_pair(const attend_kernel &a, const row_block &b, int row)
{
    row_pair x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + h * 8;
        int n, head;
        x.lo[h] = x.hi[h] = 0;
        x.lse2[h] = INFINITY;
        x.delta[h] = 0.0f;
        x.row_scale[h] = 1.0f;
        if (r >= b.rows) continue;
        row_place(a, b.query, b.rem, r, &n, &head);
        row_keys(a, b.seq, n, &x.lo[h], &x.hi[h]);
        row_statistics(a, b.seq, b.seq.q0 + n, b.head0 + head, &x.lse2[h], &x.delta[h], &x.row_scale[h]);
        if (x.lse2[h] == INFINITY) x.hi[h] = 0;
    }
    return x;
}

/* dS of a tile, in 16 bits, from S and dP; key_at(slot) is a key of the tile. */
template <typename T, int NT, typename F>
__device__ __forceinline__ void score_gradients(const float (&s)[NT][4], const float (&dp)[NT][4],
                                                float scale_log2, const row_pair &x, int slot, F key_at,
                                                uint32_t (&ds)[NT][2])
{
#pragma unroll
    for (int i = 0; i < NT; i++) {
        int key[2];
#pragma unroll
        for (int c = 0; c < 2; c++) key[c] = key_at(slot + i * 8 + c);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float y[2];
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float p = exp2_fast(fmaf(s[i][h * 2 + c], scale_log2, -x.lse2[h]));
                y[c] = key[c] >= x.lo[h] && key[c] < x.hi[h]
                           ? p * fmaf(dp[i][h * 2 + c], x.row_scale[h], -x.delta[h])
                           : 0.0f;
            }
            ds[i][h] = pack2<T>(y[0], y[1]);
        }
    }
}

/* Adds the shares of WN warps that split the keys, in warp order, in warp 0; `part` is memory for all of
 * them. False for the others, which are done. */
template <int DP, int WN, int OT>
__device__ __forceinline__ bool add_shares(float *part, int wn, float (&dq)[OT][4])
{
    const int lane = threadIdx.x & 31;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < OT; i++)
            *(float2 *)&part[(wn * 16 + h * 8 + (lane >> 2)) * DP + i * 8 + (lane & 3) * 2] =
                make_float2(dq[i][h * 2], dq[i][h * 2 + 1]);
    __syncthreads();
    if (wn != 0) return false;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < OT; i++) {
            float x = 0.0f, y = 0.0f;
            for (int w = 0; w < WN; w++) {
                const float2 f =
                    *(float2 *)&part[(w * 16 + h * 8 + (lane >> 2)) * DP + i * 8 + (lane & 3) * 2];
                x += f.x;
                y += f.y;
            }
            dq[i][h * 2] = x;
            dq[i][h * 2 + 1] = y;
        }
    return true;
}

/* Writes dQ of a thread's two rows, the first of them row `row` of the block. */
template <typename T, int OT>
__device__ __forceinline__ void store_d_q(const attend_kernel &a, const row_block &b, int row,
                                          const float (&dq)[OT][4])
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + h * 8;
        if (r >= b.rows) continue;
        int n, head;
        row_place(a, b.query, b.rem, r, &n, &head);
        const int64_t at =
            b.seq.view_b * a.d_q.s[0] + (b.seq.q0 + n) * a.d_q.s[1] + (b.head0 + head) * a.d_q.s[2];
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (lane & 3) * 2;
            if (c < a.dim_k)
                store_pair<T>(a.d_q.p, at + c, dq[i][h * 2] * a.scale, dq[i][h * 2 + 1] * a.scale, a.f32_dq,
                              a.add_q);
        }
    }
}

/* Shared memory; behind it, with lists, a.list_k entries each of the clean list, flags and the raw list. */
template <int DP, int M, int KEYS, bool LISTED> struct rows_shared {
    uint16_t q[M * DP], d_o[M * DP], k[2][KEYS * DP], v[2][KEYS * DP];
    int32_t column[LISTED ? 2 : 0][KEYS]; /* the key of each slot */
};

template <typename T, int DP, int WM, int WN, bool LISTED, typename PRODUCTS>
__global__ void __launch_bounds__(32 * WM * WN, 1)
    attend_backward_rows(const __grid_constant__ attend_kernel a)
{
    constexpr int M = 16 * WM, KEYS = BACKWARD_STEP, WK = KEYS / WN, NT = WK / 8, OT = DP / 8,
                  CHUNKS = DP / 8, THREADS = 32 * WM * WN;
    constexpr int TILE = KEYS * DP * 2;
    extern __shared__ __align__(1024) char smem[];
    typedef rows_shared<DP, M, KEYS, LISTED> memory;
    memory &m = *(memory *)smem;
    char *sq = (char *)m.q, *sdo = (char *)m.d_o, *sk = (char *)m.k, *sv = (char *)m.v;
    int32_t *column = (int32_t *)m.column, *list = (int32_t *)(&m + 1);
    const uint32_t aq = smem_address(sq), ado = smem_address(sdo), ak0 = smem_address(sk),
                   av0 = smem_address(sv);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % WM, wn = warp / WM;

    row_block b;
    if (!find_rows<M>(a, LISTED, &b)) return;
    const key_rows<T> from = find_key_rows<T, CHUNKS>(a, b);
    load_rows<T, M, THREADS, CHUNKS>(a, b, a.q, a.dim_k, a.vec_q, aq, sq);
    load_rows<T, M, THREADS, CHUNKS>(a, b, a.d_o, a.dim_v, a.vec_do, ado, sdo);
    const row_bounds seen = find_bounds<LISTED>(a, b, list);
    const row_pair rows = find_pair(a, b, wm * 16 + (lane >> 2));
    const int nk = (int)b.seq.nk, tiles = seen.slots > 0 ? (seen.slots + KEYS - 1) / KEYS : 0;
    auto load = [&](int t) {
        const int at = (t & 1) * TILE;
        load_slots<T, KEYS, THREADS, CHUNKS, LISTED>(a, from.k, from.v, from.in_k, from.in_v, nk, seen.base,
                                                     seen.slots, list, t * KEYS, 0, ak0 + at, av0 + at,
                                                     sk + at, sv + at, column + (t & 1) * KEYS);
        cp_async_commit();
    };

    float dq[OT][4] = {};
    if (tiles > 0) load(0);
    for (int t = 0; t < tiles; t++) {
        cp_async_wait<0>();
        PRODUCTS::show();
        __syncthreads();
        if (t + 1 < tiles) load(t + 1);
        const uint32_t ak = ak0 + (t & 1) * TILE, av = av0 + (t & 1) * TILE;
        float s[NT][4] = {}, dp[NT][4] = {};
        PRODUCTS::start();
        PRODUCTS::template nt<T, DP, NT, M, KEYS>(s, aq, wm * 16, ak, wn * WK, lane);
        PRODUCTS::template nt<T, DP, NT, M, KEYS>(dp, ado, wm * 16, av, wn * WK, lane);
        PRODUCTS::finish();
        auto key_at = [&](int at) {
            return LISTED ? column[(t & 1) * KEYS + at] : seen.base + t * KEYS + at;
        };
        uint32_t ds[NT][2];
        score_gradients<T>(s, dp, a.scale_log2, rows, wn * WK + (lane & 3) * 2, key_at, ds);
        char *keys = sk + (t & 1) * TILE;
        if (!all_seen<KEYS, LISTED>(a, list, seen.base, t * KEYS, seen.slots, seen.last_lo, seen.first_hi) &&
            __syncthreads_or(any_nonfinite<T, KEYS, THREADS, CHUNKS>(keys))) {
            spread_nonfinite<T, KEYS>(dq, keys, wn * WK, WK, true, [&](int j, int h) {
                const int key = key_at(j);
                return key >= rows.lo[h] && key < rows.hi[h];
            });
            __syncthreads();
            clear_nonfinite<T, KEYS, THREADS, CHUNKS>(keys);
            PRODUCTS::show();
            __syncthreads();
        }
        PRODUCTS::start();
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t f[4] = {ds[kk][0], ds[kk][1], ds[kk + 1][0], ds[kk + 1][1]};
            PRODUCTS::template nn<T, DP, KEYS>(dq, f, ak, wn * WK + kk * 8, lane);
        }
        PRODUCTS::finish();
    }
    cp_async_wait<0>();
    if constexpr (WN > 1) /* over the tiles of K and V */
        if (!add_shares<DP, WN>((float *)sk, wn, dq)) return;
    store_d_q<T>(a, b, wm * 16 + (lane >> 2), dq);
}

template <typename T, int DP, int WM, int WN, bool LISTED, typename PRODUCTS>
static quern_status launch_rows(const attend_args *args, const attend_kernel &a, const launcher &to)
{
    constexpr int M = 16 * WM, KEYS = BACKWARD_STEP;
    const size_t bytes =
        sizeof(rows_shared<DP, M, KEYS, LISTED>) + (LISTED ? 3 * (size_t)a.list_k * 4 : 0);
    return launch_shared(to, attend_backward_rows<T, DP, WM, WN, LISTED, PRODUCTS>,
                         row_grid(args, a, M, LISTED), 32 * WM * WN, bytes, "attend_backward by rows", a);
}

/* The calls that any GPU takes. */
template <typename T, int DP>
static quern_status rows_by_warps(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int WM = DP > 128 ? 4 : 8;
    const attend_kernel &a = l.kernel;
    if (!l.listed) return launch_rows<T, DP, WM, 1, false, warp_products>(args, a, to);
    if (few_rows(a)) return launch_rows<T, DP, 1, 4, true, warp_products>(args, a, to);
    return launch_rows<T, DP, WM, 1, true, warp_products>(args, a, to);
}

#endif
