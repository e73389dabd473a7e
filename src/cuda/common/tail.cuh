/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tail.cuh - the rows of a varlen tensor past the end of the last sequence. */
#ifndef QUERN_CUDA_TAIL_CUH
#define QUERN_CUDA_TAIL_CUH

#include "common/device.cuh"

/* Varlen: writes `value` to the rows past the end of the last sequence (of the queries, or of the keys).
 * Absent tensors and fixed lengths: nothing to do. */
quern_status fill_tail(const stage_exec *exec, const stage_seqs *s, bool queries, const quern_tensor *t,
                       float value);
quern_status fill_tail_stat(const stage_exec *exec, const stage_seqs *s, const quern_tensor *t, float value);

#endif
