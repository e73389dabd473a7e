/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's product with e4m3 weights takes, how wide a tile is, and how many blocks
 * share one. */
#include "e4m3_gemm/sm90/kernel.cuh"
#include "variants.cuh"

using namespace sm90_e4m3;

enum { SHARED_BYTES = 227 * 1024, SHARES_MOST = 8 };
static_assert(sizeof(shared<8>) <= SHARED_BYTES && sizeof(shared<32>) <= SHARED_BYTES &&
                  sizeof(shared<64>) <= SHARED_BYTES && sizeof(shared<128>) <= SHARED_BYTES,
              "a block fits");

/* Behind a group's last column stand the next group's, which are no zeros. */
static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && !args->round && tiles_take(args) &&
           (args->groups == 1 || args->codes.shape[1] % RUN == 0) &&
           (args->a.shape[0] == 0 || tma_can(rows_of_a(args)));
}

static int64_t tiles_in(const product_params &q)
{
    return q.panels * q.p.groups * q.token_tiles;
}

/* Blocks that run at once: sixteen clusters of eight took two turns on an H200. */
static int blocks_at_once(const stage_exec *exec, int shares)
{
    return shares < SHARES_MOST ? exec->multiprocessors : exec->multiprocessors * 7 / 8;
}

static int shares_of(const stage_exec *exec, const product_params &q, int parts)
{
    int shares = 1;
    while (2 * shares <= SHARES_MOST && 2 * shares <= q.runs &&
           tiles_in(q) * 2 * shares <= blocks_at_once(exec, 2 * shares))
        shares *= 2;
    return (q.runs + shares - 1) / shares <= parts ? shares : 1;
}

template <typename T, int TOKENS>
static quern_status run_width(const stage_exec *exec, const e4m3_gemm_args *args)
{
    product_params q = product_of(exec, args, TOKENS);
    CUtensorMap w, a;
    q.shares = shares_of(exec, q, form<TOKENS>::PARTS);
    quern_status status = describe_bytes(&w, args->codes.data, args->codes.shape[0], args->codes.shape[1],
                                         q.p.code_row, TILE_ROWS);
    if (status == QUERN_OK) status = tma_describe(&a, rows_of_a(args), 1, TOKENS);
    return status == QUERN_OK ? launch<T, TOKENS>(exec, q, w, a) : status;
}

/* The narrowest tiles that are multiplied at once: a run takes nearly as long for few tokens as for many, so
 * of few tiles more are better, though their blocks read W again, from the L2 cache. */
static int width_of(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const int64_t rows = args->a.shape[0];
    const int widest = rows <= 8 ? 8 : rows <= 32 ? 32 : rows <= 64 ? 64 : 128;
    for (int width = 32; rows <= 128 && width < widest; width *= 2) {
        const product_params q = product_of(exec, args, width);
        if (tiles_in(q) <= exec->multiprocessors) return width;
    }
    return widest;
}

template <typename T> static quern_status run_dtype(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const int width = width_of(exec, args);
    return width == 8    ? run_width<T, 8>(exec, args)
           : width == 32 ? run_width<T, 32>(exec, args)
           : width == 64 ? run_width<T, 64>(exec, args)
                         : run_width<T, 128>(exec, args);
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *)
{
    if (args->a.shape[0] == 0) return QUERN_OK;
    return args->a.dtype == QUERN_BF16 ? run_dtype<bf16>(exec, args) : run_dtype<f16>(exec, args);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90 = {"e4m3_gemm_sm90", supports, NULL, run};
