/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* sums.cuh - sums over runs of rows, each of which wrote its share. */
#ifndef QUERN_CUDA_SUMS_CUH
#define QUERN_CUDA_SUMS_CUH

#include "common/device.cuh"

/* out[j, c] (f32, or absent) = the shares of it, parts[r run_floats + j width + c], in a fixed order; `add`:
 * to what it holds. */
quern_status sum_runs(const float *parts, int64_t runs, int64_t run_floats, const quern_tensor &out, bool add,
                      cudaStream_t stream);

#endif
