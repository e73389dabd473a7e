/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16. */
#include "attend_mqa/sm90_backward/kernel.cuh"

quern_status sm90_mqa_backward::pairs_bf16(const stage_exec *exec, const mqa_backward &b)
{
    return launch<bf16>(exec, b);
}
