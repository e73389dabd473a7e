/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sums.cu - what stands behind the items of the block indexer's loss: parts added in the order of the blocks.
 * Limit: reads; d_q_index's parts are 4 D_I bytes a block of a list. */
#include "common/sums.cuh"
#include "index_loss/params.cuh"

namespace index_loss
{

enum { SUM_THREADS = 1024 };

/* Maxima and sums of powers of 2, [parts] each `step` apart, as the logarithm of all. */
static __device__ __forceinline__ double add_parts(const float2 *x, int64_t parts, int64_t step)
{
    float most = -INFINITY;
    for (int64_t i = 0; i < parts; i++) most = fmaxf(most, x[i * step].x);
    const float from = most == -INFINITY ? 0.0f : most;
    double sum = 0.0;
    for (int64_t i = 0; i < parts; i++)
        if (!(x[i * step].y == 0.0f))
            sum += (double)x[i * step].y * exp2((double)x[i * step].x - (double)from);
    return (double)from + log2(sum);
}

/* A thread a head of a query's list, and one for the student. */
static __global__ void __launch_bounds__(THREADS) index_loss_settle(const __grid_constant__ params p)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, heads = p.group + 1;
    if (i >= p.lists * p.queries * heads) return;
    const int64_t h = i % heads, row = i / heads, j = row / p.queries, query = row % p.queries,
                  parts = p.count[j * p.all + p.first + query] * p.subs, at = row * p.k * p.subs;
    if (h == p.group) {
        const double lse = add_parts(p.student + at, parts, 1);
        p.lse_index[row] = (float)lse;
        p.lse_rest[row] = isfinite(lse) ? (float)(lse - (double)(float)lse) : 0.0f;
        return;
    }
    float lse;
    if (given_lse(p, p.first + query, j * p.group + h, &lse))
        p.lse2[row * p.group + h] = (float)((double)lse * 1.4426950408889634074);
    else p.lse2[row * p.group + h] = (float)add_parts(p.teacher + at * p.group + h, parts, p.group);
}

/* One key has T = P = 1, whatever their rounding. */
static __global__ void __launch_bounds__(THREADS) index_loss_idle(const __grid_constant__ params p)
{
    const int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= p.lists * p.queries) return;
    bool finite = isfinite(p.lse_index[row]);
    for (int64_t h = 0; h < p.group; h++) finite = finite && isfinite(p.lse2[row * p.group + h]);
    p.idle[row] = finite && p.seen[row / p.queries * p.all + p.first + row % p.queries] == 1;
}

quern_status settle(const params &p, cudaStream_t stream)
{
    const int64_t rows = p.lists * p.queries;
    index_loss_settle<<<blocks_for(rows * (p.group + 1), THREADS), THREADS, 0, stream>>>(p);
    index_loss_idle<<<blocks_for(rows, THREADS), THREADS, 0, stream>>>(p);
    return LAUNCHED("index_loss, normalisers");
}

static __device__ __forceinline__ float gradient_scale(const params &p)
{
    return (float)((double)p.lambda * (double)p.scale_index / ((double)p.lists * (double)max(*p.rows, 1)));
}

/* A warp a query's list: its loss, and the gradient of its row of q_index. */
static __global__ void __launch_bounds__(THREADS) index_loss_give(const __grid_constant__ params p)
{
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, j = row / p.queries,
                  i = p.first + row % p.queries;
    const int lane = threadIdx.x % 32;
    if (row >= p.lists * p.queries) return;
    const bool idle = p.idle[row] != 0;
    const int64_t parts = idle ? 0 : p.count[j * p.all + i] * p.subs, at = row * p.k * p.subs,
                  b = p.sq.cu_q != NULL || p.sq.n_q == 0 ? 0 : i / p.sq.n_q,
                  query = p.sq.cu_q != NULL ? i : i - b * p.sq.n_q;
    if (lane == 0) {
        double loss = parts > 0 ? (double)p.lse_rest[row] * 0.69314718055994530942 : 0.0, total = 0.0;
        for (int64_t e = 0; e < parts; e++) {
            loss += (double)p.terms[at + e].x;
            total += (double)p.terms[at + e].y;
        }
        /* T sums to 1, whatever its rounding. */
        loss = parts > 0 ? loss / total - log(total) : 0.0;
        p.losses[j * p.all + i] = loss;
        if (p.row_loss.p != NULL)
            p.row_loss.p[b * p.row_loss.s[0] + j * p.row_loss.s[1] + query * p.row_loss.s[2]] = (float)loss;
    }
    if (p.d_q_index.p == NULL) return;
    const float scale = gradient_scale(p);
    const int64_t to = b * p.d_q_index.s[0] + query * p.d_q_index.s[1] + j * p.d_q_index.s[2];
    for (int d = lane; d < p.width; d += 32) {
        float sum = 0.0f;
#pragma unroll 8
        for (int64_t e = 0; e < parts; e++) sum += __ldcs(p.d_q + (at + e) * p.width + d);
        put_at(p.d_q_index.p, p.dtype, to + d, parts > 0 ? sum * scale : 0.0f);
    }
}

quern_status give(const params &p, cudaStream_t stream)
{
    index_loss_give<<<blocks_for(p.lists * p.queries, WARPS), THREADS, 0, stream>>>(p);
    return LAUNCHED("index_loss, rows");
}

static __global__ void __launch_bounds__(SUM_THREADS) index_loss_sum(const __grid_constant__ params p)
{
    const double sum = block_sum<SUM_THREADS>(p.losses, p.lists * p.all);
    if (threadIdx.x != 0) return;
    const double parts = (double)max(p.lists, (int64_t)1) * (double)max(*p.rows, 1);
    *p.loss = (float)((double)p.lambda * sum / parts);
}

static __global__ void __launch_bounds__(THREADS) index_loss_keys(const __grid_constant__ params p)
{
    const int64_t heads = p.shared ? 1 : p.lists, i = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  row = i / p.width, head = row % heads, key = row / heads, n = p.sq.n_kv;
    const int column = (int)(i % p.width);
    if (key >= p.keys) return;
    float sum = 0.0f;
    for (int64_t j = p.shared ? 0 : head; j < (p.shared ? p.lists : head + 1); j++)
        sum += p.d_keys[(j * p.keys + key) * p.width + column];
    const int64_t b = p.sq.cu_q != NULL ? 0 : key / n;
    put_at(p.d_keys_index.p, p.dtype,
           b * p.d_keys_index.s[0] + (key - b * n) * p.d_keys_index.s[1] + head * p.d_keys_index.s[2] +
               column,
           sum * gradient_scale(p));
}

/* Rows of row_loss past the last query of a packed batch. */
static __global__ void __launch_bounds__(THREADS) index_loss_rest(const __grid_constant__ params p)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, more = p.loss_rows - p.all;
    if (i < p.lists * more)
        p.row_loss.p[i / more * p.row_loss.s[1] + (p.all + i % more) * p.row_loss.s[2]] = 0.0f;
}

quern_status finish(const params &p, cudaStream_t stream)
{
    const int64_t elements = p.keys * (p.shared ? 1 : p.lists) * p.width;
    if (p.loss != NULL) index_loss_sum<<<1, SUM_THREADS, 0, stream>>>(p);
    if (p.d_keys != NULL && elements > 0)
        index_loss_keys<<<blocks_for(elements, THREADS), THREADS, 0, stream>>>(p);
    if (p.row_loss.p != NULL && p.sq.cu_q != NULL && p.lists * (p.loss_rows - p.all) > 0)
        index_loss_rest<<<blocks_for(p.lists * (p.loss_rows - p.all), THREADS), THREADS, 0, stream>>>(p);
    return LAUNCHED("index_loss, sums");
}

} // namespace index_loss
