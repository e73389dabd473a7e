/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16, and rows of bytes. */
#include "attend_mqa/any/kernel.cuh"

quern_status any_mqa::attend_mqa_bf16(const launcher &to, const mqa_kernel &a)
{
    return a.bytes ? launch<bf16, true>(to, a) : launch<bf16, false>(to, a);
}
