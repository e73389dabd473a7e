/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * launch.cu - which calls kernel.cuh takes, and what its kernels ask of the lists: for each slice
 * of tokens, which of them chose each block of keys. plan: a warp for each piece of tokens says whether it is
 * computed here (share_little), cleans its lists, and draws each entry's place among its block's. scan: where
 * each block's tokens begin, and items of at most ITEM_TOKENS of them. fill: writes them there. The places
 * are drawn by integer atomics, so their order differs from run to run; it changes no bit, since each row of
 * an item has a result of its own.
 *
 * Workspace: the counter of pieces of sm90_tokens/kernel.cuh, which computes the other pieces, the index of
 * all slices, 8 bytes for each token, key/value head and entry, and the partial results of two slices.
 */
#include "attend/any.cuh"
#include "common/tail.cuh"
#include "attend/sm90_by_block/params.cuh"
#include "attend/sm90/attend.cuh"
#include "attend/sm90_tokens/feed.cuh"
#include "variants.cuh"

using sm90_tokens::KEYS;
using sm90_tokens::ROWS;

static const size_t MOST_PARTS = (size_t)144 << 20; /* bytes of a slice */
enum { ITEM_TOKENS = 64, PLAN_WARPS = 2, SCAN_THREADS = 1024, FILL_THREADS = 256 };
enum { LEAST_TOKENS = 12288, PLACE_BITS = 13, MOST_ENTRIES = 1 << RANK_BITS };
static_assert(SLICE_LISTS == 1 << PLACE_BITS, "an entry's place has PLACE_BITS");
static const char *const NAME = "attend_forward_sm90_by_block";

/* sm90_tokens/feed.cuh's functions for lists that `plan` cleans. */
struct clean_layout {
    typedef int32_t entry;
    static constexpr bool BACKWARD = false, LONG_LISTS = false;
    static constexpr int TOGETHER = 1;
};
struct wide_layout : clean_layout { /* 16 heads */
    static constexpr int TOGETHER = 2;
};

/* The index in memory, and its bounds. */
struct token_index {
    int64_t pairs, blocks, slices; /* of views and units; of a view; of a pair */
    int64_t lists, items;          /* of a slice, at most */
    int64_t tokens, k;
    int32_t *by_block; /* [pieces of all units]: whether it is computed here */
    int32_t *counts;  /* [pairs][tokens] entries of clean lists; -1: not here */
    int32_t *entries; /* [pairs][tokens][k]: block and place */
    int32_t *ids;     /* [pairs][tokens][k]: of each slice, block after block */
    int32_t *start;   /* [pairs][slices][blocks]: a count until the scan */
    int32_t *item_count;
    block_item *items_of;      /* [pairs][slices][items] */
    void *stats[2], *parts[2]; /* of slices that follow one another */
};

/* Tokens of a piece of sm90_tokens/kernel.cuh. */
static int64_t piece_of(int64_t group)
{
    return ROWS / group;
}

static token_index carve(const attend_args *args, void *workspace, size_t *bytes)
{
    const int64_t n = args->seqs.n_q, k = args->list.shape[3], units = args->k.shape[2],
                  group = args->q.shape[2] / units, piece = piece_of(group);
    const int64_t row = k * group;
    token_index x = {};
    x.pairs = args->seqs.batch * units;
    x.blocks = mask_blocks(args->seqs.n_kv, args->block_size);
    x.tokens = n;
    x.k = k;
    x.lists = (int64_t)MOST_PARTS / (row * (sm90_padded_dim(args) * 2 + 16));
    if (x.lists > SLICE_LISTS) x.lists = SLICE_LISTS;
    if (x.lists > n) x.lists = n;
    x.lists = (x.lists + piece - 1) / piece * piece;
    x.slices = (n + x.lists - 1) / x.lists;
    x.items = x.blocks + x.lists * k / ITEM_TOKENS;
    char *p = (char *)sm90_whole_lines((uintptr_t)workspace);
    auto take = [&](int64_t count, size_t size) {
        char *const at = p;
        p += sm90_whole_lines((size_t)count * size);
        return at;
    };
    x.by_block = (int32_t *)take((n + piece - 1) / piece * x.pairs, 4);
    x.counts = (int32_t *)take(x.pairs * n, 4);
    x.entries = (int32_t *)take(x.pairs * n * k, 4);
    x.ids = (int32_t *)take(x.pairs * n * k, 4);
    x.start = (int32_t *)take(x.pairs * x.slices * x.blocks, 4);
    x.item_count = (int32_t *)take(x.pairs * x.slices, 4);
    x.items_of = (block_item *)take(x.pairs * x.slices * x.items, sizeof(block_item));
    for (int i = 0; i < 2; i++) {
        x.stats[i] = take(x.lists * row, 16);
        x.parts[i] = take(x.lists * row * sm90_padded_dim(args), 2);
    }
    *bytes = (size_t)(p - (char *)workspace) + SM90_LINE - 1;
    return x;
}

/* Lists of single tokens, of 4 or 8 heads in blocks of 64 keys, or of 16 heads in blocks of 128. */
static bool takes_shape(const stage_exec *exec, const attend_args *args)
{
    const bool forced = exec->variant != NULL && strcmp(exec->variant, NAME) == 0;
    if (!present(args->list) || args->mask != ATTEND_BLOCKS || args->q.dtype == QUERN_F32 ||
        present(args->seqs.cu_q) || args->tile != 1 || args->scope == LIST_BY_HEAD ||
        args->k.shape[2] < 1)
        return false;
    const int64_t group = args->q.shape[2] / args->k.shape[2];
    const bool sized = group == 16 ? args->block_size == 2 * KEYS
                                   : (group == 4 || group == 8) && args->block_size == KEYS;
    return sized && args->list.shape[3] >= 1 && args->list.shape[3] <= MOST_ENTRIES &&
           args->q.shape[3] <= 128 && args->v.shape[3] <= 128 &&
           args->seqs.n_kv <= (int64_t)KEYS << (31 - PLACE_BITS) && args->seqs.n_q > 0 &&
           (forced || args->seqs.n_q >= LEAST_TOKENS);
}

static bool attend_forward_sm90_by_block_supports(const stage_exec *exec, const attend_args *args,
                                                  char why[STAGE_WHY_BYTES])
{
    return takes_shape(exec, args) && attend_forward_sm90_tokens_supports(exec, args, why);
}

static size_t attend_forward_sm90_by_block_bytes(const stage_exec *exec, const attend_args *args)
{
    size_t bytes;
    if (!takes_shape(exec, args)) return 0;
    carve(args, NULL, &bytes);
    return sm90_whole_lines(SM90_COUNT_BYTES) + bytes;
}

/* Draws places of a token's entries, one of each lane, among those of their blocks: lanes with one block draw
 * together. */
__device__ __forceinline__ int32_t draw_place(int32_t *count, int32_t block, bool in)
{
    const int lane = threadIdx.x & 31;
    const uint32_t same = __match_any_sync(~0u, in ? block : -1 - lane);
    const int leader = __ffs((int)same) - 1;
    int32_t first = 0;
    if (in && lane == leader) first = atomicAdd(&count[block], __popc(same));
    first = __shfl_sync(~0u, first, leader);
    return first + __popc(same & ((1u << lane) - 1));
}

__global__ void __launch_bounds__(32 * PLAN_WARPS)
    attend_by_block_plan(const __grid_constant__ attend_kernel a, const __grid_constant__ work_plan plan,
                         const __grid_constant__ token_index x)
{
    __shared__ int32_t room[PLAN_WARPS][32 * MOST_ENTRIES], room_counts[PLAN_WARPS][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, index = (int)blockIdx.x * PLAN_WARPS + warp;
    if (index >= plan.total) return;
    int32_t *const clean = room[warp], *const counts = room_counts[warp];
    work w = {};
    find_work<false, true>(a, plan, index, &w);
    const bool little = a.hs == 16 ? sm90_tokens::share_little<wide_layout>(a, w, clean, counts)
                                   : sm90_tokens::share_little<clean_layout>(a, w, clean, counts);
    if (lane == 0) x.by_block[index] = little;
    const int64_t first = ((int64_t)w.view * a.units + w.unit) * x.tokens + w.query;
    if (!little) {
        if (lane < w.queries) x.counts[first + lane] = -1;
        return;
    }
    __syncwarp();
    sm90_tokens::clean_lists(a, w, plan.queries, clean, counts);
    __syncwarp();
    const int count = lane < w.queries ? counts[lane] : 0;
    if (lane < w.queries) x.counts[first + lane] = count;
    int32_t *const chosen =
        x.start + (((int64_t)w.view * a.units + w.unit) * x.slices + w.query / (int)x.lists) * x.blocks;
#pragma unroll 4
    for (int e = 0; e < a.list_k; e++) {
        const int32_t block = e < count ? clean[lane * a.list_k + e] : 0,
                      place = draw_place(chosen, block, e < count);
        if (e < count) x.entries[(first + lane) * a.list_k + e] = block << PLACE_BITS | place;
    }
}

/* The sum of `x` over the threads before this one; *total over all. */
__device__ __forceinline__ int32_t sum_before(int32_t x, int32_t *total)
{
    __shared__ int32_t sums[SCAN_THREADS / 32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto scan = [&](int32_t v) {
        for (int step = 1; step < 32; step *= 2) {
            const int32_t left = __shfl_up_sync(~0u, v, step);
            if (lane >= step) v += left;
        }
        return v;
    };
    const int32_t own = scan(x);
    __syncthreads();
    if (lane == 31) sums[warp] = own;
    __syncthreads();
    if (warp == 0) sums[lane] = scan(sums[lane]);
    __syncthreads();
    *total = sums[SCAN_THREADS / 32 - 1];
    return own - x + (warp > 0 ? sums[warp - 1] : 0);
}

/* A block of threads has a slice. */
__global__ void __launch_bounds__(SCAN_THREADS)
    attend_by_block_scan(const __grid_constant__ token_index x, int unit_tokens)
{
    int32_t *const start = x.start + (int64_t)blockIdx.x * x.blocks;
    block_item *const items = x.items_of + (int64_t)blockIdx.x * x.items;
    int32_t before = 0, items_before = 0, all;
    for (int64_t base = 0; base < x.blocks; base += SCAN_THREADS) {
        const int32_t block = (int32_t)base + (int32_t)threadIdx.x,
                      count = block < x.blocks ? start[block] : 0,
                      own = (count + ITEM_TOKENS - 1) / ITEM_TOKENS;
        const int32_t first = before + sum_before(count, &all);
        before += all;
        const int32_t item = items_before + sum_before(own, &all);
        items_before += all;
        if (block < x.blocks) start[block] = first;
        const int32_t share =
            own > 0 ? ((count + own - 1) / own + unit_tokens - 1) / unit_tokens * unit_tokens : 0;
        for (int32_t i = 0; i < own; i++) {
            const int32_t at = i * share, left = count - at;
            items[item + i] = {block, first + at, left < share ? left : share};
        }
    }
    if (threadIdx.x == 0) x.item_count[blockIdx.x] = items_before;
}

__global__ void __launch_bounds__(FILL_THREADS)
    attend_by_block_fill(const __grid_constant__ token_index x, fast_div by_k)
{
    const int32_t i = (int32_t)(blockIdx.x * FILL_THREADS + threadIdx.x), token = (int32_t)quotient(i, by_k),
                  rank = i - token * (int32_t)x.k;
    const int64_t pair = blockIdx.y;
    if (token >= x.tokens || rank >= x.counts[pair * x.tokens + token]) return;
    const int32_t entry = x.entries[(pair * x.tokens + token) * x.k + rank], slice = token / (int32_t)x.lists,
                  block = (int32_t)((uint32_t)entry >> PLACE_BITS), place = entry & ((1 << PLACE_BITS) - 1);
    const int64_t first = pair * x.tokens + (int64_t)slice * x.lists;
    x.ids[first * x.k + x.start[(pair * x.slices + slice) * x.blocks + block] + place] =
        (token - slice * (int32_t)x.lists) << RANK_BITS | rank;
}

/* The index of all slices. */
static quern_status build_index(const attend_kernel &a, const token_index &x, const work_plan &plan,
                                cudaStream_t stream)
{
    const int64_t slices = x.pairs * x.slices;
    const quern_status status =
        cuda_report(cudaMemsetAsync(x.start, 0, (size_t)(slices * x.blocks) * sizeof(int32_t), stream), NAME);
    if (status != QUERN_OK) return status;
    attend_by_block_plan<<<blocks_for(plan.total, PLAN_WARPS), 32 * PLAN_WARPS, 0, stream>>>(a, plan, x);
    attend_by_block_scan<<<(unsigned)slices, SCAN_THREADS, 0, stream>>>(x, 64 / a.hs);
    attend_by_block_fill<<<dim3(blocks_for(x.tokens * x.k, FILL_THREADS), (unsigned)x.pairs), FILL_THREADS, 0,
                           stream>>>(x, fast_div_by((uint32_t)x.k));
    return LAUNCHED(NAME);
}

/* Slice `s` of a view and unit. */
static token_slice slice_of(const attend_args *args, const token_index &x, int64_t pair, int64_t s)
{
    const int64_t units = args->k.shape[2], query0 = s * x.lists, at = pair * x.slices + s,
                  left = x.tokens - query0, lists = left < x.lists ? left : x.lists;
    const int64_t seen = args->causal ? mask_blocks(query0 + lists, args->block_size) : x.blocks;
    token_slice slice = {};
    slice.view = (int32_t)(pair / units);
    slice.unit = (int32_t)(pair % units);
    slice.query0 = (int32_t)query0;
    slice.lists = (int32_t)lists;
    slice.most_items = (int32_t)((seen < x.blocks ? seen : x.blocks) + lists * x.k / ITEM_TOKENS);
    slice.item_count = x.item_count + at;
    slice.items = x.items_of + at * x.items;
    slice.ids = x.ids + (pair * x.tokens + query0) * x.k;
    slice.counts = x.counts + pair * x.tokens + query0;
    slice.first = at == 0;
    slice.parts = x.parts[at & 1];
    slice.stats = x.stats[at & 1];
    return slice;
}

static quern_status attend_forward_sm90_by_block_run(const stage_exec *exec, const attend_args *args,
                                                     void *workspace)
{
    static sm90_attend_by_block *const table[2][2] = {{sm90_by_block_bf16_64, sm90_by_block_bf16_128},
                                                      {sm90_by_block_f16_64, sm90_by_block_f16_128}};
    static sm90_attend_but *const others[2][2] = {{sm90_tokens_but_bf16_64, sm90_tokens_but_bf16_128},
                                                  {sm90_tokens_but_f16_64, sm90_tokens_but_f16_128}};
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const attend_launch l = attend_launch_of(args);
    const attend_kernel &a = l.kernel;
    const bool f16 = l.dtype == QUERN_F16, wide = sm90_padded_dim(args) > 64;
    const int64_t piece = piece_of(a.hs);
    size_t bytes;
    const token_index x = carve(args, (char *)workspace + sm90_whole_lines(SM90_COUNT_BYTES), &bytes);
    work_plan plan = {(int32_t)piece_bound(args->seqs, piece, 1), 0, (int32_t)piece, 1, KEYS, NULL};
    plan.total = plan.pieces * a.units;
    quern_status status = build_index(a, x, plan, stream);
    for (int64_t pair = 0; pair < x.pairs; pair++)
        for (int64_t s = 0; s < x.slices && status == QUERN_OK; s++)
            status = table[f16][wide](args, a, slice_of(args, x, pair, s), stream);
    if (status == QUERN_OK)
        status = others[f16][wide](args, l, x.by_block, {exec->multiprocessors}, workspace, stream);
    return status != QUERN_OK ? status : attend_end(exec, args);
}

extern const variant<attend_args> attend_forward_sm90_by_block = {
    "attend_forward_sm90_by_block", attend_forward_sm90_by_block_supports, attend_forward_sm90_by_block_bytes,
    attend_forward_sm90_by_block_run};
