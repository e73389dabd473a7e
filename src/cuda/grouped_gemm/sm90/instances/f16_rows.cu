/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "grouped_gemm/sm90/rows.cuh"

#define INSTANCE(eights)                                                                                     \
    template <>                                                                                              \
    quern_status sm90_gemm::launch_rows<f16, eights>(const stage_exec *exec, const gemm_params &p,           \
                                                     const CUtensorMap &a)                                   \
    {                                                                                                        \
        return launch_rows_kernel<f16, eights>(exec, p, a);                                                  \
    }
INSTANCE(18)
INSTANCE(20)
