/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "e4m3_gemm/sm90_few/kernel.cuh"

namespace sm90_e4m3_few
{

#define INSTANCE(tokens)                                                                                     \
    template <>                                                                                              \
    quern_status launch<bf16, tokens>(const stage_exec *exec, const product_params &q, const CUtensorMap &w, \
                                      const CUtensorMap &a)                                                  \
    {                                                                                                        \
        return launch_kernel<bf16, tokens>(exec, q, w, a);                                                   \
    }
INSTANCE(8)
INSTANCE(16)
INSTANCE(32)
INSTANCE(64)

} // namespace sm90_e4m3_few
