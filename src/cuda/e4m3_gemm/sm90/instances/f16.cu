/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "e4m3_gemm/sm90/kernel.cuh"

namespace sm90_e4m3
{

#define INSTANCE(tokens)                                                                                     \
    template <>                                                                                              \
    quern_status launch<__half, tokens>(const stage_exec *exec, const product_params &q,                     \
                                        const CUtensorMap &w, const CUtensorMap &a)                          \
    {                                                                                                        \
        return launch_kernel<__half, tokens>(exec, q, w, a);                                                 \
    }
INSTANCE(8)
INSTANCE(32)
INSTANCE(64)
INSTANCE(128)

} // namespace sm90_e4m3
