/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* combine.cu - the shares of a query's keys, added in their order: a warp a head, whose lanes hold the
 * shares' sums; values are asked for eight shares at a time. Limit: the shares' values read once. */
#include "common/combine.cuh"
#include "decode/params.cuh"

namespace decode_dense
{

using namespace decode_walk;

template <typename T>
__global__ void __launch_bounds__(THREADS) decode_combine(const __grid_constant__ dense_kernel a)
{
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, t = row / a.heads;
    const int head = (int)(row - t * a.heads);
    dense_query q;
    const bool there = t < a.step.total && find_query(a, t, &q);
    wait_for_before();
    if (!there || q.parts.shares == 1) return; /* of one share its block has stored it */
    const int64_t part = part_at(a, q, head, 0);
    float2 own = make_float2(-INFINITY, 0.0f);
    if (lane < q.parts.shares) own = a.sums[part + lane];
    float top = own.x;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, by));
    const float factor = exp2_fast(own.x - base_of(top));
    float sum = own.y * factor;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(~0u, sum, by);
    const float lse = lse_of(top, sum), last = factor_of(sum, lse, a.sink != NULL ? a.sink + head : NULL);
    if (lane == 0 && a.lse.p != NULL) a.lse.p[head * a.lse.s[1] + t * a.lse.s[2]] = lse;
    for (int column = lane * 4; column < (a.plane.dim_v + 127) / 128 * 128; column += 128) {
        const bool in = column < a.plane.dim_v;
        float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float *const from = a.values + part * a.plane.dim_v + column;
        add_shares<true>(from, a.plane.dim_v, q.parts.shares, in, [&](int s, const float4 &come) {
            const float by = __shfl_sync(~0u, factor, s);
            if (!in) return;
            all.x = fmaf(come.x, by, all.x);
            all.y = fmaf(come.y, by, all.y);
            all.z = fmaf(come.z, by, all.z);
            all.w = fmaf(come.w, by, all.w);
        });
        if (in)
            store_four<T>((T *)a.o.p + t * a.o.s[1] + head * a.o.s[2] + column,
                          make_float4(all.x * last, all.y * last, all.z * last, all.w * last), a.o_wide);
    }
}

template <typename T>
static quern_status combine_of(const stage_exec *exec, const dense_kernel &a, int64_t rows)
{
    const dim3 grid(blocks_for(rows, WARPS));
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    if (exec->compute >= 90)
        return launch_behind(stream, decode_combine<T>, grid, THREADS, 0, "shares of attention", a);
    decode_combine<T><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("shares of attention");
}

quern_status dense_combine(const stage_exec *exec, const dense_kernel &a, int64_t rows, quern_dtype dtype)
{
    if (dtype == QUERN_F32) return combine_of<float>(exec, a, rows);
    return dtype == QUERN_BF16 ? combine_of<bf16>(exec, a, rows) : combine_of<f16>(exec, a, rows);
}

} // namespace decode_dense
