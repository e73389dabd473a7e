/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select_f16.cu - the selection kernels of f16. */
#include "any/select/select.cuh"

quern_status select_launch_f16(const select_kernel &s, int dim, int64_t views, const launcher &to)
{
    return select_launch<f16>(s, dim, views, to);
}
