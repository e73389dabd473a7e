/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* levels.h - the CPU levels that tests go through. */
#ifndef QUERN_TEST_LEVELS_H
#define QUERN_TEST_LEVELS_H

#include <quern/quern.h>

/* Moves *level to the next level that this machine has, after AUTO to the first; false after the last.
 * Compute what all levels share, such as the oracle's answer, before the loop:
 * for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) */
bool test_next_level(quern_cpu_level *level);

#endif
