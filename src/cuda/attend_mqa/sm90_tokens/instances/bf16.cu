/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16. */
#include "attend_mqa/sm90_tokens/kernel.cuh"

quern_status sm90_mqa_tokens::tokens_bf16(const stage_exec *exec, const tokens_kernel &k)
{
    return launch_tokens<bf16>(exec, k);
}
