/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* indexer_bf16.cu - bf16. */
#include "any/indexer/indexer.cuh"

quern_status any_indexer::indexer_bf16(const stage_exec *exec, const indexer_args *args)
{
    return launch<bf16>(exec, args);
}
