/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "core/parallel.h"

#include <pthread.h>
#include <stdatomic.h>

/* OpenMP's team does not survive a fork: a child that enters a parallel region waits for threads it does
 * not have. So a child runs serially. */
static atomic_bool forked;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void in_child(void)
{
    atomic_store(&forked, 1);
}

static void watch_fork(void)
{
    pthread_atfork(NULL, NULL, in_child);
}

void parallel_for(int32_t threads, int64_t count, parallel_body *body, void *arg)
{
    pthread_once(&once, watch_fork);
    if (threads > count) threads = (int32_t)count;
    if (threads <= 1 || atomic_load(&forked)) {
        for (int64_t i = 0; i < count; i++) body(arg, i, 0);
        return;
    }
    atomic_int_fast64_t next = 0;
    atomic_int_fast32_t ids = 0;
#pragma omp parallel num_threads(threads)
    {
        int32_t thread = (int32_t)atomic_fetch_add(&ids, 1);
        for (int64_t i; (i = atomic_fetch_add(&next, 1)) < count;) body(arg, i, thread);
    }
}
