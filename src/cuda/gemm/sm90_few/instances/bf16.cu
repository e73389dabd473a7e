/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "gemm/sm90_few/kernel.cuh"

namespace sm90_few
{

template <>
quern_status launch<bf16>(const stage_exec *exec, const few_params &q, const CUtensorMap &a,
                          const CUtensorMap &b)
{
    return launch_kernel<bf16>(exec, q, a, b);
}

} // namespace sm90_few
