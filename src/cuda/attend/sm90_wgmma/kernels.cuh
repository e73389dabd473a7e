/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* kernels.cuh - any GPU's kernels with Hopper's warpgroup products: a function for each dtype and padded
 * head dim. They take lists, and heads wider than sm90_backward/kernel.cuh has registers for. */
#ifndef QUERN_CUDA_ATTEND_SM90_WGMMA_KERNELS_CUH
#define QUERN_CUDA_ATTEND_SM90_WGMMA_KERNELS_CUH

#include "attend/any.cuh"
#include "attend/backward/dkv.cuh"
#include "attend/backward/dq.cuh"
#include "attend/forward/kernel.cuh"
#include "attend/sm90_wgmma/products.cuh"

/* Lists whose tiles fill more than a warp's rows. */
template <typename T, int DP>
static quern_status forward_by_warpgroups(const attend_args *args, const attend_launch &l, const launcher &to)
{
    return launch_forward<T, DP, 8, 1, true, warpgroup_products>(args, l.kernel, to);
}

template <typename T, int DP>
static quern_status rows_by_warpgroups(const attend_args *args, const attend_launch &l, const launcher &to)
{
    constexpr int WM = DP > 128 ? 4 : 8;
    if (l.listed) return launch_rows<T, DP, WM, 1, true, warpgroup_products>(args, l.kernel, to);
    if constexpr (DP > 128) return launch_rows<T, DP, WM, 1, false, warpgroup_products>(args, l.kernel, to);
    return QUERN_ERR_UNSUPPORTED;
}

template <typename T, int DP>
static quern_status keys_by_warpgroups(const attend_args *args, const attend_launch &l, const launcher &to)
{
    if (l.listed) return keys_of_list<T, DP, warpgroup_products>(args, l, to);
    if constexpr (DP > 128) return keys_by<T, DP, 4, false, warpgroup_products>(args, l.kernel, to);
    return QUERN_ERR_UNSUPPORTED;
}

#endif
