/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "any/select/select.cuh"

quern_status select_mean_f16(const select_kernel &s, int64_t views, const launcher &to)
{
    return launch<f16, 64, 0>(s, views, to);
}
