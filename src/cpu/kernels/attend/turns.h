/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * turns.h - the order in which tasks add to the gradients of keys that they share. Each task walks the keys
 * upwards and, before it adds to a tile of keys, waits until all earlier tasks have passed it. Tasks start in
 * this order, so a thread that starts together with another follows one tile behind it, and one that starts
 * later never waits. The sums then have one order, whatever the number of threads.
 */
#ifndef QUERN_CPU_TURNS_H
#define QUERN_CPU_TURNS_H

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

enum { TURN_DONE = INT32_MAX, TURN_SPINS = 64 };

typedef _Atomic int64_t turn; /* the task has finished with all keys below this */

/* Waits until every task of [first, self) has passed key `key`. All tasks before *passed have finished. */
static inline void turn_wait(turn *turns, turn *passed, int64_t first, int64_t self, int64_t key)
{
    int64_t done = atomic_load_explicit(passed, memory_order_acquire);
    const int64_t known = done;
    while (done < self && atomic_load_explicit(&turns[done], memory_order_acquire) == TURN_DONE) done++;
    if (done > known) atomic_store_explicit(passed, done, memory_order_release);
    for (int64_t i = done > first ? done : first; i < self; i++)
        for (int spins = 0; atomic_load_explicit(&turns[i], memory_order_acquire) < key;)
            if (++spins > TURN_SPINS) sched_yield();
}

/* Lets later tasks add to the keys below `key`. */
static inline void turn_pass(turn *own, int64_t key)
{
    atomic_store_explicit(own, key, memory_order_release);
}

#endif
