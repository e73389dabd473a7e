/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shared.cuh - the indexer's scores and choice on Hopper, for 64 heads of 128 channels.
 *
 * A persistent block walks items: the keys, or a share of them, of four queries or of one. The queries stay
 * in shared memory, keys stream past them by bulk copies, rows of bytes as they are.
 *
 *   feed     one warp copies 128 keys a stage, three bring the queries and weights
 *   score    keys are the products' rows, in registers, where codes are widened; heads are their columns,
 *            so a score is a sum along a row. A warpgroup has 64 keys of a stage. Four queries: two
 *            warpgroups, two accumulators of two queries; while ReLU, weight and sum of one run, the products
 *            of the other do. One query: two warpgroups a stage and two for the next
 *   choose   four queries: a warp each appends the scores that beat its k-th best (topk.cuh). One query:
 *            its scores go to memory, where pick.cu finds the best
 *
 * Codes of FP8 become f16 in one instruction a pair. So do the queries: a head times the power of two that
 * brings its largest channel to 2^14 and above, its weight over that. A channel below 2^-31 of the largest
 * loses bits, less than 2^-39 of the largest; all others are exact. Where queries are rounded to FP8, its
 * codes are multiplied by the keys' codes as they are.
 *
 * The order of channels within the products is that in which a thread finds its codes (feed.cuh).
 *
 * Where the items are few, keys are cut into shares by what the last query of a tile sees; of four queries a
 * share's best go to memory and merge.cu chooses among them. Neither a score's bits nor the choice depend on
 * the cut.
 *
 * Limit: 2 H C flops a pair over the tensor cores' rate, 2048 clocks for a stage and four queries, of which
 * ReLU and weight take a fourth of the issue slots and widening as much; one query: reading the keys.
 */
#ifndef QUERN_CUDA_INDEXER_SM90_SHARED_CUH
#define QUERN_CUDA_INDEXER_SM90_SHARED_CUH

#include "indexer/params.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

namespace sm90_indexer
{

enum key_kind { ROWS, FP8, FP4, CODES /* of FP8, multiplied as they are */ };

enum {
    MOST_QUERIES = 4,
    HEADS = 64,
    WIDTH = 128,
    STEPS = WIDTH / 16, /* of products */
    PANELS = WIDTH / 64,
    KEYS = 128, /* of a stage */
    PANEL_BYTES = KEYS * 128
};

/* What is multiplied, of queries of T. */
template <typename T, key_kind KIND> struct factor_of {
    typedef T type;
};
template <typename T> struct factor_of<T, FP8> {
    typedef __half type;
};
template <typename T, key_kind KIND> using factor = typename factor_of<T, KIND>::type;

/* Warpgroups that score, threads, and the registers of those that score and of the others. */
template <int Q> struct crew {
    enum { OTHERS = 2, SCORERS = 2, THREADS = 512, FEW = 64, SCORE = 192 };
};
template <> struct crew<1> {
    enum { OTHERS = 1, SCORERS = 4, THREADS = 640, FEW = 64, SCORE = 104 };
};

/* Bytes of a row's codes, and of its scales. */
__host__ __device__ constexpr int codes_of(key_kind kind)
{
    return kind == FP8 || kind == CODES ? WIDTH : WIDTH / 2;
}
enum { SCALE_BYTES = 4 };
__host__ __device__ constexpr int stage_bytes(key_kind kind)
{
    return KEYS * (kind == ROWS ? WIDTH * 2 : codes_of(kind) + SCALE_BYTES);
}

/* How the keys stand, and how they are cut. */
struct key_feed {
    int32_t run_shift; /* a copy takes 2^run_shift rows, at most KEYS: a page, or a part of it */
    bool planar;          /* bytes: a page's codes stand before its scales */
    int32_t shares;      /* of a tile's keys, at most; 1: lists go to the results */
    uint32_t *rank;      /* of four queries: [B, T, shares, k], 0: none */
    int32_t *index;
    float *raw; /* of one query: all scores, [B, raw_row] */
    int64_t raw_row;
    uint32_t *best; /* and the best rank of each RANKED of them, [B, best_row] */
};
enum { RANKED = 16 };
static inline __host__ __device__ int64_t best_row(const key_feed &f)
{
    return (f.raw_row + RANKED - 1) / RANKED;
}

enum { SHARE_LEAST = 1024 };
__device__ __forceinline__ int share_keys(int seen, int shares)
{
    if (shares == 1) return seen;
    const int keys = ((seen + shares - 1) / shares + KEYS - 1) / KEYS * KEYS;
    return keys < SHARE_LEAST ? SHARE_LEAST : keys;
}

/* Stages of keys; of one query an even number, so that the same warpgroups use a stage in every turn. */
template <key_kind KIND, int Q> constexpr int stages_of(bool long_lists)
{
    return Q == 1 ? (KIND == ROWS ? 4 : KIND == FP4 ? 10 : 8) : KIND == ROWS && long_lists ? 2 : 3;
}
/* Of four queries the room of a list, and the longest list: between two cuts there are at least 128 appended
 * scores, a cut may leave SPARE, and a stage adds up to 128. */
constexpr int room_of(int stages, key_kind kind)
{
    return kind == ROWS && stages == 3 ? 1600 : 2624;
}
enum { SPARE = 128 };
constexpr int most_of(int room)
{
    return room - 384;
}
constexpr int slots_of(key_kind kind) /* of scores; while a list is cut they wait */
{
    return kind == ROWS ? 7 : 12;
}

template <typename T, key_kind KIND, int Q, int STAGES> struct fed {
    static constexpr int ROUNDS = Q == 1 ? 2 : 1, /* of queries */
        TILE = Q == 1 ? HEADS : 2 * HEADS, TILES = Q == 1 ? 1 : Q / 2;
    alignas(1024) char k[STAGES][stage_bytes(KIND)];
    alignas(1024) T q[ROUNDS][TILES][KIND == CODES ? 1 : PANELS][TILE][64];
    float w[ROUNDS][Q][HEADS];
    uint32_t here[STAGES]; /* which runs of a stage there are */
    ring<STAGES> keys;
    ring<ROUNDS> queries;
};
/* Of four queries, their scores and lists, too. */
template <typename T, key_kind KIND, int Q, int STAGES> struct shared : fed<T, KIND, Q, STAGES> {
    static constexpr int ROOM = room_of(STAGES, KIND), SLOTS = slots_of(KIND);
    float score[SLOTS][Q][KEYS];
    uint32_t rank[Q][ROOM];
    int32_t index[Q][ROOM];
    ring<SLOTS> scores;
};
template <typename T, key_kind KIND, int STAGES> struct shared<T, KIND, 1, STAGES> : fed<T, KIND, 1, STAGES> {
};
enum {
    Q_FILLERS = 96,
    CHOOSERS = 128,
    KEY_USERS = KEYS / 16,   /* warps that score a stage */
    SCORE_GIVERS = KEYS / 2, /* threads that have two scores of each query: one of four */
};

/* A tile of queries and a share of its keys, from `key` on; stages 0: there are none. The last queries, which
 * see the most, come first. */
struct item_of {
    int b, query, key, stages, share;
};
template <int Q> static inline __host__ __device__ int tiles_of(const index_kernel &a)
{
    return (a.queries + Q - 1) / Q;
}
template <int Q>
__device__ __forceinline__ item_of item_at(const index_kernel &a, const key_feed &f, int item)
{
    const int groups = tiles_of<Q>(a), all = groups * a.batch, share = f.shares == 1 ? 0 : item / all,
              rest = item - share * all, group = rest / a.batch;
    item_of x = {rest - group * a.batch, (groups - 1 - group) * Q, 0, 0, share};
    const int seen = index_seen(a, x.b, x.query + Q < a.queries ? x.query + Q - 1 : a.queries - 1),
              keys = share_keys(seen, f.shares);
    x.key = share * keys;
    if (x.key < seen) x.stages = ((seen - x.key < keys ? seen - x.key : keys) + KEYS - 1) / KEYS;
    return x;
}

/* A query's list of a share. */
__device__ __forceinline__ int64_t part_at(const index_kernel &a, const key_feed &f, int b, int query,
                                           int share)
{
    return (((int64_t)b * a.queries + query) * f.shares + share) * a.k;
}

typedef quern_status instance(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                              const CUtensorMap &map, bool one);
instance indexer_bf16, indexer_f16, indexer_fp8, indexer_fp4, indexer_codes;
quern_status merge_shares(const stage_exec *exec, const index_kernel &a, const key_feed &f);
quern_status pick_best(const stage_exec *exec, const index_kernel &a, const key_feed &f);

} // namespace sm90_indexer

#endif
