/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "select/softmax/kernel.cuh"

quern_status select_softmax_f32(const select_kernel &s, int64_t views, const launcher &to)
{
    return launch<float, 64, 1>(s, views, to);
}
