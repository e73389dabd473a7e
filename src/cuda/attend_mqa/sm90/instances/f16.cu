/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "attend_mqa/sm90/kernel.cuh"

quern_status sm90_mqa::mqa_f16(const stage_exec *exec, const mqa_kernel &a)
{
    return launch<f16, false>(exec, a);
}
