/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_mqa_f16.cu - f16. */
#include "any/attend_mqa/attend_mqa.cuh"

quern_status any_mqa::attend_mqa_f16(const launcher &to, const mqa_kernel &a)
{
    return launch<f16, false>(to, a);
}
