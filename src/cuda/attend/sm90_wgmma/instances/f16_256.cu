/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_wgmma/kernels.cuh"

quern_status wgmma_forward_f16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return forward_by_warpgroups<f16, 256>(args, l, to);
}

quern_status wgmma_rows_f16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return rows_by_warpgroups<f16, 256>(args, l, to);
}

quern_status wgmma_keys_f16_256(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return keys_by_warpgroups<f16, 256>(args, l, to);
}
