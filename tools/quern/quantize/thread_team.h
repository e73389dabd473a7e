/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* thread_team.h - pieces of work for a team of threads, and what goes wrong in one of them. */
#ifndef QUERN_QUANTIZE_THREAD_TEAM_H
#define QUERN_QUANTIZE_THREAD_TEAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The first piece, by its number, that failed: the sentence does not depend on the threads. */
typedef struct team_trouble {
    int64_t piece; /* INT64_MAX: none failed */
    int code;      /* an exit code */
    char sentence[1024];
} team_trouble;

/* Pieces by lanes: lane l ends before number ends[l]. Threads share the lanes evenly, and help in others
 * once theirs are done: so two threads seldom write into one file, whose lock they would wait for. */
enum { TEAM_LANES = 4 };
typedef struct team_lanes {
    size_t count; /* at most TEAM_LANES */
    int64_t ends[TEAM_LANES];
} team_lanes;

/* Calls piece(arg, index, thread) for every piece; once one has failed, pieces after it are left out. `piece`
 * returns an exit code, and after a failure has written `sentence`. */
typedef int team_piece(void *arg, int64_t index, int thread, char sentence[1024]);
void team_run(int threads, const team_lanes *lanes, team_piece *piece, void *arg, team_trouble *trouble);

#endif
