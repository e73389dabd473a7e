/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * combine.cu - the shares of a query's keys, folded in their order: a block a head, four columns a thread. A
 * warp's lanes hold the shares' sums; values are asked for eight shares at a time. It starts while the shares
 * are computed. Limit: the shares' values read once.
 */
#include "attend_mqa/sm90_decode/shared.cuh"

namespace sm90_mqa_decode
{

enum { COMBINE_THREADS = MQA_DIM / 4 };

/* The factors of the fold of share s, whose sums lane s has. */
struct folded {
    row_sums all, raw;
    __device__ __forceinline__ fold_factors add(const float4 &sums, int s)
    {
        const row_sums come = {__shfl_sync(~0u, sums.x, s), __shfl_sync(~0u, sums.y, s)},
                       come_raw = {__shfl_sync(~0u, sums.z, s), __shfl_sync(~0u, sums.w, s)};
        (void)fold_sums(raw, come_raw);
        return fold_sums(all, come);
    }
};

template <typename A>
__device__ __forceinline__ void rotate_four(const mqa_rotation &r, int position, int column, float (&x)[4])
{
    const A *const cosine = (const A *)r.table + position * r.row;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const int at = column + i - (MQA_DIM - r.dim);
        if (at >= 0)
            rotate_pair(x[i], x[i + 1], to_float<A>(cosine[at / 2]), to_float<A>(cosine[r.dim / 2 + at / 2]));
    }
}

template <typename T>
__global__ void __launch_bounds__(COMBINE_THREADS) mqa_combine(const __grid_constant__ decode_kernel w)
{
    const mqa_kernel &a = w.a;
    const int query = blockIdx.x / a.heads, head = blockIdx.x - query * a.heads, group = head / w.heads,
              rest = query * w.groups + group, row = head - group * w.heads, column = threadIdx.x * 4,
              lane = threadIdx.x % 32;
    wait_for_before();
    const int4 place = w.places[rest]; /* sequence, row, position, shares */
    const int64_t part = (int64_t)rest * w.shares;
    float4 sums = make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f);
    if (lane < place.w) sums = w.sums[(part + lane) * HEADS + row];
    const float *from = w.values + (part * HEADS + row) * MQA_DIM + column;
    folded f = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
    float x[4] = {};
    add_shares<false>(from, HEADS * MQA_DIM, place.w, true, [&](int s, const float4 &come) {
        const fold_factors by = f.add(sums, s);
        x[0] = fold_value(x[0], come.x, by);
        x[1] = fold_value(x[1], come.y, by);
        x[2] = fold_value(x[2], come.z, by);
        x[3] = fold_value(x[3], come.w, by);
    });
    const float lse = mqa_log_sum(f.all.top, f.all.sum),
                factor = mqa_factor(a.sink != NULL ? __ldg(a.sink + head) : -INFINITY, lse, f.all.sum);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __fmul_rn(x[i], factor);
    if (a.rotation.dtype == QUERN_F32) rotate_four<float>(a.rotation, place.z, column, x);
    else rotate_four<T>(a.rotation, place.z, column, x);
    T *const to = (T *)a.o.p + place.x * a.o.s[0] + place.y * a.o.s[1] + head * a.o.s[2] + column;
    const uint32_t low = pack2<T>(x[0], x[1]), high = pack2<T>(x[2], x[3]);
    if (a.o_wide) {
        *(uint2 *)to = make_uint2(low, high);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = from_float<T>(x[i]);
    }
    if (threadIdx.x != 0) return;
    if (a.lse.p != NULL) a.lse.p[place.x * a.lse.s[0] + head * a.lse.s[1] + place.y * a.lse.s[2]] = lse;
    if (a.lse_win.p != NULL)
        a.lse_win.p[place.x * a.lse_win.s[0] + head * a.lse_win.s[1] + place.y * a.lse_win.s[2]] =
            mqa_log_sum(f.raw.top, f.raw.sum);
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
