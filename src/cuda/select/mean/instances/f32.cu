/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "select/mean/kernel.cuh"

quern_status select_mean_f32(const select_kernel &s, int64_t views, const launcher &to)
{
    return select_by_mean::run<float>(s, views, to);
}
