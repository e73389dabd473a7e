/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.cu - the entries of blocks that a step's tokens complete: their tokens leave the pages for a
 * varlen batch in the workspace, the compress stage makes entries of them, which go to their pages. The host
 * reckons with the most tokens and entries that there can be; a kernel of one block finds which there are.
 *
 * An entry has the bits that a prefill gives it, as the compress stage gets the block's tokens alone. Where
 * blocks overlap, it begins at a multiple of l/d, as a mean's sums of d tokens follow an entry's number.
 */
#include "cache/params.cuh"
#include "variants.cuh"

enum { THREADS = 256 };

/* In the workspace. */
struct compress_room {
    int64_t tokens, entries; /* at most */
    int32_t *cu_tokens, *cu_entries, *from, *to, *made, *cu_own;
    quern_tensor rows[4]; /* keys, values, entries of both */
    void *scratch;
    size_t bytes;
};

static int64_t parts_of(const cache_compress_args *args)
{
    return args->kind == COMPRESS_MEAN ? args->block_size / args->stride : 1;
}

static quern_tensor vector_of(const cache_compress_args *args, int32_t *data, int64_t n)
{
    return {data, QUERN_I32, QUERN_CUDA, args->tokens.blocks.device_id, 1, {n}, {1}};
}
/* Element b to element b + 1. */
static quern_tensor ranges_of(const cache_compress_args *args, int32_t *data, int64_t from, int64_t to)
{
    return {
        data,      QUERN_I32, QUERN_CUDA, args->tokens.blocks.device_id, 2, {args->step.slots.shape[0], 2},
        {from, to}};
}

static compress_args inner_of(const cache_compress_args *args, const compress_room &m)
{
    const int64_t batch = args->step.slots.shape[0];
    compress_args c = {};
    c.seqs = {batch, m.tokens, m.entries, vector_of(args, m.cu_tokens, batch + 1),
              vector_of(args, m.cu_own, batch + 1)};
    c.kind = args->kind;
    c.block_size = args->block_size;
    c.stride = args->stride;
    c.k = m.rows[0];
    c.v = m.rows[1];
    c.w_k = args->w_k;
    c.w_v = args->w_v;
    c.pe_k = args->pe_k;
    c.pe_v = args->pe_v;
    c.k_cmp = m.rows[2];
    c.v_cmp = m.rows[3];
    return c;
}

static compress_room carve(const stage_exec *exec, const cache_compress_args *args, void *memory)
{
    const quern_tensor &pool = args->tokens.blocks;
    const int64_t batch = args->step.slots.shape[0], heads = pool.shape[1], parts = parts_of(args);
    char *const base = room_at<char>(memory);
    compress_room m = {};
    /* A sequence with n tokens makes up to ceil(n / d) entries, before which up to l/d - 1 others stand. */
    m.entries = args->most / args->stride + batch * parts;
    m.tokens = args->most + batch * ((parts - 1) * args->stride + args->block_size);
    const auto take = [&](size_t bytes) {
        char *const at = base + m.bytes;
        m.bytes += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
        return at;
    };
    const size_t words = (size_t)(batch + 1) * sizeof(int32_t);
    m.cu_tokens = (int32_t *)take(words);
    m.cu_entries = (int32_t *)take(words);
    m.cu_own = (int32_t *)take(words);
    m.from = (int32_t *)take(words);
    m.to = (int32_t *)take(words);
    m.made = (int32_t *)take(2 * words);
    for (int i = 0; i < 4; i++) {
        const int64_t n = i < 2 ? m.tokens : m.entries,
                      dim = i % 2 == 0 ? args->tokens.dim : args->tokens.dim_v;
        m.rows[i] = {NULL,
                     pool.dtype,
                     QUERN_CUDA,
                     pool.device_id,
                     4,
                     {1, n, heads, dim},
                     {n * heads * dim, heads * dim, dim, 1}};
        m.rows[i].data = take((size_t)(n * heads * dim * bytes_of(pool.dtype)));
    }
    const compress_args inner = inner_of(args, m);
    m.scratch = take(compress_forward_variants.workspace(exec, &inner));
    return m;
}

struct find_kernel {
    step_view step;
    plane_view tokens, entries;
    int64_t block_size, stride, parts;
    int32_t *cu_tokens, *cu_entries, *from, *to, *made;
    int32_t *status;
};

/* Which tokens and entries of each sequence; the offsets are sums over sequences, by one warp. */
__global__ void __launch_bounds__(THREADS) find_entries(const __grid_constant__ find_kernel a)
{
    step_check(a.step, a.status);
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x;
    int32_t all_tokens = 0, all_entries = 0;
    if (lane == 0) a.cu_tokens[0] = a.cu_entries[0] = 0;
    for (int b0 = 0; b0 < a.step.batch; b0 += 32) {
        const int b = b0 + lane;
        int64_t first = 0, end = 0, start = 0;
        if (b < a.step.batch) {
            const step_rows r = step_rows_at(a.step, b);
            const int64_t tokens = r.first + r.count;
            const bool good = r.first >= 0 && plane_holds(a.tokens, tokens, r.count, 0, 0) &&
                              plane_holds(a.entries, tokens, r.count, a.block_size, a.stride);
            if (!good) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
            first = good ? mask_entries(r.first, a.block_size, a.stride) : 0;
            end = good ? mask_entries(tokens, a.block_size, a.stride) : 0;
            start = first - first % a.parts;
        }
        int32_t tokens = end > first ? (int32_t)((end - 1 - start) * a.stride + a.block_size) : 0,
                entries = end > first ? (int32_t)(end - start) : 0;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int32_t t = __shfl_up_sync(~0u, tokens, by), e = __shfl_up_sync(~0u, entries, by);
            if (lane >= by) {
                tokens += t;
                entries += e;
            }
        }
        tokens += all_tokens;
        entries += all_entries;
        if (b < a.step.batch) {
            a.from[b] = (int32_t)(start * a.stride);
            a.to[b] = (int32_t)first;
            a.made[2 * b] = entries - (int32_t)(end > first ? end - first : 0);
            a.made[2 * b + 1] = entries;
            a.cu_tokens[b + 1] = tokens;
            a.cu_entries[b + 1] = entries;
        }
        all_tokens = __shfl_sync(~0u, tokens, 31);
        all_entries = __shfl_sync(~0u, entries, 31);
    }
}

static bool supports(const stage_exec *exec, const cache_compress_args *args, char why[STAGE_WHY_BYTES])
{
    const compress_room m = carve(exec, args, NULL);
    const compress_args inner = inner_of(args, m);
    return compress_forward_variants.choose(exec, &inner, why) != NULL;
}

static size_t workspace(const stage_exec *exec, const cache_compress_args *args)
{
    return room_for(carve(exec, args, NULL).bytes);
}

static quern_status run(const stage_exec *exec, const cache_compress_args *args, void *memory)
{
    const compress_room m = carve(exec, args, memory);
    const compress_args inner = inner_of(args, m);
    const find_kernel f = {step_view_of(args->step, args->most),
                           plane_view_of(args->tokens),
                           plane_view_of(args->entries),
                           args->block_size,
                           args->stride,
                           parts_of(args),
                           m.cu_tokens,
                           m.cu_entries,
                           m.from,
                           m.to,
                           m.made,
                           exec->status};
    const int64_t batch = args->step.slots.shape[0];
    if (batch == 0 || args->most == 0) return QUERN_OK;
    find_entries<<<1, THREADS, 0, (cudaStream_t)exec->stream>>>(f);
    quern_status status = LAUNCHED("entries of a step");
    cache_copy_args out = {}, in = {};
    out.plane = args->tokens;
    out.step = {args->step.slots, vector_of(args, m.from, batch), ranges_of(args, m.cu_tokens, 1, 1)};
    out.k = inner.k;
    out.v = inner.v;
    out.from_cache = true;
    in.plane = args->entries;
    in.step = {args->step.slots, vector_of(args, m.to, batch), ranges_of(args, m.made, 2, 1)};
    in.k = inner.k_cmp;
    in.v = inner.v_cmp;
    if (status == QUERN_OK) status = cache_copy_run(exec, &out, NULL);
    if (status == QUERN_OK) status = compress_forward_variants.run(exec, &inner, m.scratch);
    return status == QUERN_OK ? cache_copy_run(exec, &in, NULL) : status;
}

extern const variant<cache_compress_args> cache_compress_any = {"cache_compress_any", supports, workspace,
                                                                run};
