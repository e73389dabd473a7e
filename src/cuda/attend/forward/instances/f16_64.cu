/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/any.cuh"
#include "attend/forward/kernel.cuh"

quern_status attend_forward_f16_64(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return forward_by_warps<f16, 64>(args, l, to);
}
