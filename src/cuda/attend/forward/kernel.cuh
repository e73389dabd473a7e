/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kernel.cuh - blockwise softmax attention on the tensor cores, for bf16 and f16, every mask.
 *
 * A block of WM x WN warps owns 16 WM rows (attend/attend.cuh) and walks its key slots KEYS at a time. It
 * copies the next tile of K and V meanwhile. S = Q K^T in registers, running maximum and sum in
 * the exp2 domain, P straight from the accumulators as the A operand of O += P V. With WN = 1 each warp holds
 * all keys of its 16 rows, and on Hopper four warps make one warpgroup product. With WN = 4 (per-token lists,
 * <= 16 rows a tile) the warps split the keys, keep their own maximum, sum and O, and merge through shared
 * memory in warp order.
 *
 * NaN and infinity in V reach the rows that see them and no others (spread_nonfinite). A zero of O is stored
 * as + 0: the sign of the products may come from a value that is not seen, by a factor of 0.
 *
 * At D = 128, WN = 1: 128 rows, 128 keys a tile; registers a thread O 64, S 64; shared memory 160 KB, one
 * block an SM. Limit: the tensor cores, shared with 16 exponentials a clock and SM.
 */
#ifndef QUERN_CUDA_ATTEND_FORWARD_KERNEL_CUH
#define QUERN_CUDA_ATTEND_FORWARD_KERNEL_CUH

#include "attend/attend.cuh"
#include "attend/ranges.cuh"
#include "common/launch.cuh"

#include <math.h>

template <int DP, int WN> struct forward_shape {
    static constexpr int KEYS = WN > 1 || DP > 128 ? 64 : 128, STAGES = 2;
};

/* Hides from a thread's two rows what they do not see; key_at(slot) is a key of the tile. */
template <int NT, typename F>
__device__ __forceinline__ void hide_scores(float (&s)[NT][4], const int (&lo)[2], const int (&hi)[2],
                                            int slot, F key_at)
{
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int key = key_at(slot + i * 8 + c);
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (key < lo[h] || key >= hi[h]) s[i][h * 2 + c] = -INFINITY;
        }
}

/* A thread's two rows as the softmax runs along. */
template <int OT> struct running_rows {
    float max[2], sum[2], o[OT][4];
};

/* Adds a tile's scores to the softmax: S becomes P in 16 bits, and what was summed so far is scaled to the
 * new maximum. */
template <typename T, int NT, int OT>
__device__ __forceinline__ void soften(const float (&s)[NT][4], float scale_log2, running_rows<OT> &rows,
                                       uint32_t (&p)[NT][2])
{
    float shrinks[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = rows.max[h];
#pragma unroll
        for (int i = 0; i < NT; i++) top = fmaxf(top, fmaxf(s[i][h * 2], s[i][h * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base2 = top == -INFINITY ? 0.0f : top * scale_log2;
        const float shrink = exp2_fast(rows.max[h] * scale_log2 - base2);
        rows.max[h] = top;
        float sum = rows.sum[h] * shrink;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const float x = exp2_fast(fmaf(s[i][h * 2], scale_log2, -base2)),
                        y = exp2_fast(fmaf(s[i][h * 2 + 1], scale_log2, -base2));
            sum += x + y;
            p[i][h] = pack2<T>(x, y);
        }
        rows.sum[h] = sum;
        shrinks[h] = shrink;
    }
    if (__any_sync(~0u, shrinks[0] != 1.0f || shrinks[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < OT; i++)
#pragma unroll
            for (int c = 0; c < 4; c++) rows.o[i][c] *= shrinks[c >> 1];
    }
}

/* Merges the shares of WN warps that split the keys, in warp order, into warp 0; `part` is memory for all of
 * them. False for the others, which are done. */
template <int DP, int WN, int OT>
__device__ __forceinline__ bool merge_shares(float *part, float scale_log2, int wn, running_rows<OT> &rows)
{
    float *part_max = part + WN * 16 * DP, *part_sum = part_max + WN * 16;
    const int lane = threadIdx.x & 31;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = wn * 16 + h * 8 + (lane >> 2);
        if ((lane & 3) == 0) {
            part_max[r] = rows.max[h];
            part_sum[r] = rows.sum[h];
        }
#pragma unroll
        for (int i = 0; i < OT; i++)
            *(float2 *)&part[r * DP + i * 8 + (lane & 3) * 2] =
                make_float2(rows.o[i][h * 2], rows.o[i][h * 2 + 1]);
    }
    __syncthreads();
    if (wn != 0) return false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = h * 8 + (lane >> 2);
        float top = -INFINITY, weight[WN], sum = 0.0f;
        for (int w = 0; w < WN; w++) top = fmaxf(top, part_max[w * 16 + r]);
        const float base2 = top == -INFINITY ? 0.0f : top * scale_log2;
        for (int w = 0; w < WN; w++) {
            weight[w] = exp2_fast(part_max[w * 16 + r] * scale_log2 - base2);
            sum += part_sum[w * 16 + r] * weight[w];
        }
        rows.max[h] = top;
        rows.sum[h] = sum;
#pragma unroll
        for (int i = 0; i < OT; i++) {
            float x = 0.0f, y = 0.0f;
            for (int w = 0; w < WN; w++) {
                const float2 f = *(float2 *)&part[(w * 16 + r) * DP + i * 8 + (lane & 3) * 2];
                x += f.x * weight[w];
                y += f.y * weight[w];
            }
            rows.o[i][h * 2] = x;
            rows.o[i][h * 2 + 1] = y;
        }
    }
    return true;
}

/* Writes O and lse of a thread's two rows, the first of them row `row` of the block. */
template <typename T, int OT>
__device__ __forceinline__ void store_output(const attend_kernel &a, const row_block &b, int row,
                                             const running_rows<OT> &rows)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + h * 8;
        if (r >= b.rows) continue;
        int n, head;
        row_place(a, b.query, b.rem, r, &n, &head);
        head += b.head0;
        const float sum = rows.sum[h], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (a.lse.p != NULL && (lane & 3) == 0)
            a.lse.p[b.seq.view_b * a.lse.s[0] + head * a.lse.s[1] + (b.seq.q0 + n) * a.lse.s[2]] =
                sum == 0.0f ? -INFINITY : rows.max[h] * a.scale + logf(sum);
        if (a.o.p == NULL) continue;
        T *dst = (T *)a.o.p + b.seq.view_b * a.o.s[0] + (b.seq.q0 + n) * a.o.s[1] + head * a.o.s[2];
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (lane & 3) * 2;
            if (c >= a.dim_v) continue;
            const float x = rows.o[i][h * 2] * inverse + 0.0f, y = rows.o[i][h * 2 + 1] * inverse + 0.0f;
            if (a.vec_o) {
                *(uint32_t *)(dst + c) = pack2<T>(x, y);
            } else {
                dst[c] = from_float<T>(x);
                dst[c + 1] = from_float<T>(y);
            }
        }
    }
}

/* Shared memory; behind it, with lists, a.list_k entries each of the clean list, flags and the raw list. */
template <int DP, int M, int KEYS, bool LISTED> struct forward_shared {
    uint16_t q[M * DP], k[2][KEYS * DP], v[2][KEYS * DP];
    int32_t column[LISTED ? 2 : 0][KEYS]; /* the key of each slot */
};

template <typename T, int DP, int WM, int WN, bool LISTED, typename PRODUCTS>
__global__ void __launch_bounds__(32 * WM * WN)
    attend_forward(const __grid_constant__ attend_kernel a, const __grid_constant__ key_ranges ranges)
{
    constexpr int M = 16 * WM, KEYS = forward_shape<DP, WN>::KEYS, WK = KEYS / WN, NT = WK / 8, OT = DP / 8,
                  CHUNKS = DP / 8;
    constexpr int THREADS = 32 * WM * WN, TILE = KEYS * DP * 2;
    constexpr bool HOLD = WN > 1 && DP <= 128; /* Q stays in registers */
    extern __shared__ __align__(1024) char smem[];
    typedef forward_shared<DP, M, KEYS, LISTED> memory;
    memory &m = *(memory *)smem;
    char *sq = (char *)m.q, *sk = (char *)m.k, *sv = (char *)m.v;
    int32_t *column = (int32_t *)m.column, *list = (int32_t *)(&m + 1);
    const uint32_t aq = smem_address(sq), ak0 = smem_address(sk), av0 = smem_address(sv);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % WM, wn = warp / WM;

    row_block b;
    if (!find_rows<M>(a, LISTED, &b)) return;
    if (!LISTED) keep_range(ranges, &b.seq);
    load_rows<T, M, THREADS, CHUNKS>(a, b, a.q, a.dim_k, a.vec_q, aq, sq);
    const row_bounds seen = find_bounds<LISTED>(a, b, list);
    int lo[2], hi[2];
    thread_bounds(a, b, wm * 16 + (lane >> 2), lo, hi);
    const int nk = (int)b.seq.nk, tiles = seen.slots > 0 ? (seen.slots + KEYS - 1) / KEYS : 0;
    const key_rows<T> from = find_key_rows<T, CHUNKS>(a, b);
    auto load = [&](int t) {
        const int at = (t & 1) * TILE;
#pragma unroll
        for (int r = 0; r < KEYS; r += 64)
            load_slots<T, KEYS, THREADS, CHUNKS, LISTED>(
                a, from.k, from.v, from.in_k, from.in_v, nk, seen.base, seen.slots, list, t * KEYS + r, r,
                ak0 + at, av0 + at, sk + at, sv + at, column + (t & 1) * KEYS + r);
        cp_async_commit();
    };

    running_rows<OT> rows = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {}};
    uint32_t fq[HOLD ? DP / 16 : 1][4];
    if (tiles > 0) load(0);
    for (int t = 0; t < tiles; t++) {
        cp_async_wait<0>();
        PRODUCTS::show();
        __syncthreads();
        if (t + 1 < tiles) load(t + 1);
        const uint32_t ak = ak0 + (t & 1) * TILE, av = av0 + (t & 1) * TILE;
        float s[NT][4] = {};
        if constexpr (HOLD) {
            if (t == 0)
#pragma unroll
                for (int i = 0; i < DP / 16; i++) load_a<M>(fq[i], aq, wm * 16, i * 16, lane);
            product_nt_held<T, DP, NT, KEYS>(s, fq, ak, wn * WK, lane);
        } else {
            PRODUCTS::start();
            PRODUCTS::template nt<T, DP, NT, M, KEYS>(s, aq, wm * 16, ak, wn * WK, lane);
            PRODUCTS::finish();
        }

        const int slot0 = t * KEYS;
        const bool inside =
            all_seen<KEYS, LISTED>(a, list, seen.base, slot0, seen.slots, seen.last_lo, seen.first_hi);
        auto key_at = [&](int at) {
            return LISTED                    ? column[(t & 1) * KEYS + at]
                   : slot0 + at < seen.slots ? seen.base + slot0 + at
                                             : nk;
        };
        if (!inside) hide_scores(s, lo, hi, wn * WK + (lane & 3) * 2, key_at);
        uint32_t p[NT][2]; /* P in 16 bits: rows lane / 4 and that + 8 */
        soften<T>(s, a.scale_log2, rows, p);
        char *values = sv + (t & 1) * TILE;
        if (!inside && __syncthreads_or(any_nonfinite<T, KEYS, THREADS, CHUNKS>(values))) {
            spread_nonfinite<T, KEYS>(rows.o, values, wn * WK, WK, false,
                                      [&](int j, int h) { return key_at(j) >= lo[h] && key_at(j) < hi[h]; });
            __syncthreads();
            clear_nonfinite<T, KEYS, THREADS, CHUNKS>(values);
            PRODUCTS::show();
            __syncthreads();
        }
        PRODUCTS::start();
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t fp[4] = {p[kk][0], p[kk][1], p[kk + 1][0], p[kk + 1][1]};
            PRODUCTS::template nn<T, DP, KEYS>(rows.o, fp, av, wn * WK + kk * 8, lane);
        }
        PRODUCTS::finish();
    }
    cp_async_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 1);
        rows.sum[h] += __shfl_xor_sync(~0u, rows.sum[h], 2);
    }
    if constexpr (WN > 1) /* over the tiles of K and V */
        if (!merge_shares<DP, WN>((float *)sk, a.scale_log2, wn, rows)) return;
    store_output<T>(a, b, wm * 16 + (lane >> 2), rows);
}

template <typename T, int DP, int WM, int WN, bool LISTED, typename PRODUCTS>
static quern_status launch_forward(const attend_args *args, const attend_kernel &a, const launcher &to)
{
    constexpr int M = 16 * WM, KEYS = forward_shape<DP, WN>::KEYS;
    const size_t bytes =
        sizeof(forward_shared<DP, M, KEYS, LISTED>) + (LISTED ? 3 * (size_t)a.list_k * 4 : 0);
    return launch_shared(to, attend_forward<T, DP, WM, WN, LISTED, PRODUCTS>, row_grid(args, a, M, LISTED),
                         32 * WM * WN, bytes, "attend_forward", a, key_ranges_of(args));
}

/* The calls that any GPU takes. */
template <typename T, int DP>
static quern_status forward_by_warps(const attend_args *args, const attend_launch &l, const launcher &to)
{
    const attend_kernel &a = l.kernel;
    if (!l.listed) return launch_forward<T, DP, 8, 1, false, warp_products>(args, a, to);
    if (few_rows(a)) return launch_forward<T, DP, 1, 4, true, warp_products>(args, a, to);
    return launch_forward<T, DP, 8, 1, true, warp_products>(args, a, to);
}

#endif
