/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* scale_bytes.h - a check of the contents of scales. */
#ifndef QUERN_CPU_QUANTISE_SCALE_BYTES_H
#define QUERN_CPU_QUANTISE_SCALE_BYTES_H

#include "backend.h"

/* Checks the first `rows` rows of a tensor of scale bytes, one of a stage's arguments: reports the first that
 * is 0x7F (NaN) or negative. */
quern_status check_scale_bytes(const stage_exec *exec, const quern_tensor *scales, int64_t rows);

#endif
