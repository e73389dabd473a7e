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
 *           With lists `pairs` makes it, a row of partials a listed entry, where the query's list has it,
 *           and notes what the query chose of each range of entries, which says where an entry's rows are;
 *           `sum_rows` adds them in the order of the queries.
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
enum { LIST_MOST = 512 }; /* entries of a list of `lists` */
enum { KEYS_PAIRS = 2 }; /* of warpgroups of a block of `keys`, each with sums of its own */
enum { SUM_RANGE = 64, SUM_QUERIES = 1024 }; /* entries of a block of `sum_rows`; its slices' queries */
enum { CHOICES_AT_ONCE = 256 }; /* ranges of a query in shared memory */

/* A slice of sequence b: `count` queries from `first` on. Arrays are of its queries. */
struct slice {
    loss_params of;
    int64_t b, first, count, seen; /* seen: queries of the call that see an entry, of dense calls */
    int64_t tiles;                 /* of a query, at most */
    float *teacher, *student;      /* [tiles][TILE]; then g; with lists then the partial's row */
    bf16 *gradient;                /* [tiles][TILE] */
    uint64_t *positive;            /* [tiles][128 threads] */
    char *heads;                   /* w q_index, [LOSS_HEAD_BYTES] as tiles stand in shared memory; dense */
    uint4 *choices;                /* [ranges][count]: a query's entries; the first's place; of lists */
    int64_t ranges;                /* of SUM_RANGE entries */
    bf16 *partials;             /* [count][listed][WIDTH] */
    float *sums;                /* [shares][entries][width], or NULL: no gradient of keys_index is wanted */
    bool adds;                  /* to what an earlier slice left in the sums */
    bool last;                  /* slice of the sequence */
    bool gives_loss;            /* last of all: the sums' kernel adds the losses, too */
    bool d_q_wide, d_keys_wide; /* rows of q_index's and keys_index's gradients allow stores of 16 bytes */
};

/* Whether the call's lists are short enough for a block to keep a query's scores: lists.cuh. */
static inline bool short_lists(const loss_params &p)
{
    return p.listed >= 0 && p.listed <= LIST_MOST && p.dim <= WIDTH;
}

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

/* Ranges of a query's list while they are made, in shared memory; no entries between queries. */
struct choices_shared {
    uint32_t entries[CHOICES_AT_ONCE][2];
    int32_t place[CHOICES_AT_ONCE];
};

__device__ __forceinline__ void clear_choices(choices_shared &m)
{
    for (int own = threadIdx.x % 128; own < CHOICES_AT_ONCE; own += 128)
        m.entries[own][0] = m.entries[own][1] = 0;
}

/* Writes a query's choices, from 128 threads, which wait for each other with sync(), as they do between two
 * queries; entry_at(i) is its list's number i. */
template <typename Entry, typename Sync>
__device__ __forceinline__ void give_choices(const slice &s, choices_shared &m, int64_t i, int count,
                                             const Entry &entry_at, const Sync &sync)
{
    const int thread = threadIdx.x % 128;
    for (int first = 0; first < s.ranges; first += CHOICES_AT_ONCE) {
        if (first > 0) sync();
        for (int at = thread; at < count; at += 128) {
            const int entry = entry_at(at), range = entry / SUM_RANGE - first;
            if (range < 0 || range >= CHOICES_AT_ONCE) continue;
            atomicOr(&m.entries[range][entry % SUM_RANGE / 32], 1u << entry % 32);
            if (at == 0 || entry_at(at - 1) / SUM_RANGE - first != range) m.place[range] = at;
        }
        sync();
        for (int own = thread; own < CHOICES_AT_ONCE && first + own < s.ranges; own += 128)
            s.choices[(first + own) * s.count + i] =
                make_uint4(m.entries[own][0], m.entries[own][1], (uint32_t)m.place[own], 0);
        clear_choices(m); /* its own */
    }
}

typedef quern_status of_slice(const slice &s, cudaStream_t stream);
of_slice pairs_of_lists, pairs_of_all, keys_of_all, sum_rows;

} // namespace sm90_loss

#endif
