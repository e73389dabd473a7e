/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* first_fault.h - the first fault of data that any thread of a scan finds. */
#ifndef QUERN_CPU_FIRST_FAULT_H
#define QUERN_CPU_FIRST_FAULT_H

#include <stdatomic.h>
#include <stdint.h>

/* The least index of a fault; NO_FAULT: there is none. */
typedef atomic_int_fast64_t first_fault;
#define NO_FAULT INT64_MAX

static inline void first_fault_note(first_fault *first, int64_t index)
{
    int_fast64_t least = atomic_load(first);
    while (index < least && !atomic_compare_exchange_weak(first, &least, index)) continue;
}

#endif
