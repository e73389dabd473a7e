/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* levels.h - the CPU levels that tests go through: those that this machine has, in the order of
 * levels.inc. */
#ifndef QUERN_TEST_LEVELS_H
#define QUERN_TEST_LEVELS_H

#include "random.h"

#include <quern/quern.h>

/* Moves *level to the next level, after AUTO to the first; false after the last. Compute what all levels
 * share, such as the oracle's answer, before the loop:
 * for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) */
bool test_next_level(quern_cpu_level *level);
/* Level n >= 0, counted round and round. */
quern_cpu_level test_level(int64_t n);
quern_cpu_level test_random_level(test_random *random);

#endif
