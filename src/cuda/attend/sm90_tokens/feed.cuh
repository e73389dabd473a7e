/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the feeding warpgroup of the kernels for lists of few rows (kernel.cuh,
 * sm90_tokens_dq/kernel.cuh): warp 0 merges the lists of 128 rows, a lane for each, and copies K and V; warps
 * 1 and 2 search them for what is not finite; warp 3 plans a turn's piece, its clean lists and its rows, and
 * chooses how the piece is multiplied. */
#ifndef QUERN_CUDA_ATTEND_SM90_TOKENS_FEED_CUH
#define QUERN_CUDA_ATTEND_SM90_TOKENS_FEED_CUH

#include "hopper/nonfinite.cuh"
#include "hopper/ring.cuh"
#include "common/launch.cuh"
#include "hopper/tma.cuh"
#include "hopper/tma_tiles.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/schedule.cuh"

namespace sm90_tokens
{

enum { ROWS = 128, ROWS_OF_WARP = 16, KEYS = 64, GROUPS = 2, SEARCHERS = 2 };

struct maps {
    CUtensorMap q, d_o;
    tma_tiles k, v;
    const int32_t *elsewhere; /* forward: of each piece, whether another kernel computes it; NULL: none */
};

/* What a stage holds: 64 keys from `key` on, of a block that the lists in `lists` chose. */
struct alignas(16) stage_note {
    int32_t key;    /* bit 0: it is its turn's last stage */
    uint32_t lists; /* 0: no keys, of a turn whose lists are empty */
    int32_t nonfinite; /* bit s: searcher s found something */
};

template <bool SHORT> struct list_entry {
    typedef int32_t type;
};
template <> struct list_entry<true> {
    typedef uint16_t type;
};

typedef uint16_t panel_row[64];

/* Of the backward alone. The zeros come first: memcheck takes wg_repeated's products to read a whole tile
 * from there on. */
template <bool BACKWARD, int DV> struct backward_rows {
};
template <int DV> struct backward_rows<true, DV> {
    panel_row zeros[8], d_o[DV / 64][ROWS];
};

/* SHORT_LISTS: those of a piece have few entries, of 16 bits, which leaves room for one stage more. LONG:
 * lists have more than 32. */
template <int D_K, int D_V, bool BACK, bool SHORT_LISTS, bool LONG = false>
struct __align__(1024) shared : backward_rows<BACK, D_V>
{
    static constexpr int DK = D_K, DV = D_V;
    static constexpr bool BACKWARD = BACK, LONG_LISTS = LONG;
    static constexpr int TOGETHER = BACK ? 3 : 2; /* eighths, for share_little() */
    typedef typename list_entry<SHORT_LISTS>::type entry;
    static constexpr int MOST_LISTS = SHORT_LISTS && BACK ? 8 : 32,
                         MOST_ENTRIES = MOST_LISTS * (SHORT_LISTS ? 16 : LONG ? SM90_TOKEN_LIST : 32);
    static constexpr int FEED = BACK ? 40 : 56, COMPUTE = BACK ? 232 : 224; /* registers a thread */
    static_assert(FEED + GROUPS * COMPUTE <= (GROUPS + 1) * 168, "more registers than the launch gave");
    static constexpr int STAGES = (DK + DV > 256 ? 4 : 5) - BACK + SHORT_LISTS;
    typedef ring_place<STAGES> place;

    panel_row q[DK / 64][ROWS], k[STAGES][DK / 64][KEYS], v[STAGES][DV / 64][KEYS];
    ring<1> queries, gradients; /* gradients: dO */
    ring<STAGES> keys;          /* and values */
    stage_barriers<STAGES> searched;
    ring<2> plans;
    stage_note note[STAGES];
    work plan[2];
    int32_t by_warp[2]; /* each list has a warp of its own */
    int32_t count[2][MOST_LISTS];
    entry list[2][MOST_ENTRIES];

    /* One thread. */
    __device__ __forceinline__ void init()
    {
        queries.init(1, 4 * GROUPS);
        gradients.init(1, 4 * GROUPS);
        keys.init(1, 4 * GROUPS + SEARCHERS);
        searched.init(SEARCHERS);
        plans.init(WARP_ARRIVALS, (1 + SEARCHERS + 4 * GROUPS) * WARP_ARRIVALS);
        mbar_init_done();
    }
    __device__ __forceinline__ const work &wait_plan(int turn)
    {
        plans.wait_full(ring_place<2>::of(turn));
        return plan[turn & 1];
    }
    /* Each lane's, for what it read. */
    __device__ __forceinline__ void give_back_plan(int turn)
    {
        plans.give_back(ring_place<2>::of(turn));
    }
    /* A computing warp has done with a stage. */
    __device__ __forceinline__ void give_back_stage(int stage)
    {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) keys.give_back(stage);
    }
};

/* Lists of a turn, rows of a list. */
struct list_shape {
    int32_t count, rows;
};

__device__ __forceinline__ list_shape shape_of(const attend_kernel &a)
{
    const int rows = a.tile * a.hs;
    return {ROWS / rows, rows};
}

/* The lists among the ROWS_OF rows from `row`, a multiple of ROWS_OF, on: a bit each. */
template <int ROWS_OF> __device__ __forceinline__ uint32_t lists_among(const list_shape &lists, int row)
{
    const int count = ROWS_OF / lists.rows;
    return ((1u << count) - 1) << row / ROWS_OF * count;
}

/* Whether a warp's 16 rows are a token's, so that all of them have one list and see the same keys. */
__device__ __forceinline__ bool one_token(const attend_kernel &a)
{
    return a.tile == 1 && a.hs == ROWS_OF_WARP;
}

/* Copies a turn's rows; one lane calls. */
template <typename S>
__device__ __forceinline__ void copy_rows(const attend_kernel &a, const work &w, int queries, const maps &m,
                                          S &sm, int turn)
{
    const auto at = ring_place<1>::of(turn);
    const int bytes = queries * a.hs * 128;
    sm.queries.wait_free(at);
    const uint32_t full = sm.queries.expect(at, S::DK / 64 * bytes);
    for (int p = 0; p < S::DK / 64; p++)
        tma_load(stage_address(sm.q, p), m.q, full, p * 64, w.head0, w.q0 + w.query, w.view);
    if constexpr (S::BACKWARD) {
        sm.gradients.wait_free(at);
        const uint32_t gradients = sm.gradients.expect(at, S::DV / 64 * bytes);
        for (int p = 0; p < S::DV / 64; p++)
            tma_load(stage_address(sm.d_o, p), m.d_o, gradients, p * 64, w.head0, w.q0 + w.query, w.view);
    }
}

/* clean_lists() of lists of up to 64 entries, two a lane. */
template <typename E>
__device__ __forceinline__ void clean_long_lists(const attend_kernel &a, const work &w, int count, E *clean,
                                                 int32_t *counts)
{
    const int lane = threadIdx.x & 31, lists = (w.queries + a.tile - 1) / a.tile;
    const uint32_t before = (1u << lane) - 1;
    const int32_t *from =
        a.list + w.view * a.list_stride[0] + w.unit * a.list_stride[1] + w.list_row * a.list_stride[2] + lane;
#pragma unroll 1
    for (int l = 0; l < count; l++, from += a.list_stride[2]) {
        const int last = (l + 1) * a.tile < w.queries ? (l + 1) * a.tile : w.queries;
        int lo, end, kept = 0, at[2] = {0, 0};
        int32_t x[2];
        row_keys(a, sequence_of(w), w.query + last - 1, &lo, &end);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int32_t entry = lane + h * 32 < a.list_k && l < lists ? from[h * 32] : -1;
            x[h] = entry >= 0 && (int64_t)entry * a.list_block < end ? entry : INT32_MAX;
            if ((__match_any_sync(~0u, x[h]) & before) != 0) x[h] = INT32_MAX;
        }
#pragma unroll 1
        for (int i = 0; i < 32; i++)
            if (__shfl_sync(~0u, x[0], i) == x[1]) x[1] = INT32_MAX;
#pragma unroll 1
        for (int i = 0; i < 32; i++) {
            const int32_t low = __shfl_sync(~0u, x[0], i), high = __shfl_sync(~0u, x[1], i);
#pragma unroll
            for (int h = 0; h < 2; h++) at[h] += (low < x[h]) + (high < x[h]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (x[h] != INT32_MAX) clean[l * a.list_k + at[h]] = (E)x[h];
            kept += __popc(__ballot_sync(~0u, x[h] != INT32_MAX));
        }
        if (lane == 0) counts[l] = kept;
    }
}

/* Copies a piece's lists into `clean`, each ascending and without padding, repeats and blocks that no row of
 * it sees. Lanes hold an entry each, of eight lists at a time, so that their loads wait together. */
template <bool LONG = false, typename E>
__device__ __forceinline__ void clean_lists(const attend_kernel &a, const work &w, int count, E *clean,
                                            int32_t *counts)
{
    enum { AT_ONCE = 8 };
    if constexpr (LONG) {
        clean_long_lists(a, w, count, clean, counts);
        return;
    }
    const int lane = threadIdx.x & 31, lists = (w.queries + a.tile - 1) / a.tile;
    const int32_t *from =
        a.list + w.view * a.list_stride[0] + w.unit * a.list_stride[1] + w.list_row * a.list_stride[2] + lane;
    for (int l0 = 0; l0 < count; l0 += AT_ONCE) {
        int32_t entry[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            entry[j] = lane < a.list_k && l0 + j < lists ? from[(l0 + j) * a.list_stride[2]] : -1;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int l = l0 + j, last = (l + 1) * a.tile < w.queries ? (l + 1) * a.tile : w.queries;
            if (l >= count) break;
            int lo, end, at = 0;
            row_keys(a, sequence_of(w), w.query + last - 1, &lo, &end);
            int32_t x = entry[j] >= 0 && (int64_t)entry[j] * a.list_block < end ? entry[j] : INT32_MAX;
            const uint32_t same = __match_any_sync(~0u, x);
            if ((same & ((1u << lane) - 1)) != 0) x = INT32_MAX;
#pragma unroll 4
            for (int i = 0; i < a.list_k; i++) at += __shfl_sync(~0u, x, i) < x;
            if (x != INT32_MAX) clean[l * a.list_k + at] = (E)x;
            const int kept = __popc(__ballot_sync(~0u, x != INT32_MAX));
            if (lane == 0) counts[l] = kept;
        }
    }
}

/* Whether lists of at most 16 rows, in the backward of 16 heads, have so little in common that warps multiply
 * what their own lists chose faster than warpgroups do: as measured, once their union has more than a quarter
 * of their entries, in the backward three eighths, and block by block (sm90_by_block/kernel.cuh) an eighth.
 * The ways round differently, and no bit of a row may depend on later tokens: so the lists of as many tokens
 * before the piece say it. Their clean ones are left in `clean`. All lanes of the warp call. */
template <typename S>
__device__ __forceinline__ bool share_little(const attend_kernel &a, const work &w, typename S::entry *clean,
                                             int32_t *counts)
{
    const int lane = threadIdx.x & 31;
    const list_shape shape = shape_of(a);
    work past = w;
    past.queries = shape.count * a.tile;
    past.query -= past.queries;
    past.list_row -= shape.count;
    if (past.query < 0 || (S::BACKWARD ? !one_token(a) : shape.rows > ROWS_OF_WARP)) return false;
    clean_lists<S::LONG_LISTS>(a, past, shape.count, clean, counts);
    __syncwarp();
    const typename S::entry *list = clean + lane * a.list_k;
    const int count = lane < shape.count ? counts[lane] : 0,
              most = (int)__reduce_add_sync(~0u, (unsigned)count) * S::TOGETHER / 8;
    int taken = 0;
    for (int blocks = 0; blocks <= most; blocks++) {
        const uint32_t mine = taken < count ? (uint32_t)list[taken] : ~0u,
                       next = __reduce_min_sync(~0u, mine);
        if (next == ~0u) return false;
        taken += mine == next;
    }
    return true;
}

/* Warp 3 of the feeder: plans the turns, two ahead at most, cleans their lists and copies their rows. The
 * last plan has -1 queries. */
template <typename S>
__device__ __forceinline__ void plan_turns(const attend_kernel &a, const work_plan &plan, const maps &m,
                                           S &sm)
{
    const int lane = threadIdx.x & 31;
    const list_shape lists = shape_of(a);
    work w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int turn = 0; w.queries >= 0;) {
        if (index >= plan.total) w.queries = -1;
        else if (!S::BACKWARD && m.elsewhere != NULL && m.elsewhere[index] != 0) w.queries = 0;
        else find_work<false, true>(a, plan, index, &w);
        if (index < plan.total) index = next_piece(plan);
        if (w.queries == 0) continue; /* there may be others */
        const auto at = ring_place<2>::of(turn);
        sm.plans.wait_free(at);
        if (w.queries > 0) {
            typename S::entry *const clean = sm.list[at.stage];
            int32_t *const counts = sm.count[at.stage];
            const bool little = (S::BACKWARD || m.elsewhere == NULL) && share_little<S>(a, w, clean, counts);
            __syncwarp();
            clean_lists<S::LONG_LISTS>(a, w, lists.count, clean, counts);
            if (lane == 0) sm.by_warp[at.stage] = little;
        }
        if (lane == 0) sm.plan[at.stage] = w;
        sm.plans.give(at); /* each lane's, for what it wrote */
        if (lane == 0 && w.queries > 0) copy_rows(a, w, plan.queries, m, sm, turn);
        turn++;
    }
}

/* A stage's note as a warp knows it. */
struct stage_keys {
    int key;
    uint32_t lists;
    bool last;
};

/* Lane 0 alone reads, and its arrival tells the feeder. */
__device__ __forceinline__ stage_keys read_note(const stage_note &note)
{
    int key = 0;
    uint32_t lists = 0;
    if ((threadIdx.x & 31) == 0) {
        key = note.key;
        lists = note.lists;
    }
    key = __shfl_sync(~0u, key, 0);
    return {key & ~1, __shfl_sync(~0u, lists, 0), (key & 1) != 0};
}

/* Whether a searcher found something that is not finite. */
__device__ __forceinline__ bool read_nonfinite(const stage_note &note)
{
    return __shfl_sync(~0u, (threadIdx.x & 31) == 0 ? note.nonfinite : 0, 0) != 0;
}

/* Warp 0 of the feeder: merges the lists of each turn, a lane for each, and copies what they chose. */
template <typename S> __device__ __forceinline__ void feed(const attend_kernel &a, const maps &m, S &sm)
{
    const int lane = threadIdx.x & 31;
    int step = 0;
    for (int turn = 0;; turn++) {
        const work &w = sm.wait_plan(turn);
        if (w.queries < 0) return;
        const int count = lane < shape_of(a).count ? sm.count[turn & 1][lane] : 0;
        const typename S::entry *list = sm.list[turn & 1] + lane * a.list_k;
        int taken = 0;
        uint32_t mine = count > 0 ? (uint32_t)list[0] : ~0u, next = __reduce_min_sync(~0u, mine);
        for (bool more = true; more;) {
            const uint32_t block = next, chose = __ballot_sync(~0u, mine == block && mine != ~0u);
            if (mine == block && mine != ~0u) mine = ++taken < count ? (uint32_t)list[taken] : ~0u;
            next = __reduce_min_sync(~0u, mine);
            more = next != ~0u;
            for (int r = 0; r < a.list_block; r += KEYS, step++) {
                const auto at = S::place::of(step);
                const int key = (int)block * a.list_block + r;
                const bool last = !more && (r + KEYS >= a.list_block || chose == 0);
                if (lane == 0) {
                    sm.keys.wait_free(at);
                    sm.note[at.stage] = {key | last, chose, 0};
                    if (chose == 0) {
                        sm.keys.give(at);
                    } else {
                        const uint32_t full = sm.keys.expect(at, sizeof sm.k[0] + sizeof sm.v[0]);
                        tma_load_tile<S::DK / 64, KEYS>(stage_address(sm.k, at.stage), m.k, full, w.kvh,
                                                        w.k0 + key, w.view);
                        tma_load_tile<S::DV / 64, KEYS>(stage_address(sm.v, at.stage), m.v, full, w.kvh,
                                                        w.k0 + key, w.view);
                    }
                }
                __syncwarp();
                if (chose == 0) {
                    step++;
                    break;
                }
            }
        }
        sm.give_back_plan(turn);
    }
}

/* Warps 1 and 2 of the feeder: what is not finite in V becomes 0; in the backward, what is not in K is only
 * noted. A warp whose rows are one token's needs neither. */
template <typename T, typename S>
__device__ __forceinline__ void search(const attend_kernel &a, S &sm, int searcher)
{
    constexpr int BYTES = S::BACKWARD ? sizeof sm.k[0] : sizeof sm.v[0];
    const int lane = threadIdx.x & 31;
    int step = 0;
    for (int turn = 0;; turn++) {
        const work &w = sm.wait_plan(turn);
        if (w.queries < 0) return;
        const bool wanted = sm.by_warp[turn & 1] == 0 || !one_token(a);
        for (bool last = false; !last; step++) {
            const auto at = S::place::of(step);
            sm.keys.wait_full(at);
            const stage_keys now = read_note(sm.note[at.stage]);
            last = now.last;
            if (now.lists != 0 && wanted) {
                char *tile = S::BACKWARD ? (char *)sm.k[at.stage] : (char *)sm.v[at.stage];
                if (find_nonfinite<T, BYTES, SEARCHERS, !S::BACKWARD>(tile, searcher) && lane == 0)
                    atomicOr(&sm.note[at.stage].nonfinite, 1 << searcher);
            }
            __syncwarp();
            if (lane == 0) {
                if (now.lists != 0 && wanted) sm.searched.arrive(at);
                sm.keys.give_back(at);
            }
        }
        sm.give_back_plan(turn);
    }
}

/* Descriptor of a tile all of whose groups of eight rows are the 1024 bytes at `address`. */
__device__ __forceinline__ uint64_t wg_repeated(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 62;
}

/* The registers of an operand are in use until its product has ended, which the compiler does not see across
 * the end of a loop. */
template <int N> __device__ __forceinline__ void hold(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}

/* acc += X Y of a warp's 16 rows, X with a column for each of a stage's keys. PART: keys from `left` on,
 * which none of the rows sees, count as 0 in Y. */
template <typename T, int TILES, bool PART>
__device__ __forceinline__ void add_product(float (&acc)[TILES][4], const float (&x)[KEYS / 8][4], uint32_t y,
                                            int left)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        uint32_t fx[4], keep[2];
#pragma unroll
        for (int j = 0; j < 4; j++)
            fx[j] = pack2<T>(x[k / 8 + (j >> 1)][(j & 1) * 2], x[k / 8 + (j >> 1)][(j & 1) * 2 + 1]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int more = left - (k + h * 8 + (lane & 3) * 2);
            keep[h] = !PART || more >= 2 ? ~0u : more == 1 ? 0xffffu : 0u;
        }
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            uint32_t fy[4];
            load_b_trans<KEYS>(fy, y, k, n * 8, lane);
            mma16816<T>(acc[n], fx, fy[0] & keep[0], fy[1] & keep[1]);
            mma16816<T>(acc[n + 1], fx, fy[2] & keep[0], fy[3] & keep[1]);
        }
    }
}

/* The key after the last one that the rows of a warp see which are one token's. All lanes call; by the
 * shuffle ptxas knows that they get the same. */
__device__ __forceinline__ int end_of_token(const attend_kernel &a, const work &w, int warp)
{
    int lo, end = 0;
    if (warp < w.queries) row_keys(a, sequence_of(w), w.query + warp, &lo, &end);
    return __shfl_sync(~0u, end, 0);
}

/* The pieces of a call, and the tensors as the copy engine knows them. */
template <typename S>
static quern_status plan_launch(const attend_args *args, const attend_kernel &a, const sm90_device &device,
                                void *workspace, cudaStream_t stream, work_plan *plan, maps *m)
{
    const int queries = ROWS / a.hs;
    const int64_t pieces = piece_bound(args->seqs, queries, 1), total = pieces * a.units;
    *plan = {(int32_t)pieces, (int32_t)total, queries, 1, KEYS, NULL};
    if (total == 0) return QUERN_OK;
    quern_status status = tma_describe(&m->q, args->q, a.hs, queries);
    if (status == QUERN_OK) status = tma_describe_tiles(&m->k, args->k, KEYS, S::DK / 64);
    if (status == QUERN_OK) status = tma_describe_tiles(&m->v, args->v, KEYS, S::DV / 64);
    if (status == QUERN_OK && S::BACKWARD) status = tma_describe(&m->d_o, args->d_o, a.hs, queries);
    return status != QUERN_OK ? status : sm90_count_from_zero(total, device, workspace, stream, &plan->taken);
}

/* What each warp of a block does; `compute(sm, warp)`: a computing warp's part. */
template <typename T, typename S, typename F>
__device__ __forceinline__ void share_out(const attend_kernel &a, const work_plan &plan, const maps &m,
                                          const F &compute)
{
    extern __shared__ __align__(1024) char smem[];
    S &sm = *(S *)smem;
    static_assert(sizeof sm <= 227 * 1024, "more than a block can have");
    if (threadIdx.x == 0) sm.init();
    if constexpr (S::BACKWARD) {
        if (threadIdx.x < 256) ((uint32_t *)sm.zeros)[threadIdx.x] = 0;
        async_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<S::FEED>();
        if (warp == 0) feed(a, m, sm);
        else if (warp <= SEARCHERS) search<T>(a, sm, warp - 1);
        else plan_turns(a, plan, m, sm);
    } else {
        registers_up<S::COMPUTE>();
        compute(sm, warp - 4);
    }
}

typedef void tokens_kernel(attend_kernel a, work_plan plan, maps m);

/* Whether the lists of a piece have room as SHORT_LISTS. */
template <typename S> static bool lists_are_short(const attend_args *args, const attend_kernel &a)
{
    const int64_t count = ROWS / (a.tile * a.hs);
    return count <= S::MOST_LISTS && a.list_k <= 32 && count * a.list_k <= S::MOST_ENTRIES &&
           args->k.shape[1] / a.list_block < 65535;
}

template <typename S>
static quern_status launch(const attend_args *args, const attend_kernel &a, const sm90_device &device,
                           void *workspace, cudaStream_t stream, tokens_kernel *kernel, const char *name,
                           const int32_t *elsewhere = NULL)
{
    work_plan plan;
    maps m;
    m.elsewhere = elsewhere;
    const quern_status status = plan_launch<S>(args, a, device, workspace, stream, &plan, &m);
    if (status != QUERN_OK || plan.total == 0) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    return launch_shared({stream, NULL}, kernel, dim3(blocks), 128 * (GROUPS + 1), sizeof(S), name, a, plan,
                         m);
}

} // namespace sm90_tokens

#endif
