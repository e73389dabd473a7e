/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* forward.cu - which calls the pooling kernels with rows in shared memory take. */
#include "pool/sm90/params.cuh"

/* Rows of 512 channels that bulk copies can read. */
static bool takes(const stage_exec *exec, const pool_args *args, const pool_kernel &a)
{
    return exec->compute == 90 && exec->shared_bytes >= POOL_SM90_SHARED && a.width == WIDTH &&
           a.prev == NULL && rows_aligned(args->proj, 16) && pool_rows_of_entries(args) > 0;
}

bool pool_sm90_takes_long(const stage_exec *exec, const pool_args *args, const pool_kernel &a,
                          quern_dtype bias)
{
    enum { TWO_STAGES = 8 }; /* rows of them */
    const int64_t size = bias == QUERN_F32 ? 4 : 2;
    return takes(exec, args, a) && !a.overlap && a.ratio % TWO_STAGES == 0 &&
           ((uintptr_t)a.bias_a & 15) == 0 && a.bias_a_row * size % 16 == 0;
}

bool pool_sm90_takes_short(const stage_exec *exec, const pool_args *args, const pool_kernel &a)
{
    return takes(exec, args, a) && args->proj.dtype != QUERN_F32 && a.overlap && a.ratio == SHORT_RATIO &&
           a.entry.format == ENTRY_ROWS && !a.entry.hadamard && a.entry.rotated % 2 == 0;
}
