/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* scale_bytes.h - checks of the contents of scales and globals. */
#ifndef QUERN_CPU_QUANTISE_SCALE_BYTES_H
#define QUERN_CPU_QUANTISE_SCALE_BYTES_H

#include "backend.h"

/* Checks the first `rows` rows of a tensor of scale bytes: the first that is 0x7F (NaN) or negative is an
 * error. */
quern_status check_scale_bytes(const stage_exec *exec, const quern_tensor *scales, int64_t rows,
                               const char *name);

#endif
