/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "select/softmax/kernel.cuh"

quern_status select_softmax_bf16_64(const select_kernel &s, int64_t views, const launcher &to)
{
    return select_softmax<bf16, 64>(s, views, to);
}
