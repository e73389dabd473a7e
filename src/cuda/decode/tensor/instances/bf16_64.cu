/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16_64.cu - bf16, head dims up to 64. */
#include "decode/tensor/kernel.cuh"

quern_status decode_dense::dense_bf16_64(const stage_exec *, const dense_kernel &a, const launcher &to)
{
    return launch_tensor<bf16, 64>(a, to);
}
