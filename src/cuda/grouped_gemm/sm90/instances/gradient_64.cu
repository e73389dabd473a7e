/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "grouped_gemm/sm90/kernel.cuh"

template <>
quern_status sm90_gemm::launch_gradient<64>(const stage_exec *exec, const gemm_params &p,
                                            const CUtensorMap &a)
{
    return launch_kernel<bf16, 64, true>(exec, p, a);
}
