/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/any.cuh"
#include "attend/backward/dkv.cuh"
#include "attend/backward/dq.cuh"

quern_status attend_rows_bf16_64(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return rows_by_warps<bf16, 64>(args, l, to);
}

quern_status attend_keys_bf16_64(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return keys_of<bf16, 64, warp_products>(args, l, to);
}
