/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cpu.h - the CPU's stage table. */
#ifndef QUERN_CPU_CPU_H
#define QUERN_CPU_CPU_H

#include "backend.h"

extern const quern_backend quern_backend_cpu;

#endif
