/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16, any head dims. */
#include "decode/plain/kernel.cuh"

quern_status decode_dense::dense_plain_f16(const stage_exec *, const dense_kernel &a, const launcher &to)
{
    return launch_plain<f16>(a, to);
}
