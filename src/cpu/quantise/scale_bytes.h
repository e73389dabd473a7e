/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* scale_bytes.h - checks of what a scale and a global may hold. */
#ifndef QUERN_CPU_QUANTISE_SCALE_BYTES_H
#define QUERN_CPU_QUANTISE_SCALE_BYTES_H

#include "backend.h"

/* The first `rows` rows of a tensor of scale bytes: 0x7F (NaN) and negative ones are an error that names the
 * first. */
quern_status check_scale_bytes(const stage_exec *exec, const quern_tensor *scales, int64_t rows,
                               const char *name);

#endif
