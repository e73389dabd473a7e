/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * stage_cache_compress.c - the cache_compress stage: copies the tokens of blocks that become whole out of
 * their pages, compresses them as a varlen batch, and copies the entries into theirs.
 *
 * An entry has the bits that a prefill gives it, as the compress stage gets the block's tokens alone. Where
 * that sums overlapping blocks by runs of d tokens (by a run's number modulo l/d), it starts from an entry
 * whose number is a multiple of l/d. Limit: the read bandwidth on the blocks' tokens.
 */
#include "core/arena.h"
#include "core/view.h"
#include "cpu/check_data.h"
#include "cpu/rows_at.h"
#include "cpu/stages.h"

/* In the workspace; i32 as in stage_step, of the tokens that are read and the entries that are made. */
typedef struct compress_space {
    int64_t tokens, entries; /* at most */
    quern_tensor cu_tokens, cu_entries, from, to, made;
    quern_tensor rows[4]; /* keys, values, entries of both */
    void *scratch;
} compress_space;

/* Entries are computed from a multiple of so many on. */
static int64_t parts_of(const cache_compress_args *args)
{
    return args->kind == COMPRESS_MEAN ? args->block_size / args->stride : 1;
}

static quern_tensor room(arena *a, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(NULL, dtype, ndim, shape);
    t.data = arena_take(a, (size_t)view_elements(&t) * quern_dtype_size(dtype));
    return t;
}

static compress_args inner_of(const cache_compress_args *args, const compress_space *s, int64_t tokens,
                              int64_t entries)
{
    compress_args c = {.seqs = {.batch = args->step.slots.shape[0],
                                .n_q = tokens,
                                .n_kv = entries,
                                .cu_q = s->cu_tokens,
                                .cu_kv = s->cu_entries},
                       .kind = args->kind,
                       .block_size = args->block_size,
                       .stride = args->stride,
                       .k = s->rows[0],
                       .v = s->rows[1],
                       .w_k = args->w_k,
                       .w_v = args->w_v,
                       .pe_k = args->pe_k,
                       .pe_v = args->pe_v,
                       .k_cmp = s->rows[2],
                       .v_cmp = s->rows[3]};
    c.k.shape[1] = c.v.shape[1] = tokens;
    c.k_cmp.shape[1] = c.v_cmp.shape[1] = entries;
    return c;
}

static compress_space carve(const stage_exec *exec, const cache_compress_args *args, arena *a)
{
    const int64_t batch = args->step.slots.shape[0], more = batch + 1, pairs[] = {batch, 2},
                  heads = args->tokens.blocks.shape[1], parts = parts_of(args);
    /* A sequence with n tokens makes up to ceil(n / d) entries, before which up to l/d - 1 others stand. */
    compress_space s = {.entries = args->most / args->stride + batch * parts,
                        .tokens = args->most + batch * ((parts - 1) * args->stride + args->block_size)};
    const int64_t shapes[][4] = {{1, s.tokens, heads, args->tokens.dim},
                                 {1, s.tokens, heads, args->tokens.dim_v},
                                 {1, s.entries, heads, args->tokens.dim},
                                 {1, s.entries, heads, args->tokens.dim_v}};
    s.cu_tokens = room(a, QUERN_I32, 1, &more);
    s.cu_entries = room(a, QUERN_I32, 1, &more);
    s.from = room(a, QUERN_I32, 1, &batch);
    s.to = room(a, QUERN_I32, 1, &batch);
    s.made = room(a, QUERN_I32, 2, pairs);
    for (int i = 0; i < 4; i++) s.rows[i] = room(a, args->tokens.blocks.dtype, 4, shapes[i]);
    const compress_args inner = inner_of(args, &s, s.tokens, s.entries);
    s.scratch = arena_take(a, cpu_compress_workspace(exec, &inner));
    return s;
}

/* Which tokens and entries of each sequence; the sums become *tokens and *entries. */
static void find(const cache_compress_args *args, const compress_space *s, int64_t *tokens, int64_t *entries)
{
    const int64_t batch = args->step.slots.shape[0], parts = parts_of(args);
    int32_t *cu_tokens = s->cu_tokens.data, *cu_entries = s->cu_entries.data, *from = s->from.data,
            *to = s->to.data, *made = s->made.data;
    *tokens = *entries = cu_tokens[0] = cu_entries[0] = 0;
    for (int64_t b = 0; b < batch; b++) {
        const step_run run = step_run_at(&args->step, b);
        const int64_t first = mask_entries(run.first, args->block_size, args->stride),
                      end = mask_entries(run.first + run.count, args->block_size, args->stride),
                      start = first - first % parts;
        if (end > first) {
            *tokens += (end - 1 - start) * args->stride + args->block_size;
            *entries += end - start;
        }
        from[b] = (int32_t)(start * args->stride);
        to[b] = (int32_t)first;
        made[2 * b] = (int32_t)(*entries - (end - first));
        made[2 * b + 1] = (int32_t)*entries;
        cu_tokens[b + 1] = (int32_t)*tokens;
        cu_entries[b + 1] = (int32_t)*entries;
    }
}

size_t cpu_cache_compress_workspace(const stage_exec *exec, const cache_compress_args *args)
{
    arena a = {NULL, 0};
    carve(exec, args, &a);
    return arena_size(&a);
}

quern_status cpu_cache_compress(const stage_exec *exec, const cache_compress_args *args, void *workspace)
{
    arena a = arena_on(workspace);
    const compress_space s = carve(exec, args, &a);
    int64_t tokens, entries;
    quern_status status = check_step(exec, &args->step, args->most);
    if (status == QUERN_OK) status = check_plane(exec, &args->tokens, &args->step, 0, 0);
    if (status == QUERN_OK)
        status = check_plane(exec, &args->entries, &args->step, args->block_size, args->stride);
    if (status != QUERN_OK) return status;
    find(args, &s, &tokens, &entries);
    if (entries == 0) return QUERN_OK;
    const compress_args inner = inner_of(args, &s, tokens, entries);
    const cache_copy_args out = {.plane = args->tokens,
                                 .step = {args->step.slots, s.from, view_ranges(&s.cu_tokens)},
                                 .k = inner.k,
                                 .v = inner.v,
                                 .from_cache = true},
                          in = {.plane = args->entries,
                                .step = {args->step.slots, s.to, s.made},
                                .k = inner.k_cmp,
                                .v = inner.v_cmp};
    status = cpu_cache_copy(exec, &out, NULL);
    if (status == QUERN_OK) status = cpu_compress(exec, &inner, s.scratch);
    return status == QUERN_OK ? cpu_cache_copy(exec, &in, NULL) : status;
}
