/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tail.cu - writes the rows of a varlen tensor past the end of the last sequence. Limit: bytes moved over the
 * copy rate. */
#include "common/tail.cuh"

template <typename T>
__global__ void tail4(view4 v, int64_t n, int64_t heads, int64_t dim, const int32_t *cu, int64_t last,
                      float value)
{
    for (int64_t row = cu_seqlens_at(cu, last, n) + blockIdx.x; row < n; row += gridDim.x)
        for (int64_t i = threadIdx.x; i < heads * dim; i += blockDim.x)
            ((T *)v.p)[row * v.s[1] + i / dim * v.s[2] + i % dim] = from_float<T>(value);
}

quern_status fill_tail(const stage_exec *exec, const stage_seqs *s, bool queries, const quern_tensor *t,
                       float value)
{
    const quern_tensor &cu = queries || s->cu_kv.data == NULL ? s->cu_q : s->cu_kv;
    if (cu.data == NULL || !present(*t) || t->shape[1] == 0) return QUERN_OK;
    const unsigned grid = t->shape[1] < 1024 ? (unsigned)t->shape[1] : 1024;
    cudaStream_t stream = (cudaStream_t)exec->stream;
    const view4 v = view4_of(*t);
    const int32_t *cu_seqlens = (const int32_t *)cu.data;
    if (t->dtype == QUERN_F32)
        tail4<float>
            <<<grid, 128, 0, stream>>>(v, t->shape[1], t->shape[2], t->shape[3], cu_seqlens, s->batch, value);
    else if (t->dtype == QUERN_BF16)
        tail4<bf16>
            <<<grid, 128, 0, stream>>>(v, t->shape[1], t->shape[2], t->shape[3], cu_seqlens, s->batch, value);
    else
        tail4<f16>
            <<<grid, 128, 0, stream>>>(v, t->shape[1], t->shape[2], t->shape[3], cu_seqlens, s->batch, value);
    return LAUNCHED("tail");
}

__global__ void tail3(view3 v, int64_t n, int64_t heads, const int32_t *cu, int64_t last, float value)
{
    const int64_t first = cu_seqlens_at(cu, last, n), count = (n - first) * heads;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x)
        v.p[i / (n - first) * v.s[1] + (first + i % (n - first)) * v.s[2]] = value;
}

quern_status fill_tail_stat(const stage_exec *exec, const stage_seqs *s, const quern_tensor *t, float value)
{
    if (s->cu_q.data == NULL || !present(*t) || t->shape[2] == 0) return QUERN_OK;
    tail3<<<256, 256, 0, (cudaStream_t)exec->stream>>>(view3_of(*t), t->shape[2], t->shape[1],
                                                       (const int32_t *)s->cu_q.data, s->batch, value);
    return LAUNCHED("tail");
}
