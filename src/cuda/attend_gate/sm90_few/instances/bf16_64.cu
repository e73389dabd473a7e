/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend_gate/sm90_few/kernel.cuh"

quern_status sm90_gated_few_bf16_64(const attend_gate_args *args, const sm90_gated &a,
                                    const sm90_device &device, void *workspace, cudaStream_t stream)
{
    return sm90_gate::launch_gated_few<bf16, 64>(args, a, device, workspace, stream);
}
