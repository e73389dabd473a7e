/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* progress.h - a line on the terminal: what is done, at which rate, and the time left. */
#ifndef QUERN_QUANTIZE_PROGRESS_H
#define QUERN_QUANTIZE_PROGRESS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct progress {
    atomic_int_least64_t done;
    int64_t total;
    double begun, shown; /* in seconds; shown is the main thread's */
    bool terminal;
} progress;

/* Shows nothing where standard error is no terminal. */
void progress_begin(progress *p, int64_t total_bytes);
/* Adds bytes; the main thread shows them, a few times a second. */
void progress_add(progress *p, int64_t bytes, bool main_thread);
/* Removes the line. */
void progress_end(progress *p);

#endif
