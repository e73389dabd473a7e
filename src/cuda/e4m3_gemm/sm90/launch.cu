/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's product with e4m3 weights takes. */
#include "e4m3_gemm/sm90/kernel.cuh"
#include "variants.cuh"

using namespace sm90_e4m3;

enum { SHARED_BYTES = 227 * 1024 };
static_assert(sizeof(shared) <= SHARED_BYTES, "a block fits");

/* Behind a group's last column stand the next group's, which are no zeros. */
static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && !args->round && tiles_take(args) &&
           tiles_take_rows(args);
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *)
{
    const product_params q = product_of(exec, args, TOKENS);
    const launcher to = {(cudaStream_t)exec->stream, NULL};
    CUtensorMap w, a;
    if (q.p.tokens == 0) return QUERN_OK;
    quern_status status = describe_bytes(&w, args->codes.data, args->codes.shape[0], args->codes.shape[1],
                                         q.p.code_row, TILE_ROWS);
    if (status == QUERN_OK) status = tma_describe(&a, rows_of_a(args), 1, TOKENS);
    if (status != QUERN_OK) return status;
    const int64_t tiles = q.panels * q.p.groups * q.token_tiles;
    const dim3 grid((unsigned)(tiles < exec->multiprocessors ? tiles : (int64_t)exec->multiprocessors));
    return args->a.dtype == QUERN_BF16
               ? launch_shared(to, e4m3_gemm_sm90<bf16>, grid, THREADS, sizeof(shared), "e4m3_gemm", q, w, a)
               : launch_shared(to, e4m3_gemm_sm90<f16>, grid, THREADS, sizeof(shared), "e4m3_gemm", q, w, a);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90 = {"e4m3_gemm_sm90", supports, NULL, run};
