/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "select/softmax/kernel.cuh"

quern_status select_softmax_f16_128(const select_kernel &s, int64_t views, const launcher &to)
{
    return select_softmax<f16, 128>(s, views, to);
}
