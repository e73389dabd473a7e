/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nvfp4_case.h - values that are hard to quantise, and the profiles to quantise them under. */
#ifndef QUERN_TEST_NVFP4_CASE_H
#define QUERN_TEST_NVFP4_CASE_H

#include "oracle/nvfp4.h"
#include "random.h"
#include "tensor.h"

#include <quern/nvfp4.h>

/* The pairs that are accepted: HALFSTEP takes RNE's scales only. */
enum { NVFP4_CASES = ORACLE_PROFILES * ORACLE_SCALES };
bool nvfp4_case_accepted(int index);
oracle_profile nvfp4_case_profile(int index);
oracle_scales nvfp4_case_scales(int index);

/* Fills a tensor with values that differ in magnitude from block to block, among them ties of both formats,
 * zeros of both signs, subnormal numbers, the largest ones of the dtype, and blocks of zeros. `extreme`
 * allows the last ones but zeros. */
void nvfp4_case_fill(test_tensor *t, test_random *random, bool extreme);
/* The largest magnitude, exact in f32. */
float nvfp4_case_amax(const double *x, int64_t count);

#endif
