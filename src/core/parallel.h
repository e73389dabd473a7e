/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* parallel.h - the one parallel loop of the library: on the caller's executor where there is one, else by
 * OpenMP. */
#ifndef QUERN_CORE_PARALLEL_H
#define QUERN_CORE_PARALLEL_H

#include "stages/stage.h"

/* Calls body(arg, index, thread) once for each index in [0, count), thread in [0, exec->threads), under
 * the default floating-point state. Indices start one by one in rising order (put the longest work first),
 * so a body may wait for a lower index. Which thread gets which index is open, so results must not depend
 * on it. */
typedef void parallel_body(void *arg, int64_t index, int32_t thread);
void parallel_for(const stage_exec *exec, int64_t count, parallel_body *body, void *arg);

/* The same, where a body learns which index its thread takes next (`count`: none), so that it can request
 * what that will read. Nobody learns of the indices below exec->threads. Indices may start in any order, so a
 * body may not wait for another. */
typedef void parallel_ahead_body(void *arg, int64_t index, int64_t next, int32_t thread);
void parallel_for_ahead(const stage_exec *exec, int64_t count, parallel_ahead_body *body, void *arg);

/* Which of `count` tasks index `index` takes, so that each of `runs` threads, which most likely take turns,
 * gets tasks that follow each other. */
static inline int64_t parallel_in_runs(int64_t count, int64_t runs, int64_t index)
{
    const int64_t each = count / runs, longer = count % runs, run = index % runs;
    return run * each + (run < longer ? run : longer) + index / runs;
}

/* How many forks lie between this process and the one that loaded the library. An executor from before the
 * last of them (exec->forks) has lost its threads and is not used. */
int32_t parallel_forks(void);

#endif
