/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the grouped product for any GPU. */
#include "grouped_gemm/any/kernel.cuh"
#include "variants.cuh"

using namespace any_gemm;

enum { ALIGNMENT = 16, BLOCKS_A_MULTIPROCESSOR = 4 };

static bool grouped_gemm_any_supports(const stage_exec *exec, const grouped_gemm_args *args,
                                      char why[STAGE_WHY_BYTES])
{
    return !args->fp8 && gemm_takes(args, why) &&
           shared_fits(exec, sizeof(shared), "the grouped product", why);
}

static size_t grouped_gemm_any_bytes(const stage_exec *exec, const grouped_gemm_args *args)
{
    return gemm_plan_of(exec, args, ALIGNMENT, NULL).bytes;
}

static quern_status grouped_gemm_any_run(const stage_exec *exec, const grouped_gemm_args *args,
                                         void *workspace)
{
    const gemm_plan plan = gemm_plan_of(exec, args, ALIGNMENT, workspace);
    if (args->tokens == 0 || args->n == 0) return QUERN_OK;
    quern_status status = gemm_ready(exec, args, plan);
    if (status != QUERN_OK) return status;
    const launcher to = {(cudaStream_t)exec->stream, NULL};
    const dim3 grid((unsigned)exec->multiprocessors * BLOCKS_A_MULTIPROCESSOR);
    status = plan.f16_product ? launch_shared(to, grouped_gemm_any<f16>, grid, THREADS, sizeof(shared),
                                              "grouped_gemm", plan.p)
                              : launch_shared(to, grouped_gemm_any<bf16>, grid, THREADS, sizeof(shared),
                                              "grouped_gemm", plan.p);
    return status == QUERN_OK ? gemm_finish(exec, args, plan) : status;
}

extern const variant<grouped_gemm_args> grouped_gemm_any = {"grouped_gemm_any", grouped_gemm_any_supports,
                                                            grouped_gemm_any_bytes, grouped_gemm_any_run};
