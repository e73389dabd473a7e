/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "gemm/sm90_few/kernel.cuh"

namespace sm90_few
{

template <> quern_status launch<__half>(const stage_exec *exec, const few_set<1> &set)
{
    return launch_kernel<__half>(exec, set);
}

template <> quern_status launch<__half>(const stage_exec *exec, const few_set<TOGETHER> &set)
{
    return launch_kernel<__half>(exec, set);
}

} // namespace sm90_few
