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

/* Pieces by lanes: lane l ends before number ends[l]. Threads share the lanes evenly, and help in others
 * once theirs are done: so two threads seldom write into one file, whose lock they would wait for. */
enum { WORK_LANES = 4 };
typedef struct work_lanes {
    size_t count; /* at most WORK_LANES */
    int64_t ends[WORK_LANES];
} work_lanes;

/* Calls piece(arg, index, thread) for every piece; once one has failed, pieces after it are left out. `piece`
 * returns an exit code, and after a failure has written `sentence`. */
typedef int work_piece(void *arg, int64_t index, int thread, char sentence[1024]);
void work_run(int threads, const work_lanes *lanes, work_piece *piece, void *arg, work_trouble *trouble);

#endif
