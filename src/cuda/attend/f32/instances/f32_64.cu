/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/f32/kernel.cuh"

quern_status attend_forward_f32_64(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return by_rows<64, false>(args, l, to);
}

quern_status attend_backward_f32_64(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return backward_f32<64>(args, l, to);
}
