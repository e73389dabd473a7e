/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/f32/kernel.cuh"

quern_status attend_forward_f32_128(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return by_rows<128, false>(args, l, to);
}

quern_status attend_backward_f32_128(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return backward_f32<128>(args, l, to);
}
