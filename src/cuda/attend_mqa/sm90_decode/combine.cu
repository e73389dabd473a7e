/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * combine.cu - the shares of a query's keys, folded in their order: a warp a piece of the values, a lane four
 * columns of a head. Values and sums are asked for eight shares at a time, the first of them before it is
 * known how many there are. It starts while the shares are computed. Limit: the shares' values read once.
 */
#include "attend_mqa/sm90_decode/shared.cuh"

namespace sm90_mqa_decode
{

enum { COMBINE_WARPS = 4, COMBINE_THREADS = COMBINE_WARPS * 32, FOLDED_AT_ONCE = 12 };

/* Cosines and sines of the two pairs of four columns; those of a pair that does not turn mean nothing. */
template <typename A> __device__ __forceinline__ float4 angles_at(const mqa_rotation &r, int position, int at)
{
    float4 x = {};
    const A *const cosine = (const A *)r.table + position * r.row + at / 2;
    if (at >= 0) {
        x.x = to_float<A>(cosine[0]);
        x.y = to_float<A>(cosine[r.dim / 2]);
    }
    if (at >= -2) {
        x.z = to_float<A>(cosine[1]);
        x.w = to_float<A>(cosine[r.dim / 2 + 1]);
    }
    return x;
}

/* What a thread of the fold needs besides sums and values. */
struct fold_ahead {
    float4 angles;
    float sink;
};
template <typename T>
__device__ __forceinline__ fold_ahead ahead_of_fold(const mqa_kernel &a, int position, int head, int column)
{
    const int at = column - (MQA_DIM - a.rotation.dim);
    return {a.rotation.dtype == QUERN_F32 ? angles_at<float>(a.rotation, position, at)
                                          : angles_at<T>(a.rotation, position, at),
            a.sink != NULL ? __ldg(a.sink + head) : -INFINITY};
}

/* Stores columns [column, column + 4) of a head's folded values, and its log sums; place: the query's
 * sequence, row, position and shares. */
template <typename T>
__device__ __forceinline__ void store_folded(const mqa_kernel &a, const int4 &place, const fold_ahead &ahead,
                                             const row_sums &all, float (&x)[4], int head, int column)
{
    const int at = column - (MQA_DIM - a.rotation.dim);
    const float lse = mqa_log_sum(all.top, all.sum), factor = mqa_factor(ahead.sink, lse, all.sum);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __fmul_rn(x[i], factor);
    if (at >= 0) rotate_pair(x[0], x[1], ahead.angles.x, ahead.angles.y);
    if (at >= -2) rotate_pair(x[2], x[3], ahead.angles.z, ahead.angles.w);
    T *const to = (T *)a.o.p + place.x * a.o.s[0] + place.y * a.o.s[1] + head * a.o.s[2] + column;
    const uint32_t low = pack2<T>(x[0], x[1]), high = pack2<T>(x[2], x[3]);
    if (a.o_wide) {
        *(uint2 *)to = make_uint2(low, high);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = from_float<T>(x[i]);
    }
    if (column == 0 && a.lse.p != NULL)
        a.lse.p[place.x * a.lse.s[0] + head * a.lse.s[1] + place.y * a.lse.s[2]] = lse;
}

/* The log sum of a head's raw keys. */
__device__ __forceinline__ void store_raw_sum(const mqa_kernel &a, const int4 &place, const float4 *sums,
                                              int head)
{
    row_sums raw = {-INFINITY, 0.0f};
#pragma unroll 1
    for (int s = 0; s < place.w; s++) (void)fold_sums(raw, {sums[s * HEADS].z, sums[s * HEADS].w});
    a.lse_win.p[place.x * a.lse_win.s[0] + head * a.lse_win.s[1] + place.y * a.lse_win.s[2]] =
        mqa_log_sum(raw.top, raw.sum);
}

/* Of values as products leave them, a lane two columns of rows r and r + 8: four columns of r for the first
 * of two lanes, of r + 8 for the second. */
__device__ __forceinline__ float4 one_row(const float4 &x)
{
    const bool odd = threadIdx.x % 2 != 0;
    const float first = __shfl_xor_sync(~0u, odd ? x.x : x.z, 1),
                second = __shfl_xor_sync(~0u, odd ? x.y : x.w, 1);
    return odd ? make_float4(first, second, x.z, x.w) : make_float4(x.x, x.y, first, second);
}

/* blockIdx.y: a query and a group of its heads; each warp of its blocks has 16 rows of a piece. */
template <typename T>
__global__ void __launch_bounds__(COMBINE_THREADS) mqa_combine(const __grid_constant__ decode_kernel w)
{
    const mqa_kernel &a = w.a;
    let_next_start();
    const int rest = blockIdx.y, query = rest / w.groups, lane = threadIdx.x % 32,
              warp = blockIdx.x * COMBINE_WARPS + threadIdx.x / 32, piece = warp % SHARE_PIECES,
              rows = warp / SHARE_PIECES, head0 = (rest - query * w.groups) * w.heads,
              row = rows * 16 + lane % 2 * 8 + lane / 4, head = head0 + row,
              column = piece * 8 + lane % 4 / 2 * 4;
    const int64_t part = (int64_t)rest * w.shares;
    const float4 *const values =
        (const float4 *)(w.values + part * HEADS * MQA_DIM) + piece * 128 + rows * 32 + lane;
    const float4 *const sums = w.sums + part * HEADS + row;
    const auto load_sums = [sums](int s) { return *(const float2 *)&sums[s * HEADS]; };
    const auto load = [values](int s) { return values[s * (HEADS * MQA_DIM / 4)]; };
    if (head0 + rows * 16 >= a.heads) return;
    /* All before the attention has ended when its blocks let this kernel start. */
    const int last_head = min(head, a.heads - 1);
    const bool known = w.plan.of.cu_q == NULL;
    fold_ahead ahead = {};
    if (known) ahead = ahead_of_fold<T>(a, mqa::position_of(w.plan, query), last_head, column);
    wait_for_before();
    float4 come[FOLDED_AT_ONCE];
    float2 come_sums[FOLDED_AT_ONCE];
    const int4 place = w.places[rest];
#pragma unroll
    for (int s = 0; s < FOLDED_AT_ONCE; s++)
        if (s < w.shares) {
            come_sums[s] = load_sums(s);
            come[s] = load(s);
        }
    if (!known) ahead = ahead_of_fold<T>(a, place.z, last_head, column);
    row_sums all = {-INFINITY, 0.0f};
    float x[4] = {};
#pragma unroll 1
    for (int s0 = 0; s0 < place.w; s0 += FOLDED_AT_ONCE) {
#pragma unroll
        for (int s = 0; s < FOLDED_AT_ONCE; s++) {
            /* Without a branch: factors of many shares are computed at once. */
            const bool here = s0 + s < place.w;
            row_sums next = all;
            const fold_factors f = fold_sums(next, {come_sums[s].x, come_sums[s].y});
            const float4 mine = one_row(come[s]);
            all.top = here ? next.top : all.top;
            all.sum = here ? next.sum : all.sum;
            x[0] = here ? fold_value(x[0], mine.x, f) : x[0];
            x[1] = here ? fold_value(x[1], mine.y, f) : x[1];
            x[2] = here ? fold_value(x[2], mine.z, f) : x[2];
            x[3] = here ? fold_value(x[3], mine.w, f) : x[3];
            if (s0 + FOLDED_AT_ONCE + s < place.w) {
                come_sums[s] = load_sums(s0 + FOLDED_AT_ONCE + s);
                come[s] = load(s0 + FOLDED_AT_ONCE + s);
            }
        }
    }
    if (head >= a.heads) return;
    store_folded<T>(a, place, ahead, all, x, head, column);
    if (column == 0 && a.lse_win.p != NULL) store_raw_sum(a, place, sums, head);
}

quern_status combine_shares(const stage_exec *exec, const decode_kernel &w, quern_dtype dtype)
{
    const dim3 grid((unsigned)(w.heads / 16 * SHARE_PIECES / COMBINE_WARPS), (unsigned)(w.a.rows * w.groups));
    return dtype == QUERN_BF16 ? launch_behind((cudaStream_t)exec->stream, mqa_combine<bf16>, grid,
                                               COMBINE_THREADS, 0, "shares of attention", w)
                               : launch_behind((cudaStream_t)exec->stream, mqa_combine<f16>, grid,
                                               COMBINE_THREADS, 0, "shares of attention", w);
}

} // namespace sm90_mqa_decode
