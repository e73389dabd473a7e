/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "attend_mqa/any_backward/kernel.cuh"

quern_status any_mqa_backward::pairs_f16(const stage_exec *exec, const mqa_backward &b)
{
    return launch<f16>(exec, b);
}
