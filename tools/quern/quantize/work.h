/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* work.h - pieces of work for a team of threads, and what goes wrong in one of them. */
#ifndef QUERN_QUANTIZE_WORK_H
#define QUERN_QUANTIZE_WORK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The first piece, by its number, that failed: the sentence does not depend on the threads. */
typedef struct work_trouble {
    int64_t piece; /* INT64_MAX: none failed */
    int code;      /* an exit code */
    char sentence[1024];
} work_trouble;

/* Calls piece(arg, index, thread) for 0 ... count - 1; once one has failed, pieces after it are left out.
 * `piece` returns an exit code, and after a failure has written `sentence`. */
typedef int work_piece(void *arg, int64_t index, int thread, char sentence[1024]);
void work_run(int threads, int64_t count, work_piece *piece, void *arg, work_trouble *trouble);

#endif
