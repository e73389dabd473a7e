/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's kernel takes. */
#include "attend_mqa/sm90/shared.cuh"
#include "variants.cuh"

static bool attend_mqa_sm90_supports(const stage_exec *exec, const attend_mqa_args *args, char *)
{
    enum { SHARED_BYTES = 227 * 1024 };
    char limits[STAGE_WHY_BYTES];
    return exec->compute == 90 && exec->shared_bytes >= SHARED_BYTES && args->q.shape[3] == MQA_DIM &&
           mqa_takes(args, limits);
}

static quern_status attend_mqa_sm90_run(const stage_exec *exec, const attend_mqa_args *args, void *workspace)
{
    if (args->q.shape[0] == 0 || args->q.shape[1] == 0) return QUERN_OK;
    const mqa_planner plan = mqa_planner_of(exec, args, workspace);
    const mqa_kernel a = mqa_kernel_of(args, plan);
    const quern_status status = mqa_make_plan(exec, plan, a.rows);
    if (status != QUERN_OK) return status;
    return args->q.dtype == QUERN_BF16 ? sm90_mqa::mqa_bf16(exec, a) : sm90_mqa::mqa_f16(exec, a);
}

extern const variant<attend_mqa_args> attend_mqa_sm90 = {"attend_mqa_sm90", attend_mqa_sm90_supports,
                                                         attend_mqa_bytes, attend_mqa_sm90_run};
