/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select_bf16.cu - the selection kernels of bf16. */
#include "any/select/select.cuh"

quern_status select_launch_bf16(const select_kernel &s, int dim, int64_t views, const launcher &to)
{
    return select_launch<bf16>(s, dim, views, to);
}
