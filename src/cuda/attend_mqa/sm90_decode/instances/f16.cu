/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "attend_mqa/sm90_decode/share.cuh"

quern_status sm90_mqa_decode::decode_f16(const stage_exec *exec, const decode_kernel &w)
{
    return launch<f16, false>(exec, w);
}
