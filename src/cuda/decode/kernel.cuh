/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernel.cuh - the block of a query, some of its heads, and a share of its keys. */
#ifndef QUERN_CUDA_DECODE_KERNEL_CUH
#define QUERN_CUDA_DECODE_KERNEL_CUH

#include "decode/params.cuh"

namespace decode_dense
{

using namespace decode_walk;

/* Four columns of a row, or a share's. */
template <class W>
__device__ __forceinline__ void leave_row(const dense_kernel &a, const dense_query &q, int64_t t, int head,
                                          int share, const row_total &all, const float4 &x, int column)
{
    typedef typename W::element T;
    if (q.parts.shares > 1) {
        const int64_t part = part_at(a, q, head, share);
        if (column == 0) a.sums[part] = make_float2(all.top, all.sum);
        *(float4 *)(a.values + part * a.plane.dim_v + column) = x;
        return;
    }
    const float lse = lse_of(all.top, all.sum),
                by = factor_of(all.sum, lse, a.sink != NULL ? a.sink + head : NULL);
    T *const to = (T *)a.o.p + t * a.o.s[1] + head * a.o.s[2] + column;
    store_four<T>(to, make_float4(x.x * by, x.y * by, x.z * by, x.w * by), a.o_wide);
    if (column == 0 && a.lse.p != NULL) a.lse.p[head * a.lse.s[1] + t * a.lse.s[2]] = lse;
}

template <class W> __device__ __forceinline__ void take_share(const dense_kernel &a, block_memory<W> &m)
{
    typedef typename W::element T;
    uint32_t rest = blockIdx.x;
    const int share = (int)(rest % (uint32_t)a.shares);
    rest /= (uint32_t)a.shares;
    const int chunk = (int)(rest % (uint32_t)a.chunks);
    rest /= (uint32_t)a.chunks;
    const int kv = (int)(rest % (uint32_t)a.plane.heads);
    const int64_t t = rest / (uint32_t)a.plane.heads;
    let_next_start();
    if (blockIdx.x == 0) step_check(a.step, a.status);
    dense_query q;
    if (!find_query(a, t, &q) || share >= q.parts.shares) return;
    if (!q.good && threadIdx.x == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    const int row0 = chunk * W::ROWS, head0 = kv * a.group + row0,
              rows = a.group - row0 < W::ROWS ? a.group - row0 : W::ROWS;
    const int64_t from = share * q.parts.per, left = q.n - from;
    range_keys keys = q.keys;
    keys.start += from;
    W::load(m.q, {(const T *)a.q.p + t * a.q.s[1] + head0 * a.q.s[2], a.q.s[2], rows, a.plane.dim, a.q_wide});
    __syncthreads();
    W w;
    w.open();
    w.run({a.plane, q.b, kv, a.status}, keys, (int)(left < q.parts.per ? left : q.parts.per), m.q,
          m.ring[threadIdx.x / 32], a.scale2, true, no_scores());
    __syncthreads();
    w.store_sums(m, rows);
    __syncthreads();
    const int fours = a.plane.dim_v / 4;
    for (int i = threadIdx.x; i < rows * fours; i += THREADS) {
        const int row = i / fours, column = (i - row * fours) * 4;
        const row_total all = total_of(m, row);
        leave_row<W>(a, q, t, head0 + row, share, all, total_at(m, all, row, column), column);
    }
}

/* A walk's kernel. */
template <class W>
static quern_status launch(void (*kernel)(dense_kernel), dense_kernel a, const launcher &to)
{
    a.chunks = (a.group + W::ROWS - 1) / W::ROWS;
    const int64_t blocks = a.step.total * a.plane.heads * a.chunks * a.shares;
    return launch_shared(to, kernel, dim3((unsigned)blocks), THREADS, sizeof(block_memory<W>),
                         "attention of a step over pages", a);
}

} // namespace decode_dense

#endif
