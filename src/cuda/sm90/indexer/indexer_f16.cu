/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_f16.cu - f16. */
#include "sm90/indexer/kernel.cuh"

quern_status sm90_indexer::indexer_f16(const stage_exec *exec, const index_kernel &a)
{
    return run<f16>(exec, a);
}
