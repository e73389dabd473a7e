/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* faults.cu - sets bits of the caller's status word where a sequence starts before position 0, where the
 * table names no page of the pool for an entry that a query sees, and where such an entry has a scale byte of
 * FP4 that is no number. Runs only where the caller asks; the kernels skip absent pages themselves. A thread
 * takes a page, or of FP4 an entry; limit: reads of the table and of the scales. */
#include "indexer/params.cuh"

enum { THREADS = 256 };
static const int64_t most_blocks = 4096;

/* Whether one of a row's FP4 scales is the byte of NaN. */
__device__ __forceinline__ bool has_bad_scale(const index_kernel &a, int64_t sequence, uint32_t entry)
{
    const char *scales = row_at(a.keys, sequence, entry).scales;
    bool bad = false;
    for (int i = 0; i < a.width / 32; i++) bad |= (uint8_t)scales[i] == 0xFF;
    return bad;
}

/* Looks at every `step`-th entry of a sequence, `items` of them. */
__global__ void __launch_bounds__(THREADS)
    index_faults(const __grid_constant__ index_kernel a, int64_t items, int64_t step, int32_t *status)
{
    int32_t bits = 0;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < a.batch * items;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t b = i / items, entry = i % items * step,
                      begin = a.positions != NULL ? a.positions[b] : a.position,
                      seen = begin < 0 ? 0 : (begin + a.queries) / a.ratio;
        if (a.sequence != NULL && a.sequence[b] < 0) continue;
        if (begin < 0 || seen > INT32_MAX) bits |= QUERN_STATUS_BAD_POSITION;
        else if (a.keys.table != NULL && seen > a.entries) bits |= QUERN_STATUS_BAD_PAGE;
        if (entry >= seen || entry >= a.entries) continue;
        if (!row_exists(a.keys, index_sequence(a, (int)b), (uint32_t)entry)) bits |= QUERN_STATUS_BAD_PAGE;
        else if (a.format == ENTRY_FP4 && has_bad_scale(a, index_sequence(a, (int)b), (uint32_t)entry))
            bits |= QUERN_STATUS_BAD_SCALE;
    }
    bits = (int32_t)__reduce_or_sync(~0u, (unsigned)bits);
    if (bits != 0 && threadIdx.x % 32 == 0) atomicOr(status, bits);
}

quern_status index_report(const stage_exec *exec, const index_kernel &a)
{
    if (exec->status == NULL || a.batch == 0 || a.queries == 0) return QUERN_OK;
    const int64_t entries = a.entries > 0 ? a.entries : 1,
                  step = a.format == ENTRY_FP4  ? 1
                         : a.keys.table != NULL ? (int64_t)a.keys.slots.d
                                                : entries,
                  items = (entries + step - 1) / step, blocks = blocks_for(a.batch * items, THREADS);
    index_faults<<<(unsigned)(blocks < most_blocks ? blocks : most_blocks), THREADS, 0,
                   (cudaStream_t)exec->stream>>>(a, items, step, exec->status);
    return LAUNCHED("the indexer's look for faults");
}
