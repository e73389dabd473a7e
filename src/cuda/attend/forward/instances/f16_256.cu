/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/any.cuh"
#include "attend/forward/kernel.cuh"

quern_status attend_forward_f16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return forward_by_warps<f16, 256>(args, l, to);
}
