/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "gate/any/kernel.cuh"

quern_status gate_forward_f32(const gate_kernel &a, cudaStream_t stream)
{
    return launch<float, false>(a, stream);
}

quern_status gate_backward_f32(const gate_kernel &a, cudaStream_t stream)
{
    return launch<float, true>(a, stream);
}
