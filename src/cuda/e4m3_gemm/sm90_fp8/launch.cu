/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's product of e4m3 rows takes, and where their codes and scales stand. */
#include "e4m3_gemm/sm90_fp8/kernel.cuh"
#include "variants.cuh"

using namespace sm90_e4m3_fp8;

enum { SHARED_BYTES = 227 * 1024 };
static_assert(sizeof(shared) <= SHARED_BYTES, "a block fits");

static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->round && tiles_take(args);
}

/* Fills in where a's codes and scales stand; the bytes. */
static size_t place(const e4m3_gemm_args *args, void *memory, e4m3_round_params *r)
{
    const int64_t runs = (args->codes.shape[1] + RUN - 1) / RUN, all = args->groups * runs;
    arena a = {NULL, 0};
    if (memory != NULL) a = arena_on(memory);
    r->out_row = all * RUN;
    r->scale_row = (args->a.shape[0] + TOKENS - 1) / TOKENS * TOKENS;
    r->out = arena_take(&a, (size_t)(args->a.shape[0] * r->out_row));
    r->scale = (float *)arena_take(&a, (size_t)(all * r->scale_row) * sizeof(float));
    return a.used + ARENA_ALIGN - 1;
}

static size_t workspace(const stage_exec *, const e4m3_gemm_args *args)
{
    e4m3_round_params r = {};
    return args->round ? place(args, NULL, &r) : 0;
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *memory)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    product_params q = product_of(exec, args, TOKENS);
    e4m3_round_params r = e4m3_round_params_of(q.p, args->a);
    CUtensorMap w, a;
    if (q.p.tokens == 0) return QUERN_OK;
    place(args, memory, &r);
    q.row_scale = r.scale;
    q.scale_row = r.scale_row;
    quern_status status = e4m3_round_rows(r, stream);
    if (status == QUERN_OK)
        status = describe_bytes(&w, args->codes.data, args->codes.shape[0], args->codes.shape[1],
                                q.p.code_row, TILE_ROWS);
    if (status == QUERN_OK) status = describe_bytes(&a, r.out, q.p.tokens, r.out_row, r.out_row, TOKENS);
    if (status != QUERN_OK) return status;
    const int64_t tiles = q.panels * q.p.groups * q.token_tiles;
    const dim3 grid((unsigned)(tiles < exec->multiprocessors ? tiles : (int64_t)exec->multiprocessors));
    const launcher to = {stream, NULL};
    return args->a.dtype == QUERN_BF16 ? launch_shared(to, e4m3_gemm_sm90_fp8<bf16>, grid, THREADS,
                                                       sizeof(shared), "e4m3_gemm", q, w, a)
                                       : launch_shared(to, e4m3_gemm_sm90_fp8<f16>, grid, THREADS,
                                                       sizeof(shared), "e4m3_gemm", q, w, a);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90_fp8 = {"e4m3_gemm_sm90_fp8", supports, workspace, run};
