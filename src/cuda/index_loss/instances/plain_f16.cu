/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "index_loss/plain.cuh"

quern_status index_loss::plain_f16(const params &p, bool weighs, cudaStream_t stream)
{
    return plain<f16>(p, weighs, stream);
}
