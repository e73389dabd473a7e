/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* backend.c - the CPU's rows of the stage table. */
#include "backend.h"

const quern_backend quern_backend_cpu = {
    .name = "cpu",
};
