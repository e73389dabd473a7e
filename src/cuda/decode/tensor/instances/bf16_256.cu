/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16_256.cu - bf16, head dims up to 256. */
#include "decode/tensor/kernel.cuh"

quern_status decode_dense::dense_bf16_256(const stage_exec *, const dense_kernel &a, const launcher &to)
{
    return launch_tensor<bf16, 256>(a, to);
}
