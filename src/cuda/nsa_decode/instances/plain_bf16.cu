/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plain_bf16.cu - bf16 on the f32 cores, at any address. */
#include "nsa_decode/plain.cuh"

quern_status nsa_decode::nsa_plain_bf16(const stage_exec *exec, const nsa_kernel &a, const launcher &to)
{
    return launch_plain<bf16>(exec, a, to);
}
