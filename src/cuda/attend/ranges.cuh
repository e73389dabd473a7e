/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ranges.cuh - sequences of a fixed length of whose keys only kv_first ... kv_count - 1 exist. */
#ifndef QUERN_CUDA_ATTEND_RANGES_CUH
#define QUERN_CUDA_ATTEND_RANGES_CUH

#include "common/device.cuh"

/* NULL: 0, and all keys. */
struct key_ranges {
    const int32_t *first, *count;
};

static inline key_ranges key_ranges_of(const attend_args *args)
{
    return {present(args->kv_first) ? (const int32_t *)args->kv_first.data : NULL,
            present(args->kv_count) ? (const int32_t *)args->kv_count.data : NULL};
}

/* Leaves the keys of a sequence that exist. Numbers that are no range are held within the tensor. */
__device__ __forceinline__ void keep_range(const key_ranges &ranges, sequence *s)
{
    if (ranges.first == NULL && ranges.count == NULL) return;
    const int64_t end = ranges.count != NULL ? cu_seqlens_at(ranges.count, s->b, s->nk) : s->nk,
                  first = ranges.first != NULL ? cu_seqlens_at(ranges.first, s->b, end) : 0;
    s->k0 += first;
    s->nk = end - first;
}

#endif
