/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/any.cuh"
#include "attend/forward/kernel.cuh"

quern_status attend_forward_bf16_128(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return forward_by_warps<bf16, 128>(args, l, to);
}
