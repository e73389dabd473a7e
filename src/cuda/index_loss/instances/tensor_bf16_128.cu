/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "index_loss/tensor.cuh"

quern_status index_loss::tensor_bf16_128(const params &p, bool weighs, cudaStream_t stream)
{
    return tensor_of<bf16, 128>(p, weighs, stream);
}

size_t index_loss::tensor_bytes(int32_t dim)
{
    return dim <= 128 ? sizeof(tensor_shared<bf16, 128>) : sizeof(tensor_shared<bf16, 256>);
}
