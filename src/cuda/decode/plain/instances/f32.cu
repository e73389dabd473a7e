/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f32.cu - f32, any head dims. */
#include "decode/plain/kernel.cuh"

quern_status decode_dense::dense_plain_f32(const stage_exec *, const dense_kernel &a, const launcher &to)
{
    return launch_plain<float>(a, to);
}
