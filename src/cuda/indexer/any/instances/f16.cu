/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "indexer/any/kernel.cuh"

quern_status any_indexer::indexer_f16(const stage_exec *exec, const indexer_args *args, const index_kernel &a)
{
    return launch<f16>(exec, args, a);
}
