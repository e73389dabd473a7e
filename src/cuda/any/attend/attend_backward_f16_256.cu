/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "any/attend/attend_any.cuh"
#include "any/attend/attend_backward_keys.cuh"
#include "any/attend/attend_backward_rows.cuh"

quern_status attend_rows_f16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return rows_by_warps<f16, 256>(args, l, to);
}

quern_status attend_keys_f16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return keys_of<f16, 256, warp_products>(args, l, to);
}
