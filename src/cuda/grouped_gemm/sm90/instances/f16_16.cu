/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "grouped_gemm/sm90/kernel.cuh"

template <>
quern_status sm90_gemm::launch<f16, 16>(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a)
{
    return launch_kernel<f16, 16>(exec, p, a);
}
