/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16_256.cu - bf16 on the tensor cores, head dims up to 256. */
#include "nsa_decode/tensor.cuh"

quern_status nsa_decode::nsa_bf16_256(const stage_exec *exec, const nsa_kernel &a, const launcher &to)
{
    return launch_tensor<bf16, 256>(exec, a, to);
}
