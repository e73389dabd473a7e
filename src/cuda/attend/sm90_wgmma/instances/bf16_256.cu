/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_wgmma/kernels.cuh"

quern_status wgmma_forward_bf16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return forward_by_warpgroups<bf16, 256>(args, l, to);
}

quern_status wgmma_rows_bf16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return rows_by_warpgroups<bf16, 256>(args, l, to);
}

quern_status wgmma_keys_bf16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return keys_by_warpgroups<bf16, 256>(args, l, to);
}
