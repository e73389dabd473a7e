/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gpu.c - asks for a GPU and prints what the library says. */
#include <quern/cuda.h>

#include <stdio.h>

int main(void)
{
    const quern_status status = quern_cuda_check(0);
    printf("%s: %s\n", quern_status_name(status), status != QUERN_OK ? quern_last_error(NULL) : "");
    return 0;
}
