/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* spare_threads.h - whether threads can be created. libgomp ends the process where it cannot create one, so
 * this is asked before it. */
#ifndef QUERN_CORE_SPARE_THREADS_H
#define QUERN_CORE_SPARE_THREADS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__GLIBC__)
#include <execinfo.h>
#endif

enum { SPARE_THREADS_MAX = 1024 };

static inline void *stand_by(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Gives threads the stack size that OMP_STACKSIZE asks for, as libgomp does: a number and B, K, M or G; no
 * letter means K. */
static inline void set_stack(pthread_attr_t *attr)
{
    const char *text = getenv("OMP_STACKSIZE");
    char *unit;
    size_t bytes = text != NULL ? strtoul(text, &unit, 10) : 0;
    if (bytes == 0) return;
    while (*unit == ' ') unit++;
    bytes <<= *unit == 'B' || *unit == 'b'   ? 0
              : *unit == 'M' || *unit == 'm' ? 20
              : *unit == 'G' || *unit == 'g' ? 30
                                             : 10;
    pthread_attr_setstacksize(attr, bytes);
}

/* Whether threads can end by pthread_exit(), as libgomp's do. glibc loads the unwinder for it, and ends the
 * process where it cannot; backtrace() loads the same, and says so. */
static inline bool can_end_threads(void)
{
#if defined(__GLIBC__)
    void *frame;
    return backtrace(&frame, 1) > 0;
#else
    return true;
#endif
}

/* How many of `wanted` threads can be created in addition to the existing ones. They are joined again. */
static inline int32_t spare_threads(int32_t wanted)
{
    pthread_t made[SPARE_THREADS_MAX];
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_attr_t attr;
    int32_t n = 0;
    if (!can_end_threads() || pthread_attr_init(&attr) != 0) return 0;
    set_stack(&attr);
    pthread_mutex_lock(&gate);
    while (n < wanted && n < SPARE_THREADS_MAX && pthread_create(&made[n], &attr, stand_by, &gate) == 0) n++;
    pthread_mutex_unlock(&gate);
    for (int32_t i = 0; i < n; i++) pthread_join(made[i], NULL);
    pthread_attr_destroy(&attr);
    return n;
}

#endif
