/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls Hopper's backward takes. */
#include "attend_mqa/sm90_backward/shared.cuh"
#include "variants.cuh"

static bool attend_mqa_backward_sm90_supports(const stage_exec *exec, const attend_mqa_args *args, char *)
{
    char limits[STAGE_WHY_BYTES];
    return exec->compute == 90 && exec->shared_bytes >= sizeof(sm90_mqa_backward::shared<bf16>) &&
           args->q.shape[3] == MQA_DIM && mqa_backward_takes(args, limits);
}

static size_t attend_mqa_backward_sm90_bytes(const stage_exec *, const attend_mqa_args *args)
{
    return mqa_backward_bytes(args, sm90_mqa_backward::HEADS);
}

static quern_status attend_mqa_backward_sm90_run(const stage_exec *exec, const attend_mqa_args *args,
                                                 void *workspace)
{
    mqa_pairs *const pairs =
        args->q.dtype == QUERN_BF16 ? sm90_mqa_backward::pairs_bf16 : sm90_mqa_backward::pairs_f16;
    return mqa_backward_run(exec, args, workspace, sm90_mqa_backward::HEADS, pairs);
}

extern const variant<attend_mqa_args> attend_mqa_backward_sm90 = {
    "attend_mqa_backward_sm90", attend_mqa_backward_sm90_supports, attend_mqa_backward_sm90_bytes,
    attend_mqa_backward_sm90_run};
