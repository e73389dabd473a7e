/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* ranks.cu - the inverted index of a slice: a bit for each query that chose an entry, set by atomics whose
 * order changes nothing, then counts of the bits before each word. Where an entry's partials begin depends on
 * the order of blocks; no value does. */
#include "attend_mqa/backward/backward.cuh"

enum { CHOOSERS = 128, WARPS = 8 };

__global__ void __launch_bounds__(CHOOSERS) mqa_choose(const __grid_constant__ mqa_backward b)
{
    const int query = blockIdx.x;
    const mqa_query q = b.of.queries[query];
    for (int key = threadIdx.x; key < q.entries; key += CHOOSERS) {
        const int64_t entry = mqa_entry_of(b, q, mqa_find_key(b.of, q, query, false, key));
        atomicOr(&b.choices[entry * b.words + query / 32].chose, 1u << query % 32);
    }
}

__global__ void __launch_bounds__(WARPS * 32)
    mqa_rank(const __grid_constant__ mqa_backward b, const int64_t entries)
{
    const int64_t entry = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (entry >= entries) return;
    const int before = rank_choices(b.choices + entry * b.words, b.words);
    if (threadIdx.x % 32 == 0) b.first[entry] = before > 0 ? atomicAdd(b.taken, before) : 0;
}

quern_status mqa_rank_choices(cudaStream_t stream, const mqa_backward &b, int64_t entries)
{
    if (entries == 0 || b.of.rows == 0) return QUERN_OK;
    const size_t bytes = (size_t)(entries * b.words) * sizeof(choice);
    cudaError_t code = cudaMemsetAsync(b.choices, 0, bytes, stream);
    if (code == cudaSuccess) code = cudaMemsetAsync(b.taken, 0, sizeof *b.taken, stream);
    if (code != cudaSuccess) return cuda_report(code, "clearing choices");
    mqa_choose<<<b.of.rows, CHOOSERS, 0, stream>>>(b);
    const quern_status status = LAUNCHED("choices of queries");
    if (status != QUERN_OK) return status;
    mqa_rank<<<blocks_for(entries, WARPS), WARPS * 32, 0, stream>>>(b, entries);
    return LAUNCHED("ranks of choices");
}
