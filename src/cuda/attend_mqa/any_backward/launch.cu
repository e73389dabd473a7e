/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - which calls the backward of any GPU takes. */
#include "attend_mqa/any_backward/kernel.cuh"
#include "variants.cuh"

static bool attend_mqa_backward_any_supports(const stage_exec *exec, const attend_mqa_args *args,
                                             char why[STAGE_WHY_BYTES])
{
    return mqa_backward_takes(args, why) && shared_fits(exec, sizeof(any_mqa_backward::shared<bf16>),
                                                        "backward of attention over entries", why);
}

static size_t attend_mqa_backward_any_bytes(const stage_exec *, const attend_mqa_args *args)
{
    return mqa_backward_bytes(args, any_mqa_backward::HEADS);
}

static quern_status attend_mqa_backward_any_run(const stage_exec *exec, const attend_mqa_args *args,
                                                void *workspace)
{
    mqa_pairs *const pairs =
        args->q.dtype == QUERN_BF16 ? any_mqa_backward::pairs_bf16 : any_mqa_backward::pairs_f16;
    return mqa_backward_run(exec, args, workspace, any_mqa_backward::HEADS, pairs);
}

extern const variant<attend_mqa_args> attend_mqa_backward_any = {
    "attend_mqa_backward_any", attend_mqa_backward_any_supports, attend_mqa_backward_any_bytes,
    attend_mqa_backward_any_run};
