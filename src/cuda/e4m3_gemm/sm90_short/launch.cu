/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls of few rows Hopper's product whose blocks keep all of their rows takes: those that
 * sm90_few would take longer for. */
#include "e4m3_gemm/sm90/cut.cuh"
#include "e4m3_gemm/sm90_short/kernel.cuh"
#include "variants.cuh"

using namespace sm90_e4m3_short;

enum { SHARED_BYTES = 227 * 1024, GRID_MOST = 65535 };
static_assert(sizeof(shared<8>) <= SHARED_BYTES && sizeof(shared<16>) <= SHARED_BYTES &&
                  sizeof(shared<32>) <= SHARED_BYTES && sizeof(shared<64>) <= SHARED_BYTES,
              "a block fits");

static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    if (!few_take(exec, args, SHARED_BYTES) || args->groups > GRID_MOST || args->a.shape[0] > GRID_MOST)
        return false;
    const product_params q = few_product_of(exec, args, 8);
    const few_cut here = cut_short(exec, q), other = cut_few(exec, q);
    return here.shares > 0 && (exec->variant != NULL || other.shares == 0 || here.cost < other.cost);
}

template <typename T, int TOKENS>
static quern_status run_width(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const product_params q = few_product_of(exec, args, TOKENS);
    const dim3 grid((unsigned)short_blocks(exec, q, TOKENS), (unsigned)q.token_tiles, (unsigned)q.p.groups);
    CUtensorMap w, a;
    const quern_status status = few_describe(args, q, TOKENS, &w, &a);
    return status == QUERN_OK ? launch<T, TOKENS>(exec, q, grid, w, a) : status;
}

template <typename T> static quern_status run_dtype(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const int tokens = cut_short(exec, few_product_of(exec, args, 8)).tokens;
    return tokens == 8    ? run_width<T, 8>(exec, args)
           : tokens == 16 ? run_width<T, 16>(exec, args)
           : tokens == 32 ? run_width<T, 32>(exec, args)
                          : run_width<T, 64>(exec, args);
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *)
{
    if (args->a.shape[0] == 0) return QUERN_OK;
    return args->a.dtype == QUERN_BF16 ? run_dtype<bf16>(exec, args) : run_dtype<f16>(exec, args);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90_short = {"e4m3_gemm_sm90_short", supports, NULL, run};
