/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select_f32.cu - the selection kernels of f32. */
#include "any/select/select.cuh"

quern_status select_launch_f32(const select_kernel &s, int dim, int64_t views, const launcher &to)
{
    return select_launch<float>(s, dim, views, to);
}
