/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "levels.h"

#include "cpu/levels.h"

bool test_next_level(quern_cpu_level *level)
{
    bool after = *level == QUERN_CPU_LEVEL_AUTO;
    for (int i = 0; cpu_level_at(i) != QUERN_CPU_LEVEL_AUTO; i++) {
        if (after && cpu_has_level(cpu_level_at(i))) {
            *level = cpu_level_at(i);
            return true;
        }
        after = after || cpu_level_at(i) == *level;
    }
    return false;
}

static int64_t levels_here(void)
{
    int64_t n = 0;
    for (quern_cpu_level level = QUERN_CPU_LEVEL_AUTO; test_next_level(&level);) n++;
    return n;
}

quern_cpu_level test_level(int64_t n)
{
    quern_cpu_level level = QUERN_CPU_LEVEL_AUTO;
    for (n %= levels_here(); n >= 0; n--) test_next_level(&level);
    return level;
}

quern_cpu_level test_random_level(test_random *random)
{
    return test_level(test_random_int(random, 1, levels_here()) - 1);
}
