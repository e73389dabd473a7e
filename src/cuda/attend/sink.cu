/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * sink.cu - attention with a sink s, by kernels that know of none. With lse that of the keys, the sink leaves
 * them the share f = 1 / (1 + exp(s - lse)):
 *
 *   forward    o f, rounded a second time
 *   backward   P f = exp(score - lse'), lse' = log(exp(lse) + exp(s)); delta is of the o that is given, which
 *              has its f; d_sink = - sum exp(s - lse') delta
 *
 * A thread takes eight elements of o; a block of threads sums d_sink of a head, in f64 and in an order that
 * the rows' number alone says. Limit: o's bytes, once read and once written, over the copy rate.
 */
#include "attend/sink.cuh"
#include "attend/ranges.cuh"
#include "common/chunk.cuh"

#include <math.h>

enum { THREADS = 256, SUMMERS = 512 };
static const int64_t most_blocks = 16384;

struct sink_rows {
    view4 o;
    view3 lse, delta;
    const float *sink;
    int64_t views, rows;
    int32_t heads, chunks;
    bool vec;
};

static sink_rows rows_of(const attend_args *args)
{
    return {view4_of(args->o),
            view3_of(args->lse),
            view3_of(args->delta),
            (const float *)args->sink.data,
            args->q.shape[0],
            args->q.shape[1],
            (int32_t)args->q.shape[2],
            (int32_t)(args->v.shape[3] / CHUNK),
            rows_aligned16(args->o)};
}

/* log(exp(lse) + exp(sink)); of a row without keys -inf. */
__device__ __forceinline__ float joint_lse(float lse, float sink)
{
    if (lse == -INFINITY || sink == -INFINITY) return lse;
    const float more = sink > lse ? sink : lse, less = sink > lse ? lse : sink;
    return more == INFINITY ? INFINITY : more + log1pf(expf(less - more));
}

__device__ __forceinline__ int64_t first_item()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}

__device__ __forceinline__ float *statistic(const view3 &v, int64_t view, int64_t head, int64_t row)
{
    return v.p + view * v.s[0] + head * v.s[1] + row * v.s[2];
}

template <typename T>
__global__ void __launch_bounds__(THREADS) attend_sink(const __grid_constant__ sink_rows a)
{
    const int64_t all = a.views * a.rows * a.heads * a.chunks;
    for (int64_t i = first_item(); i < all; i += (int64_t)gridDim.x * THREADS) {
        const int64_t at = i / a.chunks, n = at / a.heads, view = n / a.rows, row = n - view * a.rows;
        const int32_t c = (int32_t)(i - at * a.chunks), head = (int32_t)(at - n * a.heads);
        const float sink = a.sink[head], lse = *statistic(a.lse, view, head, row);
        if (sink == -INFINITY || lse == -INFINITY) continue;
        T *o = (T *)a.o.p + view * a.o.s[0] + row * a.o.s[1] + head * a.o.s[2] + c * CHUNK;
        chunk x = {};
        if (sink != INFINITY) {
            const float share = 1.0f / (1.0f + expf(sink - lse));
            x = load_chunk(o, a.vec);
#pragma unroll
            for (int e = 0; e < CHUNK; e++) x.x[e] *= share;
        }
        store_chunk(o, x, a.vec);
    }
}

__global__ void __launch_bounds__(THREADS)
    attend_sink_join(const __grid_constant__ sink_rows a, const __grid_constant__ view3 to)
{
    const int64_t all = a.views * a.rows * a.heads;
    for (int64_t i = first_item(); i < all; i += (int64_t)gridDim.x * THREADS) {
        const int64_t at = i / a.rows, row = i - at * a.rows, view = at / a.heads, head = at - view * a.heads;
        *statistic(to, view, head, row) = joint_lse(*statistic(a.lse, view, head, row), a.sink[head]);
    }
}

__global__ void __launch_bounds__(SUMMERS)
    attend_sink_gradient(const __grid_constant__ sink_rows a, const __grid_constant__ view3 joint, float *to)
{
    __shared__ double sums[SUMMERS];
    const int head = (int)blockIdx.x;
    const float sink = a.sink[head];
    double sum = 0.0;
    for (int64_t i = threadIdx.x; sink != INFINITY && i < a.views * a.rows; i += SUMMERS) {
        const int64_t view = i / a.rows, row = i - view * a.rows;
        const float lse = *statistic(joint, view, head, row);
        if (lse != -INFINITY) sum += (double)expf(sink - lse) * (double)*statistic(a.delta, view, head, row);
    }
    sums[threadIdx.x] = sum;
    for (int half = SUMMERS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) to[head] = (float)-sums[0];
}

__global__ void __launch_bounds__(THREADS)
    validate_ranges(const int32_t *first, const int32_t *count, int64_t batch, int64_t keys, int32_t *status)
{
    bool bad = false;
    for (int64_t b = threadIdx.x; b < batch; b += THREADS) {
        const int64_t end = count != NULL ? count[b] : keys, from = first != NULL ? first[b] : 0;
        bad |= from < 0 || from > end || end > keys;
    }
    if (__any_sync(~0u, bad) && threadIdx.x % 32 == 0) atomicOr(status, QUERN_STATUS_BAD_POSITION);
}

quern_tensor sink_statistics(const attend_args *args, void *data)
{
    quern_tensor t = args->q;
    t.data = data;
    t.dtype = QUERN_F32;
    t.ndim = 3;
    t.shape[1] = args->q.shape[2];
    t.shape[2] = args->q.shape[1];
    t.strides[2] = 1;
    t.strides[1] = t.shape[2];
    t.strides[0] = t.shape[1] * t.shape[2];
    return t;
}

size_t sink_bytes(const attend_args *args)
{
    return (size_t)(args->q.shape[0] * args->q.shape[1] * args->q.shape[2]) * sizeof(float);
}

/* Blocks of threads for n elements. */
static unsigned blocks_of(int64_t n)
{
    const int64_t blocks = (n + THREADS - 1) / THREADS;
    return (unsigned)(blocks < most_blocks ? blocks : most_blocks);
}

quern_status sink_scale(const stage_exec *exec, const attend_args *args)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const sink_rows a = rows_of(args);
    const unsigned blocks = blocks_of(a.views * a.rows * a.heads * a.chunks);
    if (blocks == 0 || !present(args->o)) return QUERN_OK;
    if (args->o.dtype == QUERN_F32) attend_sink<float><<<blocks, THREADS, 0, stream>>>(a);
    else if (args->o.dtype == QUERN_BF16) attend_sink<bf16><<<blocks, THREADS, 0, stream>>>(a);
    else attend_sink<f16><<<blocks, THREADS, 0, stream>>>(a);
    return LAUNCHED("attention: the sink's share");
}

quern_status sink_join(const stage_exec *exec, const attend_args *args, const quern_tensor &to)
{
    const sink_rows a = rows_of(args);
    const unsigned blocks = blocks_of(a.views * a.rows * a.heads);
    if (blocks == 0) return QUERN_OK;
    attend_sink_join<<<blocks, THREADS, 0, (cudaStream_t)exec->stream>>>(a, view3_of(to));
    return LAUNCHED("attention: lse with a sink");
}

quern_status sink_gradient(const stage_exec *exec, const attend_args *args, const quern_tensor &joint)
{
    if (!present(args->d_sink) || args->q.shape[2] == 0) return QUERN_OK;
    attend_sink_gradient<<<(unsigned)args->q.shape[2], SUMMERS, 0, (cudaStream_t)exec->stream>>>(
        rows_of(args), view3_of(joint), (float *)args->d_sink.data);
    return LAUNCHED("attention: the sink's gradient");
}

quern_status ranges_validate(const stage_exec *exec, const attend_args *args)
{
    if (exec->status == NULL || (!present(args->kv_first) && !present(args->kv_count))) return QUERN_OK;
    const key_ranges ranges = key_ranges_of(args);
    validate_ranges<<<1, THREADS, 0, (cudaStream_t)exec->stream>>>(
        ranges.first, ranges.count, args->seqs.batch, args->seqs.n_kv, exec->status);
    return LAUNCHED("attention: validation of kv_first and kv_count");
}
