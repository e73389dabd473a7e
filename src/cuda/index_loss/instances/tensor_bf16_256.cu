/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "index_loss/tensor.cuh"

quern_status index_loss::tensor_bf16_256(const params &p, bool weighs, cudaStream_t stream)
{
    return tensor_of<bf16, 256>(p, weighs, stream);
}
