/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.c - the CPU's rows of the stage table. */
#include "cpu/stages.h"

const quern_backend quern_backend_cpu = {
    .name = "cpu",
    .attend_backward = {cpu_attend_supports, cpu_attend_backward_workspace, cpu_attend_backward},
    .rowdot = {cpu_rowdot_supports, cpu_rowdot_workspace, cpu_rowdot},
    .attend_forward = {cpu_attend_supports, cpu_attend_forward_workspace, cpu_attend_forward},
};
