/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "grouped_gemm/sm90/wide.cuh"

template <>
quern_status sm90_gemm::launch_wide<bf16>(const stage_exec *exec, const gemm_params &p, const CUtensorMap &a)
{
    return launch_wide_kernel<bf16, WIDE_PANELS>(exec, p, a);
}
