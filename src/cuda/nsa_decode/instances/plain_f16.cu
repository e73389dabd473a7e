/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* plain_f16.cu - f16 on the f32 cores, at any address. */
#include "nsa_decode/plain.cuh"

quern_status nsa_decode::nsa_plain_f16(const stage_exec *exec, const nsa_kernel &a, const launcher &to)
{
    return launch_plain<f16>(exec, a, to);
}
