/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* driver.c - a libcuda.so.1 that serves the CUDA version of QUERN_TEST_DRIVER (0: none is loaded) and nothing
 * else, for what the GPU backend says on a machine whose driver is missing or too old. */
#include <stdlib.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);

int cuInit(unsigned flags)
{
    (void)flags;
    return 0;
}

int cuDriverGetVersion(int *version)
{
    const char *given = getenv("QUERN_TEST_DRIVER");
    *version = given != NULL ? atoi(given) : 0;
    return 0;
}
