/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the index_loss stage: its workspace, a call's slices, and which kernels take the items. */
#include "index_loss/params.cuh"
#include "variants.cuh"

#include "core/arena.h"

namespace
{

using namespace index_loss;

enum { LEAST_QUERIES = 64, WIDTH_MOST = 128, DIM_MOST = 256 };
const int64_t slice_bytes = (int64_t)512 << 20; /* about */

params params_of(const stage_exec *exec, const index_loss_args *args)
{
    params p = {};
    const quern_tensor &q = args->q_index, &keys = args->keys_index;
    p.sq = seqs_of(args->seqs);
    p.batch = q.shape[0];
    p.all = p.batch * q.shape[1];
    p.keys = p.batch * keys.shape[1];
    p.lists = q.shape[2];
    p.group = p.lists > 0 ? args->q.shape[2] / p.lists : 1;
    p.k = args->list.shape[3];
    p.block_size = args->block_size;
    p.query_offset = args->query_offset;
    p.blocks = args->seqs.cu_q.ndim > 0 ? p.sq.n_kv / p.block_size + p.sq.batch
                                        : p.batch * mask_blocks(p.sq.n_kv, p.block_size);
    p.subs = mask_blocks(p.block_size < p.sq.n_kv ? p.block_size : p.sq.n_kv, KEYS);
    p.dim = (int32_t)args->q.shape[3];
    p.width = (int32_t)q.shape[3];
    p.shared = keys.shape[2] != p.lists;
    p.scale2 = args->scale * 1.44269504088896340736f;
    p.scale_index2 = args->scale_index * 1.44269504088896340736f;
    p.scale_index = args->scale_index;
    p.lambda = args->lambda;
    p.dtype = q.dtype;
    p.q = view4_of(args->q), p.key = view4_of(args->keys);
    p.q_index = view4_of(q), p.key_index = view4_of(keys);
    p.d_q_index = view4_of(args->d_q_index), p.d_keys_index = view4_of(args->d_keys_index);
    p.lse = view3_of(args->lse), p.row_loss = view3_of(args->row_loss);
    p.loss_rows = present(args->row_loss) ? args->row_loss.shape[2] : 0;
    p.list = (const int32_t *)args->list.data;
    for (int i = 0; i < 3; i++) p.list_s[i] = args->list.strides[i];
    p.loss = (float *)args->loss.data;
    p.status = exec->status;
    return p;
}

/* Queries of a slice. */
int64_t slice_of(const params &p)
{
    const int64_t a_part = (int64_t)(2 * sizeof(float2)) + p.group * (int64_t)sizeof(float2) + p.width * 4,
                  a_query = p.lists * (p.k * (p.subs * a_part + 4) + p.blocks / 4 + p.group * 4 + 16);
    const int64_t fit = slice_bytes / (a_query > 0 ? a_query : 1), least = LEAST_QUERIES,
                  most = fit > least ? fit : least, slices = mask_blocks(p.all, most);
    return slices > 0 ? mask_blocks(p.all, slices) : 0;
}

size_t carve(const index_loss_args *args, void *memory, params *p)
{
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    const size_t lists = (size_t)p->lists, all = lists * (size_t)p->all, some = (size_t)slice_of(*p),
                 rows = lists * some, places = rows * (size_t)p->k, parts = places * (size_t)p->subs,
                 blocks = lists * (size_t)p->blocks;
    p->words = (int64_t)(some + 31) / 32;
    p->chosen = (int32_t *)arena_take(&a, all * (size_t)p->k * sizeof(int32_t));
    p->count = (int32_t *)arena_take(&a, all * sizeof(int32_t));
    p->seen = (int32_t *)arena_take(&a, all * sizeof(int32_t));
    p->rows = (int32_t *)arena_take(&a, sizeof(int32_t));
    p->losses = (double *)arena_take(&a, all * sizeof(double));
    if (present(args->d_keys_index))
        p->d_keys = (float *)arena_take(&a, lists * (size_t)(p->keys * p->width) * sizeof(float));
    p->choices = (choice *)arena_take(&a, blocks * (size_t)p->words * sizeof(choice));
    p->start = (int32_t *)arena_take(&a, blocks * sizeof(int32_t));
    p->items = (int32_t *)arena_take(&a, blocks * sizeof(int32_t));
    p->taken = (int32_t *)arena_take(&a, sizeof(int32_t));
    p->entries = (int32_t *)arena_take(&a, places * sizeof(int32_t));
    p->student = (float2 *)arena_take(&a, parts * sizeof(float2));
    p->teacher = (float2 *)arena_take(&a, parts * (size_t)p->group * sizeof(float2));
    p->lse_index = (float *)arena_take(&a, rows * sizeof(float));
    p->lse_rest = (float *)arena_take(&a, rows * sizeof(float));
    p->lse2 = (float *)arena_take(&a, rows * (size_t)p->group * sizeof(float));
    p->idle = (uint8_t *)arena_take(&a, rows);
    p->terms = (float2 *)arena_take(&a, parts * sizeof(float2));
    if (present(args->d_q_index))
        p->d_q = (float *)arena_take(&a, parts * (size_t)p->width * sizeof(float));
    return arena_size(&a);
}

quern_status run_slice(const params &p, of_items *items, cudaStream_t stream)
{
    const bool any = p.lists * p.blocks * p.subs * p.k > 0;
    quern_status status = any ? index_slice(p, stream) : QUERN_OK;
    if (status == QUERN_OK && any) status = items(p, true, stream);
    if (status == QUERN_OK) status = settle(p, stream);
    if (status == QUERN_OK && any) status = items(p, false, stream);
    return status == QUERN_OK ? give(p, stream) : status;
}

quern_status run_by(const stage_exec *exec, const index_loss_args *args, of_items *items, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    params p = params_of(exec, args);
    carve(args, memory, &p);
    const int64_t some = slice_of(p);
    quern_status status = choose_blocks(p, stream);
    if (status == QUERN_OK && p.d_keys != NULL)
        status = cuda_report(
            cudaMemsetAsync(p.d_keys, 0, (size_t)(p.lists * p.keys * p.width) * sizeof(float), stream),
            "index_loss, clearing sums");
    for (; status == QUERN_OK && p.lists > 0 && p.first < p.all; p.first += some) {
        p.queries = some < p.all - p.first ? some : p.all - p.first;
        status = run_slice(p, items, stream);
    }
    return status == QUERN_OK ? finish(p, stream) : status;
}

size_t index_loss_bytes(const stage_exec *exec, const index_loss_args *args)
{
    params p = params_of(exec, args);
    return carve(args, NULL, &p);
}

bool index_loss_plain_supports(const stage_exec *exec, const index_loss_args *args, char why[STAGE_WHY_BYTES])
{
    const params p = params_of(exec, args);
    if (p.lists * p.blocks * p.subs <= INT32_MAX && p.lists * p.all * (p.k + 1) <= (int64_t)INT32_MAX * 256 &&
        slice_of(p) * p.k <= INT32_MAX && p.sq.n_kv <= INT32_MAX - 1024)
        return true;
    snprintf(why, STAGE_WHY_BYTES,
             "%lld lists of %lld blocks of %lld queries: the cuda backend takes fewer than 2^31 blocks of "
             "all lists, and 2^39 entries",
             (long long)p.lists, (long long)p.k, (long long)p.all);
    return false;
}

/* Rows of eight channels, read 16 bytes at a time. */
bool index_loss_any_supports(const stage_exec *exec, const index_loss_args *args, char why[STAGE_WHY_BYTES])
{
    char limits[STAGE_WHY_BYTES];
    const params p = params_of(exec, args);
    return p.dtype != QUERN_F32 && p.dim <= DIM_MOST && p.width <= WIDTH_MOST && p.dim % 8 == 0 &&
           p.width % 8 == 0 && rows_aligned16(args->q) && rows_aligned16(args->keys) &&
           rows_aligned16(args->q_index) && rows_aligned16(args->keys_index) &&
           index_loss_plain_supports(exec, args, why) &&
           shared_fits(exec, tensor_bytes(p.dim), "the block indexer's loss", limits);
}

quern_status index_loss_any_run(const stage_exec *exec, const index_loss_args *args, void *memory)
{
    static of_items *const table[2][2] = {{tensor_bf16_128, tensor_bf16_256},
                                          {tensor_f16_128, tensor_f16_256}};
    return run_by(exec, args, table[args->q.dtype == QUERN_F16][args->q.shape[3] > 128], memory);
}

quern_status index_loss_plain_run(const stage_exec *exec, const index_loss_args *args, void *memory)
{
    return run_by(exec, args,
                  args->q.dtype == QUERN_F32    ? plain_f32
                  : args->q.dtype == QUERN_BF16 ? plain_bf16
                                                : plain_f16,
                  memory);
}

} // namespace

extern const variant<index_loss_args> index_loss_any = {"index_loss_any", index_loss_any_supports,
                                                        index_loss_bytes, index_loss_any_run};
extern const variant<index_loss_args> index_loss_plain = {"index_loss_plain", index_loss_plain_supports,
                                                          index_loss_bytes, index_loss_plain_run};
