/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16, and rows of bytes. */
#include "attend_mqa/sm90/kernel.cuh"

quern_status sm90_mqa::mqa_bf16(const stage_exec *exec, const mqa_kernel &a)
{
    return a.bytes ? launch<bf16, true>(exec, a) : launch<bf16, false>(exec, a);
}
