/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* emit.cuh - from an entry's pooled row to what is stored of it. */
#ifndef QUERN_CUDA_POOL_EMIT_CUH
#define QUERN_CUDA_POOL_EMIT_CUH

#include "pool/rows.cuh"

/* Stores what an entry's pooled row `v` gives. */
__device__ __forceinline__ void pool_emit(const pool_kernel &a, const group &g, const pool_facts &x,
                                          const channels &norm, const entry_factors &angles,
                                          channels v, float *row)
{
    const int channel = g.lane * GROUP_CHANNELS, count = a.width - channel;
    const bool live = x.live && entry_has_angles(a.entry, x.position);
    if (x.live && !live && g.lane == 0) raise_status(a.status, QUERN_STATUS_BAD_POSITION);
    if (!live) v = {};
    if (a.pooled != NULL)
        put_channels(a.pooled + x.view_b * a.pooled_b + x.n * a.pooled_row + channel, v, count);
    if (a.out == NULL) return;
    char *const to = (char *)a.out + (x.view_b * a.out_b + x.n * a.out_row) * (a.out_dtype == QUERN_F32  ? 4
                                                                               : a.out_dtype == QUERN_U8 ? 1
                                                                                                         : 2);
    if (!live) {
        entry_clear(a.entry, g, to, a.out_dtype);
        return;
    }
    entry_finish(a.entry, g, x.position, norm, angles, v, row);
    entry_store(a.entry, g, v, to, a.out_dtype, a.status);
}

#endif
