/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16_256.cu - bf16, index dims up to 256. */
#include "index_decode/kernel.cuh"

quern_status index_decode::index_bf16_256(const stage_exec *, const index_kernel &a, const launcher &to)
{
    return launch<tensor_scores<bf16, 256>>(index_tensor<bf16, 256>, a, to);
}
