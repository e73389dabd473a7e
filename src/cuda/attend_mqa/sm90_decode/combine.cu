/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * combine.cu - the shares of a query's keys, folded in their order: a block a head, four columns a thread. A
 * warp's lanes hold the shares' sums, from which all factors follow at once; values are asked for eight
 * shares at a time, the first of them, angles and sink before the factors. It starts while the shares are
 * computed. Limit: the shares' values read once.
 */
#include "attend_mqa/sm90_decode/shared.cuh"

namespace sm90_mqa_decode
{

enum { COMBINE_THREADS = MQA_DIM / 4, FOLDED_AT_ONCE = 8 };

/* fold_sums() of shares one after another, whose sums the lanes have: what each one's values are multiplied
 * by, and the sums of all. Lanes without a share have a maximum of -inf. */
__device__ __forceinline__ row_sums fold_lanes(const row_sums &mine, int shares, fold_factors &f)
{
    const int lane = threadIdx.x % 32;
    float top = mine.top, sum = 0.0f;
#pragma unroll
    for (int apart = 1; apart < SHARES; apart *= 2) {
        const float before = __shfl_up_sync(~0u, top, apart);
        if (lane >= apart && !(top > before || top != top)) top = before;
    }
    float held = __shfl_up_sync(~0u, top, 1);
    if (lane == 0) held = -INFINITY;
    f = {held == -INFINITY ? 0.0f : exp2_fast(held - top),
         mine.top == -INFINITY ? 0.0f : exp2_fast(mine.top - top)};
#pragma unroll 1
    for (int s = 0; s < shares; s++)
        sum = fmaf(__shfl_sync(~0u, mine.sum, s), __shfl_sync(~0u, f.come, s),
                   __fmul_rn(sum, __shfl_sync(~0u, f.held, s)));
    return {__shfl_sync(~0u, top, SHARES - 1), sum};
}

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

/* Folds columns [column, column + 4) of a head, which a warp's lanes have of 128, and stores them; place: the
 * query's sequence, row, position and shares; sums: this lane's share's, of all keys and of the raw ones;
 * load: the values of a share. */
template <typename T, typename LOAD>
__device__ __forceinline__ void fold_row(const mqa_kernel &a, const int4 &place, const fold_ahead &ahead,
                                         const float4 &sums, int head, int column, const LOAD &load)
{
    const int at = column - (MQA_DIM - a.rotation.dim);
    float x[4] = {};
    float4 come[FOLDED_AT_ONCE];
#pragma unroll
    for (int s = 0; s < FOLDED_AT_ONCE; s++)
        if (s < place.w) come[s] = load(s);
    fold_factors mine;
    const row_sums all = fold_lanes({sums.x, sums.y}, place.w, mine);
    const float lse = mqa_log_sum(all.top, all.sum), factor = mqa_factor(ahead.sink, lse, all.sum);
#pragma unroll 1
    for (int s0 = 0; s0 < place.w; s0 += FOLDED_AT_ONCE) {
#pragma unroll
        for (int s = 0; s < FOLDED_AT_ONCE; s++) {
            if (s0 + s >= place.w) continue;
            const fold_factors by = {__shfl_sync(~0u, mine.held, s0 + s),
                                     __shfl_sync(~0u, mine.come, s0 + s)};
            x[0] = fold_value(x[0], come[s].x, by);
            x[1] = fold_value(x[1], come[s].y, by);
            x[2] = fold_value(x[2], come[s].z, by);
            x[3] = fold_value(x[3], come[s].w, by);
            if (s0 + FOLDED_AT_ONCE + s < place.w) come[s] = load(s0 + FOLDED_AT_ONCE + s);
        }
    }
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
    if (a.lse_win.p == NULL) return;
    const row_sums raw = fold_lanes({sums.z, sums.w}, place.w, mine);
    if (column == 0)
        a.lse_win.p[place.x * a.lse_win.s[0] + head * a.lse_win.s[1] + place.y * a.lse_win.s[2]] =
            mqa_log_sum(raw.top, raw.sum);
}

template <typename T>
__global__ void __launch_bounds__(COMBINE_THREADS) mqa_combine(const __grid_constant__ decode_kernel w)
{
    const mqa_kernel &a = w.a;
    const int query = blockIdx.x / a.heads, head = blockIdx.x - query * a.heads, group = head / w.heads,
              rest = query * w.groups + group, row = head - group * w.heads, column = threadIdx.x * 4,
              lane = threadIdx.x % 32;
    wait_for_before();
    const int4 place = w.places[rest];
    const int64_t part = (int64_t)rest * w.shares;
    float4 sums = make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f);
    if (lane < place.w) sums = w.sums[(part + lane) * HEADS + row];
    const float *const from = w.values + (part * HEADS + row) * MQA_DIM + column;
    fold_row<T>(a, place, ahead_of_fold<T>(a, place.z, head, column), sums, head, column,
                [from](int s) { return *(const float4 *)(from + (int64_t)s * HEADS * MQA_DIM); });
}

quern_status combine_shares(const stage_exec *exec, const decode_kernel &w, quern_dtype dtype)
{
    const dim3 grid((unsigned)w.a.rows * (unsigned)w.a.heads);
    return dtype == QUERN_BF16 ? launch_behind((cudaStream_t)exec->stream, mqa_combine<bf16>, grid,
                                               COMBINE_THREADS, 0, "shares of attention", w)
                               : launch_behind((cudaStream_t)exec->stream, mqa_combine<f16>, grid,
                                               COMBINE_THREADS, 0, "shares of attention", w);
}

} // namespace sm90_mqa_decode
