/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * threads.c - one team of OpenMP's threads for the example's loops and the library's. OpenMP ends the process
 * where it cannot create a thread, so a child process tries first, and where the limits leave little room
 * there are fewer threads. All loops then ask for the same team, which is there from the start; the library's
 * run on it by threads_params(), since by default they take teams of other sizes.
 */
#include "lm.h"

#include <sys/mman.h>

bool room_for(size_t bytes)
{
    void *const room = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return room != MAP_FAILED && munmap(room, bytes) == 0;
}

#ifdef _OPENMP
#include <fcntl.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS_MAX = 1024 }; /* what a context accepts */

/* Starts the team; each member allocates, which takes address space of its own. */
static int team_members(int team)
{
    int members = 0;
#pragma omp parallel num_threads(team) reduction(+ : members)
    {
        void *volatile own = malloc(1);
        free(own);
        members++;
    }
    return members;
}

static bool can_start(int team)
{
    int status = 1;
    const pid_t child = fork();
    if (child == 0) {
        const int nowhere = open("/dev/null", O_WRONLY);
        if (nowhere >= 0) (void)dup2(nowhere, STDERR_FILENO); /* what OpenMP would say */
        _exit(team_members(team) <= 0 || !room_for((size_t)256 << 20) /* a model's */);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

void threads_start(void)
{
    int team = omp_get_max_threads() < THREADS_MAX ? omp_get_max_threads() : THREADS_MAX;
    while (team > 1 && !can_start(team)) team--;
    omp_set_num_threads(team_members(team));
}

static void run_team(void *arg, int32_t threads, int64_t count,
                     void (*body)(void *body_arg, int64_t index, int32_t thread), void *body_arg)
{
    atomic_int_fast64_t next = 0;
    (void)arg;
#pragma omp parallel
    {
        const int thread = omp_get_thread_num();
        if (thread < threads)
            for (int64_t i; (i = atomic_fetch_add(&next, 1)) < count;) body(body_arg, i, thread);
    }
}

quern_context_params threads_params(void)
{
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    params.threads = omp_get_max_threads();
    params.parallel_for = run_team;
    return params;
}
#else
void threads_start(void) {}

quern_context_params threads_params(void)
{
    return (quern_context_params)QUERN_CONTEXT_PARAMS_INIT;
}
#endif
