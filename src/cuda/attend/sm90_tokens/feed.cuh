/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* feed.cuh - the feeding warpgroup of the kernels for lists of few rows (kernel.cuh,
 * sm90_tokens_dq/kernel.cuh): warp 0 merges the lists of 128 rows, a lane for each, and copies K and V; warps
 * 1 and 2 search them for what is not finite; warp 3 plans a turn's piece, its clean lists and its rows, and
 * chooses how the piece is multiplied. */
#ifndef QUERN_CUDA_ATTEND_SM90_TOKENS_FEED_CUH
#define QUERN_CUDA_ATTEND_SM90_TOKENS_FEED_CUH

#include "hopper/barrier.cuh"
#include "common/launch.cuh"
#include "hopper/tma.cuh"
#include "hopper/tma_tiles.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90/work.cuh"

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
    int32_t odd;    /* bit s: searcher s found something that is not finite */
};

template <bool SHORT> struct list_entry {
    typedef int32_t type;
};
template <> struct list_entry<true> {
    typedef uint16_t type;
};

/* Offsets into shared memory. SHORT_LISTS: those of a piece have few entries, of 16 bits, which leaves room
 * for one stage more. */
template <int D_K, int D_V, bool BACK, bool SHORT_LISTS> struct layout {
    static constexpr int DK = D_K, DV = D_V;
    static constexpr bool BACKWARD = BACK;
    static constexpr int TOGETHER = BACK ? 3 : 2; /* eighths, for lie_apart() */
    typedef typename list_entry<SHORT_LISTS>::type entry;
    static constexpr int MOST_LISTS = SHORT_LISTS && BACK ? 8 : 32,
                         MOST_ENTRIES = MOST_LISTS * (SHORT_LISTS ? 16 : SM90_TOKEN_LIST);
    static constexpr int FEED = BACK ? 40 : 56, COMPUTE = BACK ? 232 : 224; /* registers a thread */
    static_assert(FEED + GROUPS * COMPUTE <= (GROUPS + 1) * 168, "more registers than the launch gave");
    static constexpr int STAGES = (DK + DV > 256 ? 4 : 5) - BACK + SHORT_LISTS;
    /* ZEROS come first: memcheck takes wg_repeated's products to read a whole tile from there on. */
    static constexpr int ZEROS = 0, Q = ZEROS + (BACK ? 1024 : 0), DO = Q + ROWS * DK * 2,
                         K = DO + (BACK ? ROWS * DV * 2 : 0), K_STAGE = KEYS * DK * 2,
                         V = K + STAGES * K_STAGE, V_STAGE = KEYS * DV * 2, BARS = V + STAGES * V_STAGE;
    static constexpr int Q_FULL = BARS, Q_FREE = Q_FULL + 8, DO_FULL = Q_FREE + 8, DO_FREE = DO_FULL + 8,
                         FULL = DO_FREE + 8, FREE = FULL + 8 * STAGES, CLEAN = FREE + 8 * STAGES,
                         TURN_FULL = CLEAN + 8 * STAGES, TURN_FREE = TURN_FULL + 16;
    static constexpr int NOTE = (TURN_FREE + 16 + 15) & ~15;             /* [STAGES] */
    static constexpr int TURN = NOTE + STAGES * (int)sizeof(stage_note); /* [2] plans */
    static constexpr int APART =
        TURN + 2 * (int)sizeof(work);                       /* [2]: whether each list has a warp of its own */
    static constexpr int COUNT = APART + 2 * 4;             /* [2][MOST_LISTS] entries of lists */
    static constexpr int LIST = COUNT + 2 * MOST_LISTS * 4; /* [2][MOST_ENTRIES] */
    static constexpr int BYTES = LIST + 2 * MOST_ENTRIES * (int)sizeof(entry);
    static_assert(BYTES <= 227 * 1024, "more than a block can have");
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
template <typename AT>
__device__ __forceinline__ void copy_rows(const attend_kernel &a, const work &w, int queries, const maps &m,
                                          uint32_t base, int parity)
{
    const int bytes = queries * a.hs * 128;
    mbar_wait(base + AT::Q_FREE, parity ^ 1);
    mbar_expect(base + AT::Q_FULL, AT::DK / 64 * bytes);
    for (int p = 0; p < AT::DK / 64; p++)
        tma_load(base + AT::Q + p * ROWS * 128, m.q, base + AT::Q_FULL, p * 64, w.head0, w.q0 + w.query,
                 w.view);
    if (!AT::BACKWARD) return;
    mbar_wait(base + AT::DO_FREE, parity ^ 1);
    mbar_expect(base + AT::DO_FULL, AT::DV / 64 * bytes);
    for (int p = 0; p < AT::DV / 64; p++)
        tma_load(base + AT::DO + p * ROWS * 128, m.d_o, base + AT::DO_FULL, p * 64, w.head0, w.q0 + w.query,
                 w.view);
}

/* Copies a piece's lists into `clean`, each ascending and without padding, repeats and blocks that no row of
 * it sees. Lanes hold an entry each, of eight lists at a time, so that their loads wait together. */
template <typename E>
__device__ __forceinline__ void clean_lists(const attend_kernel &a, const work &w, int count, E *clean,
                                            int32_t *counts)
{
    enum { AT_ONCE = 8 };
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
template <typename AT>
__device__ __forceinline__ bool lie_apart(const attend_kernel &a, const work &w, typename AT::entry *clean,
                                          int32_t *counts)
{
    const int lane = threadIdx.x & 31;
    const list_shape shape = shape_of(a);
    work past = w;
    past.queries = shape.count * a.tile;
    past.query -= past.queries;
    past.list_row -= shape.count;
    if (past.query < 0 || (AT::BACKWARD ? !one_token(a) : shape.rows > ROWS_OF_WARP)) return false;
    clean_lists(a, past, shape.count, clean, counts);
    __syncwarp();
    const typename AT::entry *list = clean + lane * a.list_k;
    const int count = lane < shape.count ? counts[lane] : 0,
              most = (int)__reduce_add_sync(~0u, (unsigned)count) * AT::TOGETHER / 8;
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
template <typename AT>
__device__ __forceinline__ void plan_turns(const attend_kernel &a, const work_plan &plan, const maps &m,
                                           char *smem, uint32_t base)
{
    const int lane = threadIdx.x & 31;
    const list_shape lists = shape_of(a);
    work w = {};
    int32_t index = (int32_t)blockIdx.x;
    for (int turn = 0; w.queries >= 0;) {
        if (index >= plan.total) w.queries = -1;
        else if (!AT::BACKWARD && m.elsewhere != NULL && m.elsewhere[index] != 0) w.queries = 0;
        else find_work<false, true>(a, plan, index, &w);
        if (index < plan.total) index = next_piece(plan);
        if (w.queries == 0) continue; /* there may be others */
        const int half = turn & 1;
        mbar_wait(base + AT::TURN_FREE + 8 * half, (turn >> 1 & 1) ^ 1);
        if (w.queries > 0) {
            typename AT::entry *const clean =
                (typename AT::entry *)(smem + AT::LIST) + half * AT::MOST_ENTRIES;
            int32_t *const counts = (int32_t *)(smem + AT::COUNT) + half * AT::MOST_LISTS;
            const bool apart = (AT::BACKWARD || m.elsewhere == NULL) && lie_apart<AT>(a, w, clean, counts);
            __syncwarp();
            clean_lists(a, w, lists.count, clean, counts);
            if (lane == 0) ((int32_t *)(smem + AT::APART))[half] = apart;
        }
        if (lane == 0) ((work *)(smem + AT::TURN))[half] = w;
        mbar_arrive(base + AT::TURN_FULL + 8 * half); /* each lane's, for what it wrote */
        if (lane == 0 && w.queries > 0) copy_rows<AT>(a, w, plan.queries, m, base, half);
        turn++;
    }
}

template <typename AT> __device__ __forceinline__ const work &wait_turn(char *smem, uint32_t base, int turn)
{
    mbar_wait(base + AT::TURN_FULL + 8 * (turn & 1), turn >> 1 & 1);
    return ((const work *)(smem + AT::TURN))[turn & 1];
}

template <typename AT> __device__ __forceinline__ bool turn_apart(const char *smem, int turn)
{
    return ((const int32_t *)(smem + AT::APART))[turn & 1] != 0;
}

template <typename AT> __device__ __forceinline__ void free_turn(uint32_t base, int turn)
{
    mbar_arrive(base + AT::TURN_FREE + 8 * (turn & 1)); /* each lane's, for what it read */
}

/* A stage's note as a warp knows it. */
struct stage_keys {
    int key;
    uint32_t lists;
    bool last;
};

/* Lane 0 alone reads, and its arrival at FREE tells the feeder. */
template <typename AT> __device__ __forceinline__ stage_keys read_note(const char *smem, int stage)
{
    const stage_note *note = (const stage_note *)(smem + AT::NOTE) + stage;
    int key = 0;
    uint32_t lists = 0;
    if ((threadIdx.x & 31) == 0) {
        key = note->key;
        lists = note->lists;
    }
    key = __shfl_sync(~0u, key, 0);
    return {key & ~1, __shfl_sync(~0u, lists, 0), (key & 1) != 0};
}

template <typename AT> __device__ __forceinline__ bool read_odd(const char *smem, int stage)
{
    const stage_note *note = (const stage_note *)(smem + AT::NOTE) + stage;
    return __shfl_sync(~0u, (threadIdx.x & 31) == 0 ? note->odd : 0, 0) != 0;
}

/* Warp 0 of the feeder: merges the lists of each turn, a lane for each, and copies what they chose. */
template <typename AT>
__device__ __forceinline__ void feed(const attend_kernel &a, const maps &m, char *smem, uint32_t base)
{
    const int lane = threadIdx.x & 31;
    int step = 0;
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<AT>(smem, base, turn);
        if (w.queries < 0) return;
        const int count = lane < shape_of(a).count
                              ? ((const int32_t *)(smem + AT::COUNT))[(turn & 1) * AT::MOST_LISTS + lane]
                              : 0;
        const typename AT::entry *list =
            (const typename AT::entry *)(smem + AT::LIST) + (turn & 1) * AT::MOST_ENTRIES + lane * a.list_k;
        int taken = 0;
        uint32_t mine = count > 0 ? (uint32_t)list[0] : ~0u, next = __reduce_min_sync(~0u, mine);
        for (bool more = true; more;) {
            const uint32_t block = next, chose = __ballot_sync(~0u, mine == block && mine != ~0u);
            if (mine == block && mine != ~0u) mine = ++taken < count ? (uint32_t)list[taken] : ~0u;
            next = __reduce_min_sync(~0u, mine);
            more = next != ~0u;
            for (int r = 0; r < a.list_block; r += KEYS, step++) {
                const int stage = step % AT::STAGES;
                const int key = (int)block * a.list_block + r;
                const bool last = !more && (r + KEYS >= a.list_block || chose == 0);
                if (lane == 0) {
                    mbar_wait(base + AT::FREE + 8 * stage, (step / AT::STAGES & 1) ^ 1);
                    ((stage_note *)(smem + AT::NOTE))[stage] = {key | last, chose, 0};
                    const uint32_t full = base + AT::FULL + 8 * stage;
                    if (chose == 0) {
                        mbar_arrive(full);
                    } else {
                        mbar_expect(full, AT::K_STAGE + AT::V_STAGE);
                        tma_load_tile<AT::DK / 64, KEYS>(base + AT::K + stage * AT::K_STAGE, m.k, full, w.kvh,
                                                         w.k0 + key, w.view);
                        tma_load_tile<AT::DV / 64, KEYS>(base + AT::V + stage * AT::V_STAGE, m.v, full, w.kvh,
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
        free_turn<AT>(base, turn);
    }
}

/* Warps 1 and 2 of the feeder: what is not finite in V becomes 0; in the backward, what is not in K is only
 * noted. A warp whose rows are one token's needs neither. */
template <typename T, typename AT>
__device__ __forceinline__ void search(const attend_kernel &a, char *smem, uint32_t base)
{
    constexpr int TILE = AT::BACKWARD ? AT::K : AT::V, BYTES = AT::BACKWARD ? AT::K_STAGE : AT::V_STAGE;
    constexpr uint32_t INFINITE = __is_same(T, bf16) ? 0x7f80 : 0x7c00;
    const int lane = threadIdx.x & 31, searcher = (threadIdx.x >> 5) - 1;
    int step = 0;
    for (int turn = 0;; turn++) {
        const work &w = wait_turn<AT>(smem, base, turn);
        if (w.queries < 0) return;
        const bool wanted = !turn_apart<AT>(smem, turn) || !one_token(a);
        for (bool last = false; !last; step++) {
            const int stage = step % AT::STAGES;
            mbar_wait(base + AT::FULL + 8 * stage, step / AT::STAGES & 1);
            const stage_keys now = read_note<AT>(smem, stage);
            last = now.last;
            if (now.lists != 0 && wanted) {
                char *tile = smem + TILE + stage * BYTES;
                uint32_t most = 0; /* of the bits without their signs, two values a word */
#pragma unroll 4
                for (int i = (searcher * 32 + lane) * 16; i < BYTES; i += SEARCHERS * 512) {
                    const uint4 x = *(const uint4 *)(tile + i);
                    most = __vmaxu2(most, __vmaxu2(__vmaxu2(x.x & 0x7fff7fff, x.y & 0x7fff7fff),
                                                   __vmaxu2(x.z & 0x7fff7fff, x.w & 0x7fff7fff)));
                }
                const bool odd = (most & 0xffff) >= INFINITE || most >> 16 >= INFINITE;
                if (__any_sync(~0u, odd)) {
#pragma unroll 1
                    for (int i = (searcher * 32 + lane) * 16; !AT::BACKWARD && i < BYTES;
                         i += SEARCHERS * 512)
#pragma unroll 1
                        for (int j = 0; j < 16; j += 2) {
                            uint16_t *x = (uint16_t *)(tile + i + j);
                            if ((*x & 0x7fff) >= INFINITE) *x = 0;
                        }
                    if (lane == 0) atomicOr(&((stage_note *)(smem + AT::NOTE))[stage].odd, 1 << searcher);
                    async_fence();
                }
            }
            __syncwarp();
            if (lane == 0) {
                if (now.lists != 0 && wanted) mbar_arrive(base + AT::CLEAN + 8 * stage);
                mbar_arrive(base + AT::FREE + 8 * stage);
            }
        }
        free_turn<AT>(base, turn);
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

/* A computing warp has done with a stage. */
template <typename AT> __device__ __forceinline__ void free_stage(uint32_t base, int stage)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbar_arrive(base + AT::FREE + 8 * stage);
}

template <typename AT> __device__ __forceinline__ void start_barriers(uint32_t base)
{
    mbar_init(base + AT::Q_FULL, 1), mbar_init(base + AT::Q_FREE, 4 * GROUPS);
    mbar_init(base + AT::DO_FULL, 1), mbar_init(base + AT::DO_FREE, 4 * GROUPS);
    for (int i = 0; i < AT::STAGES; i++) {
        mbar_init(base + AT::FULL + 8 * i, 1), mbar_init(base + AT::FREE + 8 * i, 4 * GROUPS + SEARCHERS);
        mbar_init(base + AT::CLEAN + 8 * i, SEARCHERS);
    }
    for (int i = 0; i < 2; i++)
        mbar_init(base + AT::TURN_FULL + 8 * i, WARP_ARRIVALS),
            mbar_init(base + AT::TURN_FREE + 8 * i, (1 + SEARCHERS + 4 * GROUPS) * WARP_ARRIVALS);
    mbar_init_done();
}

/* The pieces of a call, and the tensors as the copy engine knows them. */
template <typename AT>
static quern_status plan_launch(const attend_args *args, const attend_kernel &a, const sm90_device &device,
                                void *workspace, cudaStream_t stream, work_plan *plan, maps *m)
{
    const int queries = ROWS / a.hs;
    const int64_t pieces = piece_bound(args->seqs, queries, 1), total = pieces * a.units;
    *plan = {(int32_t)pieces, (int32_t)total, queries, 1, KEYS, NULL};
    if (total == 0) return QUERN_OK;
    quern_status status = tma_describe(&m->q, args->q, a.hs, queries);
    if (status == QUERN_OK) status = tma_describe_tiles(&m->k, args->k, KEYS, AT::DK / 64);
    if (status == QUERN_OK) status = tma_describe_tiles(&m->v, args->v, KEYS, AT::DV / 64);
    if (status == QUERN_OK && AT::BACKWARD) status = tma_describe(&m->d_o, args->d_o, a.hs, queries);
    return status != QUERN_OK ? status : sm90_count_from_zero(total, device, workspace, stream, &plan->taken);
}

/* What each warp of a block does; `compute(base, warp)`: a computing warp's part. */
template <typename T, typename AT, typename F>
__device__ __forceinline__ void share_out(const attend_kernel &a, const work_plan &plan, const maps &m,
                                          char *smem, const F &compute)
{
    const uint32_t base = smem_address(smem);
    if (threadIdx.x == 0) start_barriers<AT>(base);
    if (AT::BACKWARD) {
        if (threadIdx.x < 256) ((uint32_t *)(smem + AT::ZEROS))[threadIdx.x] = 0;
        async_fence();
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (group == 0) {
        registers_down<AT::FEED>();
        if (warp == 0) feed<AT>(a, m, smem, base);
        else if (warp <= SEARCHERS) search<T, AT>(a, smem, base);
        else plan_turns<AT>(a, plan, m, smem, base);
    } else {
        registers_up<AT::COMPUTE>();
        compute(base, warp - 4);
    }
}

typedef void tokens_kernel(attend_kernel a, work_plan plan, maps m);

/* Whether the lists of a piece have room as SHORT_LISTS. */
template <typename AT> static bool lists_are_short(const attend_args *args, const attend_kernel &a)
{
    const int64_t count = ROWS / (a.tile * a.hs);
    return count <= AT::MOST_LISTS && count * a.list_k <= AT::MOST_ENTRIES &&
           args->k.shape[1] / a.list_block < 65535;
}

template <typename AT>
static quern_status launch(const attend_args *args, const attend_kernel &a, const sm90_device &device,
                           void *workspace, cudaStream_t stream, tokens_kernel *kernel, const char *name,
                           const int32_t *elsewhere = NULL)
{
    work_plan plan;
    maps m;
    m.elsewhere = elsewhere;
    const quern_status status = plan_launch<AT>(args, a, device, workspace, stream, &plan, &m);
    if (status != QUERN_OK || plan.total == 0) return status;
    const unsigned blocks =
        (unsigned)(plan.total < device.multiprocessors ? plan.total : device.multiprocessors);
    return launch_shared({stream, NULL}, kernel, dim3(blocks), 128 * (GROUPS + 1), AT::BYTES, name, a, plan,
                         m);
}

} // namespace sm90_tokens

#endif
