/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* contents.h - checks of the contents of scales, globals and offsets, each one of a stage's arguments. They
 * report the first that is wrong. */
#ifndef QUERN_CPU_QUANTISE_CONTENTS_H
#define QUERN_CPU_QUANTISE_CONTENTS_H

#include "backend.h"

/* The first `rows` rows of a tensor of scale bytes: none is 0x7F (NaN) or negative. */
quern_status check_scale_bytes(const stage_exec *exec, const quern_tensor *scales, int64_t rows);
/* Globals, if there are any: finite and above 0. */
quern_status check_global_scales(const stage_exec *exec, const quern_tensor *globals);
/* Where each expert's rows end, if they are given: never falling, from 0 to at most `rows`. */
quern_status check_ends(const stage_exec *exec, const quern_tensor *offsets, int64_t rows);

#endif
