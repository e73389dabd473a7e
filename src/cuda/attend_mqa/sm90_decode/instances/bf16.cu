/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16, and rows of bytes. */
#include "attend_mqa/sm90_decode/share.cuh"

quern_status sm90_mqa_decode::decode_bf16(const stage_exec *exec, const decode_kernel &w)
{
    return w.a.bytes ? launch<bf16, true>(exec, w) : launch<bf16, false>(exec, w);
}
