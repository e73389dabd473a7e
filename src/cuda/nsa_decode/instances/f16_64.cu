/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16_64.cu - f16 on the tensor cores, head dims up to 64. */
#include "nsa_decode/tensor.cuh"

quern_status nsa_decode::nsa_f16_64(const stage_exec *exec, const nsa_kernel &a, const launcher &to)
{
    return launch_tensor<f16, 64>(exec, a, to);
}
