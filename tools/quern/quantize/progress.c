/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void progress_begin(progress *p, int64_t total_bytes)
{
    atomic_store(&p->done, 0);
    p->total = total_bytes;
    p->begun = p->shown = now();
    p->terminal = isatty(STDERR_FILENO) == 1;
}

static void show(const progress *p, int64_t done, double seconds)
{
    enum { WIDTH = 30 };
    char bar[WIDTH + 1];
    const double share = p->total > 0 ? (double)done / (double)p->total : 1.0;
    const double rate = seconds > 0 ? (double)done / seconds : 0.0;
    const int filled = share >= 1.0 ? WIDTH : (int)(share * WIDTH);
    for (int i = 0; i < WIDTH; i++) bar[i] = i < filled ? '#' : '.';
    bar[WIDTH] = '\0';
    const long left = rate > 0 ? (long)((double)(p->total - done) / rate + 0.5) : 0;
    fprintf(stderr, "\r[%s] %3.0f%%  %.2f GB/s  %ld:%02ld left \033[K", bar, 100 * share, rate / 1e9,
            left / 60, left % 60);
    fflush(stderr);
}

void progress_add(progress *p, int64_t bytes, bool main_thread)
{
    const int64_t done = atomic_fetch_add(&p->done, bytes) + bytes;
    if (!p->terminal || !main_thread) return;
    const double t = now();
    if (t - p->shown < 0.2) return;
    p->shown = t;
    show(p, done, t - p->begun);
}

void progress_end(progress *p)
{
    if (p->terminal) fprintf(stderr, "\r\033[K");
    p->terminal = false;
}
