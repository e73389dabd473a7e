/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "levels.h"

bool test_next_level(quern_cpu_level *level)
{
    if (*level >= quern_cpu_level_detect()) return false;
    *level = *level == QUERN_CPU_LEVEL_AUTO ? QUERN_CPU_LEVEL_PORTABLE : (quern_cpu_level)(*level + 1);
    return true;
}
