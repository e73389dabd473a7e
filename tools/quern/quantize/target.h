/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * target.h - the output folder: made, locked against a second run, never the input, and never written
 * through a symbolic link.
 */
#ifndef QUERN_QUANTIZE_TARGET_H
#define QUERN_QUANTIZE_TARGET_H

#include "quantize/conversion.h"

/* Refuses an output that is the input, or within it. Creates nothing. Returns an exit code. */
int target_check(const conversion *c);
/* Makes the folder, locks it until the process ends, and removes what an interrupted run left. */
int target_open(const char *folder);
/* Refuses an output file that is a symbolic link: its target may be another model's. */
int target_check_file(const char *path);
/* Copies every file of the source's folder but shards, index and configs. */
int target_copy_others(const conversion *c);

#endif
