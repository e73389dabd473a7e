/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_mqa_bf16.cu - bf16, and rows of bytes. */
#include "any/attend_mqa/attend_mqa.cuh"

quern_status any_mqa::attend_mqa_bf16(const launcher &to, const mqa_kernel &a)
{
    return a.bytes ? launch<bf16, true>(to, a) : launch<bf16, false>(to, a);
}
