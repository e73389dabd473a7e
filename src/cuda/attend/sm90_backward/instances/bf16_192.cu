/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_backward/kernel.cuh"

quern_status sm90_backward_bf16_192(const attend_args *args, const attend_launch &l,
                                    const sm90_backward_plan &plan, const quern_tensor &d_q,
                                    cudaStream_t stream)
{
    return sm90_backward::run<bf16, 192, 128>(args, l, plan, d_q, stream);
}
