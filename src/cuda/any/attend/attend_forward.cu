/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * attend_forward.cu - blockwise softmax attention on the tensor cores, for bf16 and f16, every mask.
 *
 * A block of WM x WN warps owns 16 WM packed rows (attend.cuh) and walks its key slots KEYS at a time, the next
 * tile of K and V on its way while this one is used: S = Q K^T in registers, running maximum and sum in the exp2
 * domain, P straight from the accumulators as the A operand of O += P V. With WN = 1 each warp holds all keys of
 * its 16 rows, and on Hopper four warps make one warpgroup product. With WN = 4 (per-token lists, <= 16 rows a
 * tile) the warps split the keys, keep their own maximum, sum and O, and merge through shared memory in warp order.
 *
 * NaN and infinity in V reach the rows that see them and no others (spread_nonfinite). A zero of O is stored as + 0:
 * the sign that the products leave may come from a value that is not seen, by a factor of 0.
 *
 * At D = 128, WN = 1: 128 rows, 128 keys a tile; registers a thread O 64, S 64; shared memory 160 KB, one block
 * an SM. Limit: the tensor cores, shared with 16 exponentials a clock and SM.
 */
#include "any/attend/attend.cuh"
#include "stages.cuh"

#include <math.h>

template <int DP, int WN> struct forward_shape {
    static constexpr int KEYS = WN > 1 || DP > 128 ? 64 : 128, STAGES = 2;
};

template <typename T, int DP, int WM, int WN, bool LISTED>
__global__ void __launch_bounds__(32 * WM * WN) attend_forward(const __grid_constant__ attend_kernel a)
{
    constexpr int M = 16 * WM, KEYS = forward_shape<DP, WN>::KEYS, WK = KEYS / WN, NT = WK / 8, OT = DP / 8, CHUNKS = DP / 8;
    constexpr int THREADS = 32 * WM * WN, TILE = KEYS * DP * 2, STEP = THREADS / CHUNKS;
    constexpr bool WG = WN == 1, HOLD = WN > 1 && DP <= 128; /* HOLD: Q stays in registers */
    extern __shared__ __align__(1024) char smem[];
    char *sq = smem, *sk = sq + M * DP * 2, *sv = sk + 2 * TILE;
    int32_t *column = (int32_t *)(sv + 2 * TILE); /* LISTED: [2][KEYS] key of each slot */
    int32_t *list = column + 2 * KEYS;            /* LISTED: [list_k] clean, then flags, then raw */
    const uint32_t aq = smem_address(sq), ak0 = smem_address(sk), av0 = smem_address(sv);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % WM, wn = warp / WM;

    row_block b;
    if (!find_rows<M>(a, LISTED, &b)) return;
    const sequence &seq = b.seq;
    const int nk = (int)seq.nk, mine = threadIdx.x % CHUNKS, row0 = threadIdx.x / CHUNKS;
    const T *q = (const T *)a.q.p + seq.view_b * a.q.s[0] + seq.q0 * a.q.s[1] + b.head0 * a.q.s[2] + mine * 8;
    const T *k = (const T *)a.k.p + seq.view_b * a.k.s[0] + seq.k0 * a.k.s[1] + b.kvh * a.k.s[2] + mine * 8;
    const T *v = (const T *)a.v.p + seq.view_b * a.v.s[0] + seq.k0 * a.v.s[1] + b.kvh * a.v.s[2] + mine * 8;
    const bool in_k = mine * 8 < a.dim_k, in_v = mine * 8 < a.dim_v;
    for (int r = row0; r < M; r += STEP) {
        int n, head;
        row_place(a, b.query, b.rem, r, &n, &head);
        const bool valid = r < b.rows && in_k;
        load_chunk16<T>(aq, sq, tile_at<M>(r, mine), valid ? q + n * a.q.s[1] + head * a.q.s[2] : q, valid, a.vec_q);
    }

    /* What the rows of this block see: each row's interval, and the bounds over all rows. */
    int first_lo, first_hi, last_lo, last_hi, n, head;
    row_keys(a, seq, b.query, &first_lo, &first_hi);
    row_place(a, b.query, b.rem, b.rows - 1, &n, &head);
    row_keys(a, seq, n, &last_lo, &last_hi);
    int lo[2] = {0, 0}, hi[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = wm * 16 + h * 8 + (lane >> 2);
        row_place(a, b.query, b.rem, r, &n, &head);
        if (r < b.rows) row_keys(a, seq, n, &lo[h], &hi[h]);
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

    float o[OT][4] = {};
    uint32_t fq[HOLD ? DP / 16 : 1][4];
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f};
    if (tiles > 0) load(0);
    for (int t = 0; t < tiles; t++) {
        cp_async_wait<0>();
        wg_show();
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
            wg_start();
            product_nt<T, DP, NT, M, KEYS, WG>(s, aq, wm * 16, ak, wn * WK, lane);
            wg_finish();
        }

        const int slot0 = t * KEYS;
        const bool inside = all_seen<KEYS, LISTED>(a, list, base, slot0, slots, last_lo, first_hi);
        auto key_at = [&](int at) { return LISTED ? column[(t & 1) * KEYS + at] : slot0 + at < slots ? base + slot0 + at : nk; };
        if (!inside) {
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int key = key_at(wn * WK + i * 8 + (lane & 3) * 2 + c);
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (key < lo[h] || key >= hi[h]) s[i][h * 2 + c] = -INFINITY;
                }
        }
        float shrinks[2];
        uint32_t p[NT][2]; /* P, packed: rows lane / 4 and that + 8 */
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = row_max[h];
#pragma unroll
            for (int i = 0; i < NT; i++) top = fmaxf(top, fmaxf(s[i][h * 2], s[i][h * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float base2 = top == -INFINITY ? 0.0f : top * a.scale_log2;
            const float shrink = exp2_fast(row_max[h] * a.scale_log2 - base2);
            row_max[h] = top;
            float sum = row_sum[h] * shrink;
#pragma unroll
            for (int i = 0; i < NT; i++) {
                const float x = exp2_fast(fmaf(s[i][h * 2], a.scale_log2, -base2)), y = exp2_fast(fmaf(s[i][h * 2 + 1], a.scale_log2, -base2));
                sum += x + y;
                p[i][h] = pack2<T>(x, y);
            }
            row_sum[h] = sum;
            shrinks[h] = shrink;
        }
        if (__any_sync(~0u, shrinks[0] != 1.0f || shrinks[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < OT; i++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[i][c] *= shrinks[c >> 1];
        }
        char *values = sv + (t & 1) * TILE;
        if (!inside && __syncthreads_or(any_nonfinite<T, KEYS, THREADS, CHUNKS>(values))) {
            spread_nonfinite<T, KEYS>(o, values, wn * WK, WK, false, [&](int j, int h) { return key_at(j) >= lo[h] && key_at(j) < hi[h]; });
            __syncthreads();
            clear_nonfinite<T, KEYS, THREADS, CHUNKS>(values);
            wg_show();
            __syncthreads();
        }
        wg_start();
#pragma unroll
        for (int kk = 0; kk < NT; kk += 2) {
            const uint32_t fp[4] = {p[kk][0], p[kk][1], p[kk + 1][0], p[kk + 1][1]};
            product_nn<T, DP, KEYS, WG>(o, fp, av, wn * WK + kk * 8, lane);
        }
        wg_finish();
    }
    cp_async_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 1);
        row_sum[h] += __shfl_xor_sync(~0u, row_sum[h], 2);
    }

    if (WN > 1) { /* merge the warps' shares, in warp order, into warp 0 */
        float *part = (float *)sk, *part_max = part + WN * 16 * DP, *part_sum = part_max + WN * 16; /* over the K and V tiles */
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = wn * 16 + h * 8 + (lane >> 2);
            if ((lane & 3) == 0) part_max[r] = row_max[h], part_sum[r] = row_sum[h];
#pragma unroll
            for (int i = 0; i < OT; i++) *(float2 *)&part[r * DP + i * 8 + (lane & 3) * 2] = make_float2(o[i][h * 2], o[i][h * 2 + 1]);
        }
        __syncthreads();
        if (wn != 0) return;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int r = h * 8 + (lane >> 2);
            float top = -INFINITY, weight[WN], sum = 0.0f;
            for (int w = 0; w < WN; w++) top = fmaxf(top, part_max[w * 16 + r]);
            const float base2 = top == -INFINITY ? 0.0f : top * a.scale_log2;
            for (int w = 0; w < WN; w++) {
                weight[w] = exp2_fast(part_max[w * 16 + r] * a.scale_log2 - base2);
                sum += part_sum[w * 16 + r] * weight[w];
            }
            row_max[h] = top;
            row_sum[h] = sum;
#pragma unroll
            for (int i = 0; i < OT; i++) {
                float x = 0.0f, y = 0.0f;
                for (int w = 0; w < WN; w++) {
                    const float2 f = *(float2 *)&part[(w * 16 + r) * DP + i * 8 + (lane & 3) * 2];
                    x += f.x * weight[w];
                    y += f.y * weight[w];
                }
                o[i][h * 2] = x;
                o[i][h * 2 + 1] = y;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = wm * 16 + h * 8 + (lane >> 2);
        if (r >= b.rows) continue;
        row_place(a, b.query, b.rem, r, &n, &head);
        head += b.head0;
        const float sum = row_sum[h], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (a.lse.p != NULL && (lane & 3) == 0)
            a.lse.p[seq.view_b * a.lse.s[0] + head * a.lse.s[1] + (seq.q0 + n) * a.lse.s[2]] =
                sum == 0.0f ? -INFINITY : row_max[h] * a.scale + logf(sum);
        if (a.o.p == NULL) continue;
        T *dst = (T *)a.o.p + seq.view_b * a.o.s[0] + (seq.q0 + n) * a.o.s[1] + head * a.o.s[2];
#pragma unroll
        for (int i = 0; i < OT; i++) {
            const int c = i * 8 + (lane & 3) * 2;
            if (c >= a.dim_v) continue;
            const float x = o[i][h * 2] * inverse + 0.0f, y = o[i][h * 2 + 1] * inverse + 0.0f;
            if (a.vec_o) {
                *(uint32_t *)(dst + c) = pack2<T>(x, y);
            } else {
                dst[c] = from_float<T>(x);
                dst[c + 1] = from_float<T>(y);
            }
        }
    }
}

template <typename T, int DP, int WM, int WN, bool LISTED>
static quern_status launch(const attend_args *args, const attend_kernel &a, const launcher &to)
{
    constexpr int M = 16 * WM, KEYS = forward_shape<DP, WN>::KEYS;
    const size_t bytes = (size_t)(M + 4 * KEYS) * DP * 2 + (LISTED ? (2 * KEYS + 3 * (size_t)a.list_k) * 4 : 0);
    int64_t pieces = piece_bound(args->seqs, M, a.hs);
    if (LISTED) pieces = piece_bound(args->seqs, a.tile, 1) * (((int64_t)a.tile * a.hs + M - 1) / M);
    return launch_shared(to, attend_forward<T, DP, WM, WN, LISTED>, dim3((unsigned)pieces, (unsigned)a.units), 32 * WM * WN, bytes, "attend_forward",
                         a);
}

template <typename T, int DP>
static quern_status choose(const attend_args *args, const attend_launch &l, const launcher &to)
{
    if (!l.listed) return launch<T, DP, 8, 1, false>(args, l.kernel, to);
    if ((int64_t)l.kernel.tile * l.kernel.hs <= 16) return launch<T, DP, 1, 4, true>(args, l.kernel, to);
    return launch<T, DP, 8, 1, true>(args, l.kernel, to);
}

template <typename T> static quern_status choose_dim(const attend_args *args, const attend_launch &l, const launcher &to)
{
    if (l.dim == 64) return choose<T, 64>(args, l, to);
    if (l.dim == 128) return choose<T, 128>(args, l, to);
    return choose<T, 256>(args, l, to);
}

quern_status attend_forward_half(const attend_args *args, const launcher &to)
{
    const attend_launch l = attend_launch_of(args);
    return l.dtype == QUERN_BF16 ? choose_dim<bf16>(args, l, to) : choose_dim<f16>(args, l, to);
}
