/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "attend_mqa/any/kernel.cuh"

quern_status any_mqa::attend_mqa_f16(const launcher &to, const mqa_kernel &a)
{
    return launch<f16, false>(to, a);
}
