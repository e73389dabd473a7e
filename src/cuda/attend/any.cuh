/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* any.cuh - attention's kernels for any GPU: a function for each dtype and padded head dim, in a file
 * of its own. */
#ifndef QUERN_CUDA_ATTEND_ANY_CUH
#define QUERN_CUDA_ATTEND_ANY_CUH

#include "attend/attend.cuh"
#include "common/launch.cuh"

typedef quern_status attend_part(const attend_args *args, const attend_launch &l, const launcher &to);
attend_part attend_forward_bf16_64, attend_forward_bf16_128, attend_forward_bf16_256;
attend_part attend_forward_f16_64, attend_forward_f16_128, attend_forward_f16_256;
attend_part attend_forward_f32_64, attend_forward_f32_128, attend_forward_f32_256;

/* The backward: dQ, then dK and dV or their shares. */
attend_part attend_rows_bf16_64, attend_rows_bf16_128, attend_rows_bf16_256;
attend_part attend_rows_f16_64, attend_rows_f16_128, attend_rows_f16_256;
attend_part attend_keys_bf16_64, attend_keys_bf16_128, attend_keys_bf16_256;
attend_part attend_keys_f16_64, attend_keys_f16_128, attend_keys_f16_256;
attend_part attend_backward_f32_64, attend_backward_f32_128, attend_backward_f32_256;

/* The function for a call's padded head dim, of those for 64, 128 and 256. */
static inline attend_part *part_of(const attend_launch &l, attend_part *const (&parts)[3])
{
    return parts[l.dim == 64 ? 0 : l.dim == 128 ? 1 : 2];
}
/* The same for its dtype, too: bf16, then f16. */
static inline attend_part *part_of(const attend_launch &l, attend_part *const (&parts)[2][3])
{
    return part_of(l, parts[l.dtype == QUERN_F16]);
}

/* Whether the kernels' limits allow a call; if not, says so. Whether its blocks fit the device, by one part
 * of a forward or two of a backward. */
bool attend_fits(const attend_args *args, char why[STAGE_WHY_BYTES]);
bool attend_parts_fit(const stage_exec *exec, const attend_args *args, attend_launch *l, attend_part *first,
                      attend_part *second, char why[STAGE_WHY_BYTES]);

/* The forward, and the 16-bit backward, by these parts. */
quern_status attend_forward_by(const stage_exec *exec, const attend_args *args, const attend_launch &l,
                               attend_part *part);
quern_status attend_backward_by(const stage_exec *exec, const attend_args *args, void *workspace,
                                attend_part *rows, attend_part *keys);

/* What the inverted index and the shares take of workspace. */
size_t attend_backward_any_bytes(const stage_exec *exec, const attend_args *args);

/* After any forward: the rows past the last sequence. */
quern_status attend_end(const stage_exec *exec, const attend_args *args);

#endif
