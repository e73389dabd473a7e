/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls of few rows Hopper's product for them takes. */
#include "e4m3_gemm/sm90/cut.cuh"
#include "e4m3_gemm/sm90_few/kernel.cuh"
#include "variants.cuh"

using namespace sm90_e4m3_few;

enum { SHARED_BYTES = 227 * 1024 };
static_assert(sizeof(shared<8>) <= SHARED_BYTES && sizeof(shared<16>) <= SHARED_BYTES &&
                  sizeof(shared<32>) <= SHARED_BYTES && sizeof(shared<64>) <= SHARED_BYTES,
              "a block fits");
static_assert(few_widths[0].kept <= form<8>::SUMS && few_widths[1].kept <= form<16>::SUMS &&
                  few_widths[2].kept <= form<32>::SUMS && few_widths[3].kept <= form<64>::SUMS &&
                  (int)RUNS_MOST == (int)FEW_RUNS,
              "what a cut keeps has room");

static bool supports(const stage_exec *exec, const e4m3_gemm_args *args, char *)
{
    return few_take(exec, args, SHARED_BYTES) && (args->codes.shape[1] + RUN - 1) / RUN <= FEW_RUNS;
}

template <typename T, int TOKENS>
static quern_status run_width(const stage_exec *exec, const e4m3_gemm_args *args, int shares)
{
    product_params q = few_product_of(exec, args, TOKENS);
    CUtensorMap w, a;
    q.shares = shares;
    const quern_status status = few_describe(args, q, TOKENS, &w, &a);
    return status == QUERN_OK ? launch<T, TOKENS>(exec, q, w, a) : status;
}

template <typename T> static quern_status run_dtype(const stage_exec *exec, const e4m3_gemm_args *args)
{
    const few_cut cut = cut_few(exec, few_product_of(exec, args, 8));
    return cut.tokens == 8    ? run_width<T, 8>(exec, args, cut.shares)
           : cut.tokens == 16 ? run_width<T, 16>(exec, args, cut.shares)
           : cut.tokens == 32 ? run_width<T, 32>(exec, args, cut.shares)
                              : run_width<T, 64>(exec, args, cut.shares);
}

static quern_status run(const stage_exec *exec, const e4m3_gemm_args *args, void *)
{
    if (args->a.shape[0] == 0) return QUERN_OK;
    return args->a.dtype == QUERN_BF16 ? run_dtype<bf16>(exec, args) : run_dtype<f16>(exec, args);
}

extern const variant<e4m3_gemm_args> e4m3_gemm_sm90_few = {"e4m3_gemm_sm90_few", supports, NULL, run};
