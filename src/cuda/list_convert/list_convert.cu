/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* list_convert.cu - the list conversion stage. Limit: bytes moved over the copy rate. */
#include "common/launch.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

/* One thread a list: expansion repeats each block to/from times, contraction keeps each target once. */
__global__ void list_convert(const int32_t *in, int64_t in_stride, int k_in, int32_t *out, int64_t out_stride,
                             int k_out, int32_t *count, int64_t count_stride, int64_t lists, int64_t from,
                             int64_t to, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= lists) return;
    const int32_t *src = in + i * in_stride;
    int32_t *dst = out + i * out_stride;
    const int64_t end = (n + to - 1) / to, wide = from > to ? from / to : 1,
                  narrow = to > from ? to / from : 1;
    int32_t last = -1;
    int kept = 0;
    while (kept < k_out) { /* the least target past `last`: sorts and removes repeats */
        int64_t best = end;
        for (int e = 0; e < k_in; e++) {
            if (src[e] < 0 || src[e] * from >= n) continue;
            const int64_t first = src[e] * wide / narrow, stop = first + wide;
            const int64_t x = last + 1 > first ? last + 1 : first;
            if (x < stop && x < best) best = x;
        }
        if (best >= end) break;
        dst[kept++] = last = (int32_t)best;
    }
    for (int e = kept; e < k_out; e++) dst[e] = -1;
    if (count != NULL) count[i * count_stride] = kept;
}

static quern_status list_convert_run(const stage_exec *exec, const list_convert_args *args, void *)
{
    const int64_t lists = args->in.shape[0];
    if (lists == 0) return QUERN_OK;
    list_convert<<<blocks_for(lists, THREADS), THREADS, 0, (cudaStream_t)exec->stream>>>(
        (const int32_t *)args->in.data, args->in.strides[0], (int)args->in.shape[1],
        (int32_t *)args->out.data, args->out.strides[0], (int)args->out.shape[1], (int32_t *)args->count.data,
        args->count.strides[0], lists, args->from, args->to, args->n);
    return LAUNCHED("list convert");
}

extern const variant<list_convert_args> list_convert_any = {"list_convert_any", NULL, NULL, list_convert_run};
