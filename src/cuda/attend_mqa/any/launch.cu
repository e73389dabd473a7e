/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls the kernel of any GPU takes. */
#include "attend_mqa/any/kernel.cuh"
#include "variants.cuh"

static bool attend_mqa_any_supports(const stage_exec *exec, const attend_mqa_args *args,
                                    char why[STAGE_WHY_BYTES])
{
    return mqa_takes(args, why) &&
           shared_fits(exec, sizeof(any_mqa::shared<bf16>), "attention over entries", why);
}

static quern_status attend_mqa_any_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    const mqa_planner plan = mqa_planner_of(exec, args, workspace);
    const mqa_kernel a = mqa_kernel_of(args, plan);
    const quern_status status = mqa_make_plan(exec, plan, a.rows);
    if (status != QUERN_OK) return status;
    const launcher to = {(cudaStream_t)exec->stream, NULL};
    return args->q.dtype == QUERN_BF16 ? any_mqa::attend_mqa_bf16(to, a) : any_mqa::attend_mqa_f16(to, a);
}

extern const variant<attend_mqa_args> attend_mqa_any = {"attend_mqa_any", attend_mqa_any_supports,
                                                        attend_mqa_bytes, attend_mqa_any_run};
