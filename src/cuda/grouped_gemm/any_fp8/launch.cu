/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the grouped product of e4m3 operands for any GPU. */
#include "grouped_gemm/any_fp8/kernel.cuh"
#include "variants.cuh"

using namespace any_gemm;

enum { ALIGNMENT = 16, BLOCKS_A_MULTIPROCESSOR = 3 };

static bool grouped_gemm_any_fp8_supports(const stage_exec *exec, const grouped_gemm_args *args,
                                          char why[STAGE_WHY_BYTES])
{
    return args->fp8 && gemm_takes(args, why) &&
           shared_fits(exec, sizeof(shared), "the grouped product of e4m3 operands", why);
}

static size_t grouped_gemm_any_fp8_bytes(const stage_exec *exec, const grouped_gemm_args *args)
{
    return args->fp8 ? gemm_plan_of(exec, args, ALIGNMENT, NULL).bytes : 0;
}

static quern_status grouped_gemm_any_fp8_run(const stage_exec *exec, const grouped_gemm_args *args,
                                             void *workspace)
{
    const gemm_plan plan = gemm_plan_of(exec, args, ALIGNMENT, workspace);
    if (args->tokens == 0 || args->n == 0) return QUERN_OK;
    quern_status status = fp8_ready(exec, args, plan, false);
    if (status == QUERN_OK)
        status = launch_shared({(cudaStream_t)exec->stream, NULL}, grouped_gemm_any_fp8,
                               dim3((unsigned)exec->multiprocessors * BLOCKS_A_MULTIPROCESSOR), THREADS,
                               sizeof(shared), "grouped_gemm", fp8_params_of(plan));
    return status == QUERN_OK ? gemm_finish(exec, args, plan) : status;
}

/* Under the name of any/launch.cu's: whoever asks for that name means kernels for any GPU. */
extern const variant<grouped_gemm_args> grouped_gemm_any_fp8 = {
    "grouped_gemm_any", grouped_gemm_any_fp8_supports, grouped_gemm_any_fp8_bytes, grouped_gemm_any_fp8_run};
