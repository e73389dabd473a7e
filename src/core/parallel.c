/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * parallel.c - hands out indices to a team of threads.
 *
 * Indices are tickets: each call of the body takes the next one, whatever index the executor names. So
 * indices start in rising order on any executor, and none runs twice or is left out. A body may wait for a
 * lower index, because some thread is already working on it.
 *
 * A library cannot afford two habits of OpenMP.
 *   - A forked child that enters a parallel region waits for its parent's threads. So a child computes on one
 *     thread, whoever used OpenMP before the fork. The library counts forks from when it is loaded.
 *   - Where a thread cannot be created, libgomp ends the process. So before we ask it for a larger team than
 *     it has, we create as many threads, with one to spare, and join them again; where that fails, the team
 *     is smaller. (What other threads of the process take in between cannot be known.) libgomp keeps a team
 *     for each thread that calls, and ends its surplus threads when asked for a smaller one, so a thread's
 *     teams all have one size.
 */
#include "core/parallel.h"

#include "core/float_state.h"
#include "core/spare_threads.h"

#include <pthread.h>
#include <stdatomic.h>

static atomic_int forks;

static void in_child(void)
{
    atomic_fetch_add(&forks, 1);
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

int32_t parallel_forks(void)
{
    return atomic_load(&forks);
}

typedef struct ticket_roll {
    parallel_body *body;
    void *arg;
    int64_t count;
    int32_t threads;
    atomic_int_fast64_t next;
} ticket_roll;

static void take_all(ticket_roll *roll, int32_t thread)
{
    parallel_body *const body = roll->body;
    void *const arg = roll->arg;
    const int64_t count = roll->count;
    DEFAULT_FLOAT_STATE;
    for (int64_t i; (i = atomic_fetch_add(&roll->next, 1)) < count;) body(arg, i, thread);
}

/* The body that the caller's executor runs. A thread number outside the team has no scratch, so such a
 * call takes no ticket. */
static void take_one(void *arg, int64_t index, int32_t thread)
{
    ticket_roll *roll = arg;
    (void)index;
    if (thread < 0 || thread >= roll->threads) return;
    const int64_t i = atomic_fetch_add(&roll->next, 1);
    if (i >= roll->count) return;
    DEFAULT_FLOAT_STATE;
    roll->body(roll->arg, i, thread);
}

#ifdef _OPENMP
enum { CALLS_UNTIL_RETRY = 1000 };

/* The team that OpenMP can make of this thread, at most `wanted`: one more thread is created than it lacks.
 */
static int32_t team_of(int32_t wanted)
{
    static _Thread_local int32_t had = 1, refused; /* refused: calls until more is tried again */
    if (wanted <= had) return had = wanted;
    if (refused > 0) {
        refused--;
        return had;
    }
    const int32_t more = spare_threads(wanted - had + 1);
    if (more <= wanted - had) refused = CALLS_UNTIL_RETRY;
    if (more > 0) had += more - 1;
    return had;
}

static void run_openmp(ticket_roll *roll)
{
    const int32_t team = team_of(roll->threads);
    atomic_int_fast32_t numbers = 0;
    if (team <= 1) return;
#pragma omp parallel num_threads(team)
    take_all(roll, (int32_t)atomic_fetch_add(&numbers, 1));
}
#else
static void run_openmp(ticket_roll *roll)
{
    (void)roll;
}
#endif

void parallel_for(const stage_exec *exec, int64_t count, parallel_body *body, void *arg)
{
    if (count == 1) {
        DEFAULT_FLOAT_STATE;
        body(arg, 0, 0);
        return;
    }
    ticket_roll roll = {body, arg, count, exec->threads, 0};
    if (count > 1 && exec->threads > 1) {
        if (exec->parallel_for != NULL && exec->forks == parallel_forks())
            exec->parallel_for(exec->parallel_for_arg, exec->threads < count ? exec->threads : (int32_t)count,
                               count, take_one, &roll);
        else if (exec->parallel_for == NULL && parallel_forks() == 0) run_openmp(&roll);
    }
    take_all(&roll, 0);
}

typedef struct ahead_roll {
    parallel_ahead_body *body;
    void *arg;
    int64_t count;
    atomic_int_fast64_t next;
} ahead_roll;

static void take_ahead(void *arg, int64_t index, int32_t thread)
{
    ahead_roll *roll = arg;
    for (int64_t now = index, next; now < roll->count; now = next) {
        next = atomic_fetch_add(&roll->next, 1);
        roll->body(roll->arg, now, next < roll->count ? next : roll->count, thread);
    }
}

void parallel_for_ahead(const stage_exec *exec, int64_t count, parallel_ahead_body *body, void *arg)
{
    const int64_t tasks = count < exec->threads ? count : exec->threads;
    ahead_roll roll = {body, arg, count, tasks};
    parallel_for(exec, tasks, take_ahead, &roll);
}
