/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "any/select/select.cuh"

quern_status select_mean_bf16(const select_kernel &s, int64_t views, const launcher &to)
{
    return launch<bf16, 64, 0>(s, views, to);
}
