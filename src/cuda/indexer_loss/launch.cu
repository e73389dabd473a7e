/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the indexer_loss stage: its workspace, how many entries a tile has, and its kernels. */
#include "indexer_loss/params.cuh"
#include "variants.cuh"

enum { SHARES = 132, TILE_MOST = 64, TILE_LEAST = 16 };
static const int64_t share_bytes = (int64_t)1 << 30; /* of all shares' sums, about */

static bool strided16(const quern_tensor &t)
{
    return rows_aligned(t, 16);
}

loss_params loss_params_of(const stage_exec *exec, const indexer_loss_args *args)
{
    loss_params p = {};
    p.batch = args->q_index.shape[0];
    p.queries = args->q_index.shape[1];
    p.index_heads = (int)args->q_index.shape[2];
    p.width = (int)args->q_index.shape[3];
    p.entries = args->keys_index.shape[1];
    p.heads = (int)args->q.shape[2];
    p.dim = (int)args->q.shape[3];
    p.listed = present(args->list) ? args->list.shape[2] : -1;
    p.ratio = args->ratio;
    p.position = args->position;
    p.scale = args->scale;
    p.scale_index = args->scale_index;
    p.lambda = args->lambda;
    p.dtype = args->q_index.dtype;
    p.w_dtype = args->w.dtype;
    p.q_wide = strided16(args->q), p.keys_wide = strided16(args->keys);
    p.q_index_wide = strided16(args->q_index), p.keys_index_wide = strided16(args->keys_index);
    p.q = view4_of(args->q), p.keys = view4_of(args->keys);
    p.q_index = view4_of(args->q_index), p.keys_index = view4_of(args->keys_index);
    p.w = view4_of(args->w), p.d_w = view4_of(args->d_w);
    p.d_q_index = view4_of(args->d_q_index), p.d_keys_index = view4_of(args->d_keys_index);
    p.lse_win = view3_of(args->lse_win), p.row_loss = view3_of(args->row_loss);
    p.sink = (const float *)args->sink.data;
    p.list = (const int32_t *)args->list.data;
    for (int i = 0; i < 2 && present(args->list); i++) p.list_s[i] = args->list.strides[i];
    p.loss = (float *)args->loss.data;
    p.status = exec->status;
    return p;
}

/* How many shares a sequence's queries are cut into. */
static void choose_shares(loss_params *p)
{
    const int64_t sums = p->batch * p->entries * p->width * (int64_t)sizeof(float),
                  most = sums > 0 ? share_bytes / sums : (int64_t)SHARES;
    p->shares = most < 8 ? 8 : most > SHARES ? (int64_t)SHARES : most;
    p->share_queries = (p->queries + p->shares - 1) / p->shares;
    p->shares = p->share_queries > 0 ? (p->queries + p->share_queries - 1) / p->share_queries : 0;
}

static size_t block_bytes(const loss_params &p)
{
    return p.dtype == QUERN_F32    ? loss_bytes<float>(p)
           : p.dtype == QUERN_BF16 ? loss_bytes<bf16>(p)
                                   : loss_bytes<f16>(p);
}

/* The widest tile that a block can hold, or the least. */
static void choose_tile(const stage_exec *exec, loss_params *p)
{
    for (p->tile = TILE_MOST; p->tile > TILE_LEAST && block_bytes(*p) > exec->shared_bytes; p->tile /= 2)
        continue;
}

void loss_carve(arena *a, loss_params *p)
{
    const size_t all = (size_t)(p->batch * p->queries), listed = p->listed > 0 ? (size_t)p->listed : 0;
    p->losses = (double *)arena_take(a, all * sizeof(double));
    p->rows = (int32_t *)arena_take(a, sizeof(int32_t));
    p->count = (int32_t *)arena_take(a, all * sizeof(int32_t));
    p->chosen = (int32_t *)arena_take(a, all * listed * sizeof(int32_t));
    p->kept = (uint8_t *)arena_take(a, all * listed);
}

static size_t carve(const indexer_loss_args *args, void *memory, loss_params *p)
{
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    choose_shares(p);
    loss_carve(&a, p);
    if (present(args->d_keys_index))
        p->d_keys = (float *)arena_take(&a, (size_t)(p->batch * p->shares) * (size_t)(p->entries * p->width) *
                                                sizeof(float));
    return a.used + ARENA_ALIGN - 1;
}

static bool supports(const stage_exec *exec, const indexer_loss_args *args, char why[STAGE_WHY_BYTES])
{
    loss_params p = loss_params_of(exec, args);
    if (p.heads > HEADS_MOST || p.index_heads > HEADS_MOST || p.width > INDEX_WIDTH_MOST) {
        snprintf(why, STAGE_WHY_BYTES,
                 "%d and %d heads, %d channels of the indexer: the cuda backend takes up to %d and %d",
                 p.heads, p.index_heads, p.width, HEADS_MOST, INDEX_WIDTH_MOST);
        return false;
    }
    choose_tile(exec, &p);
    return shared_fits(exec, block_bytes(p), "the indexer's loss", why);
}

static size_t workspace(const stage_exec *exec, const indexer_loss_args *args)
{
    loss_params p = loss_params_of(exec, args);
    return carve(args, NULL, &p);
}

static quern_status run(const stage_exec *exec, const indexer_loss_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    loss_params p = loss_params_of(exec, args);
    choose_tile(exec, &p);
    carve(args, memory, &p);
    quern_status status = loss_choose(p, false, stream);
    if (status == QUERN_OK && p.d_keys != NULL)
        status = cuda_report(
            cudaMemsetAsync(p.d_keys, 0, (size_t)(p.batch * p.shares * p.entries * p.width) * sizeof(float),
                            stream),
            "indexer_loss, clearing sums");
    if (status == QUERN_OK)
        status = p.dtype == QUERN_F32    ? loss_run<float>(p, stream)
                 : p.dtype == QUERN_BF16 ? loss_run<bf16>(p, stream)
                                         : loss_run<f16>(p, stream);
    return status == QUERN_OK ? loss_finish(p, stream) : status;
}

extern const variant<indexer_loss_args> indexer_loss_any = {"indexer_loss_any", supports, workspace, run};
