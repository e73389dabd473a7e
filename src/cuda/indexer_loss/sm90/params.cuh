/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * params.cuh - the indexer's loss on Hopper. A call goes through the workspace in slices of a sequence's
 * queries:
 *
 *   pairs   a warpgroup a query, its 64 heads the rows of each product, 128 entries a tile. Three walks over
 *           the entries: the normalisers of attention's heads; the teacher's weights and the indexer's
 *           scores, both summed over heads, and which products z are positive; with the gradient g of the
 *           scores, which is known then,
 *               u[h] = sum over s of g[s] [z > 0] keys_index[s],
 *               d_q_index[h] = c w[h] u[h],  d_w[h] = c q_index[h] . u[h],  c: scale_index
 *   keys    of dense calls: 128 entries a block walk the slice's queries,
 *               d_keys_index[s] += c g[s] sum over h of [z > 0] (w[h] q_index[h])
 *           With lists `pairs` makes it, a row of partials a listed entry, where the query's list has it; an
 *           inverted index says where an entry's rows are, and `sum_rows` adds them in the order of the
 *           queries.
 *
 * Between the walks 18 bytes a pair lie in the workspace: two sums over heads, g in bf16, and a bit a head.
 * A thread's bits stand as its accumulators do: bit 4 j + c of 64 is element c of tile j of eight entries.
 */
#ifndef QUERN_CUDA_INDEXER_LOSS_SM90_PARAMS_CUH
#define QUERN_CUDA_INDEXER_LOSS_SM90_PARAMS_CUH

#include "indexer_loss/params.cuh"

namespace sm90_loss
{

enum { HEADS = 64, TILE = 128, WIDTH = 128, DIM_MOST = 512, LOSS_HEAD_BYTES = HEADS * WIDTH * 2 };
enum { KEYS_PAIRS = 2 }; /* of warpgroups of a block of `keys`, each with sums of its own */
enum { SUM_RANGE = 64, SUM_QUERIES = 1024 }; /* entries of a block of `sum_rows`; its slices' queries */

/* A slice of sequence b: `count` queries from `first` on. Arrays are of its queries. */
struct slice {
    loss_params of;
    int64_t b, first, count, seen; /* seen: queries of the call that see an entry, of dense calls */
    int64_t tiles;                 /* of a query, at most */
    float *teacher, *student;      /* [tiles][TILE]; then g; with lists then the partial's row */
    bf16 *gradient;                /* [tiles][TILE] */
    uint64_t *positive;            /* [tiles][128 threads] */
    char *heads;                   /* w q_index, [LOSS_HEAD_BYTES] as tiles stand in shared memory; dense */
    int32_t *starts;               /* [count][ranges + 1]: of a list, the first place of a range; of lists */
    int64_t ranges;                /* of SUM_RANGE entries */
    bf16 *partials;             /* [count][listed][WIDTH] */
    float *sums;                /* [shares][entries][width], or NULL: no gradient of keys_index is wanted */
    bool adds;                  /* to what an earlier slice left in the sums */
    bool last;                  /* slice of the sequence */
    bool gives_loss;            /* last of all: the sums' kernel adds the losses, too */
    bool d_q_wide, d_keys_wide; /* rows of q_index's and keys_index's gradients allow stores of 16 bytes */
};

/* How many entries a query of the slice has, and which. */
__device__ __forceinline__ int entries_of(const slice &s, int64_t i)
{
    if (i >= s.count) return 0;
    const int64_t query = s.first + i;
    return (int)(s.of.listed < 0 ? seen_by(s.of, query) : s.of.count[s.b * s.of.queries + query]);
}
__device__ __forceinline__ const int32_t *chosen_of(const slice &s, int64_t i)
{
    return s.of.listed < 0 ? NULL : s.of.chosen + (s.b * s.of.queries + s.first + i) * s.of.listed;
}

/* Notes where the ranges of a query's list begin, from 128 threads; entry_at(i) is the list's number i. */
template <typename Entry>
__device__ __forceinline__ void give_starts(const slice &s, int64_t i, int count, const Entry &entry_at)
{
    int32_t *const starts = s.starts + i * (s.ranges + 1);
    for (int at = threadIdx.x % 128; at <= count; at += 128) {
        const int first = at > 0 ? entry_at(at - 1) / SUM_RANGE + 1 : 0,
                  last = at < count ? entry_at(at) / SUM_RANGE : (int)s.ranges;
        for (int range = first; range <= last; range++) starts[range] = at;
    }
}

typedef quern_status of_slice(const slice &s, cudaStream_t stream);
of_slice pairs_of_lists, pairs_of_all, keys_of_all, sum_rows;

} // namespace sm90_loss

#endif
