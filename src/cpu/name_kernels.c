/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* name_kernels.c - the names of a stage's tile kernels in quern_plan_describe(). */
#include "cpu/stages.h"

#include <stdio.h>

void cpu_name_kernels(char text[STAGE_NAME_BYTES], const char *operation, bool bf16, quern_cpu_level level)
{
    snprintf(text, STAGE_NAME_BYTES, "%s_%s_%s", operation, bf16 ? "bf16" : "f32",
             quern_cpu_level_name(level));
}
