/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the indexer's loss on Hopper: which calls it takes, and a call's slices. */
#include "indexer_loss/sm90/shared.cuh"
#include "variants.cuh"

namespace
{

using namespace sm90_loss;

enum { KEYS_BLOCKS = 132, QUERIES_A_SHARE = 32, SHARED_BYTES = 227 * 1024 };
enum { COUNTED_MOST = 4096 }; /* queries that each block counts, so that no counter is cleared */
const int64_t slice_bytes = (int64_t)512 << 20; /* about */

/* A call, and what its slices have in common. */
struct loss_call {
    loss_params p;
    slice s;
    int64_t slice_queries;
    size_t bytes;
};

bool takes(const loss_params &p)
{
    return p.dtype == QUERN_BF16 && p.heads <= HEADS && p.index_heads <= HEADS && p.width <= WIDTH &&
           p.dim <= DIM_MOST && p.batch > 0 && p.queries > 0 && p.entries > 0 && p.listed != 0 &&
           p.listed <= 1 << 20 && p.entries < 1 << 30;
}

loss_call loss_call_of(const stage_exec *exec, const indexer_loss_args *args, void *memory)
{
    loss_call c = {loss_params_of(exec, args), {}, 0, 0};
    loss_params &p = c.p;
    slice &s = c.s;
    const bool lists = p.listed >= 0, wanted = present(args->d_keys_index);
    const int64_t pairs = ((lists ? p.listed : p.entries) + TILE - 1) / TILE * TILE,
                  a_query =
                      pairs * 18 + (lists ? p.listed * WIDTH * 2 + p.entries / 4 : (int64_t)LOSS_HEAD_BYTES),
                  fits = slice_bytes / a_query > 32 ? slice_bytes / a_query : 32,
                  most = lists && wanted && fits > SUM_QUERIES ? (int64_t)SUM_QUERIES : fits,
                  slices = (p.queries + most - 1) / most;
    s.tiles = pairs / TILE;
    c.slice_queries = (p.queries + slices - 1) / slices;
    s.ranges = (p.entries + SUM_RANGE - 1) / SUM_RANGE;
    s.of.entries = p.entries;
    const int64_t tiles = (p.entries + TILE - 1) / TILE, fit = KEYS_BLOCKS / tiles,
                  some = c.slice_queries / QUERIES_A_SHARE, shares = fit < some ? fit : some;
    p.shares = lists ? 1 : (shares < 1 ? 1 : shares) * KEYS_PAIRS;
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    loss_carve(&a, &p);
    if (short_lists(p) && p.batch * p.queries <= COUNTED_MOST) p.rows = NULL;
    if (wanted)
        p.d_keys =
            (float *)arena_take(&a, (size_t)(p.batch * p.shares * p.entries * p.width) * sizeof(float));
    const size_t room = (size_t)((c.slice_queries + 1) * pairs); /* a block may have a query too many */
    s.teacher = (float *)arena_take(&a, room * sizeof(float));
    s.student = (float *)arena_take(&a, room * sizeof(float));
    s.gradient = (bf16 *)arena_take(&a, room * sizeof(bf16));
    s.positive = (uint64_t *)arena_take(&a, room * sizeof(uint64_t));
    if (wanted && !lists) s.heads = (char *)arena_take(&a, (size_t)(c.slice_queries * LOSS_HEAD_BYTES));
    if (wanted && lists) {
        s.choices = (uint4 *)arena_take(&a, (size_t)(c.slice_queries * s.ranges) * sizeof(uint4));
        s.partials = (bf16 *)arena_take(&a, (size_t)(c.slice_queries * p.listed * WIDTH) * sizeof(bf16));
    }
    const int64_t blind = p.ratio - p.position - 1, first = blind > 0 ? blind : 0;
    s.seen = p.queries > first ? p.batch * (p.queries - first) : 0;
    s.d_q_wide = rows_aligned(args->d_q_index, 16);
    s.d_keys_wide = rows_aligned(args->d_keys_index, 16);
    c.bytes = a.used + ARENA_ALIGN - 1;
    return c;
}

quern_status run_slice(const slice &s, cudaStream_t stream)
{
    const bool wanted = s.sums != NULL;
    if (s.of.listed < 0) {
        const quern_status status = pairs_of_all(s, stream);
        return status == QUERN_OK && wanted ? keys_of_all(s, stream) : status;
    }
    const quern_status status = pairs_of_lists(s, stream);
    return status == QUERN_OK && wanted ? sum_rows(s, stream) : status;
}

bool indexer_loss_sm90_supports(const stage_exec *exec, const indexer_loss_args *args, char *)
{
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && takes(loss_params_of(exec, args));
}

size_t indexer_loss_sm90_bytes(const stage_exec *exec, const indexer_loss_args *args)
{
    if (exec->compute != 90 || !takes(loss_params_of(exec, args))) return 0;
    return loss_call_of(exec, args, NULL).bytes;
}

quern_status indexer_loss_sm90_run(const stage_exec *exec, const indexer_loss_args *args, void *workspace)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    loss_call c = loss_call_of(exec, args, workspace);
    slice &s = c.s;
    const loss_params &p = c.p;
    quern_status status = loss_choose(p, true, stream);
    s.of = p;
    for (s.b = 0; s.b < p.batch; s.b++)
        for (s.first = 0; s.first < p.queries && status == QUERN_OK; s.first += c.slice_queries) {
            s.count = c.slice_queries < p.queries - s.first ? c.slice_queries : p.queries - s.first;
            s.adds = s.first > 0;
            s.last = s.first + s.count == p.queries;
            s.gives_loss = s.last && s.b + 1 == p.batch;
            if (p.d_keys != NULL) s.sums = p.d_keys + s.b * p.shares * p.entries * p.width;
            status = run_slice(s, stream);
        }
    if (p.listed >= 0 && p.d_keys != NULL) c.p.d_keys_index.p = NULL, c.p.loss = NULL; /* they are complete */
    return status == QUERN_OK ? loss_finish(c.p, stream) : status;
}

} // namespace

extern const variant<indexer_loss_args> indexer_loss_sm90 = {"indexer_loss_sm90", indexer_loss_sm90_supports,
                                                             indexer_loss_sm90_bytes, indexer_loss_sm90_run};
