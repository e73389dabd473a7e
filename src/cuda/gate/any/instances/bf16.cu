/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "gate/any/kernel.cuh"

quern_status gate_forward_bf16(const gate_kernel &a, cudaStream_t stream)
{
    return launch<bf16, false>(a, stream);
}

quern_status gate_backward_bf16(const gate_kernel &a, cudaStream_t stream)
{
    return launch<bf16, true>(a, stream);
}
