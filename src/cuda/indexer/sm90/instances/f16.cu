/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_f16(const stage_exec *exec, const index_kernel &a)
{
    return run<f16>(exec, a);
}
