/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench_ceilings.c - ceilings: the machine's peaks, on each number of threads. */
#include "bench.h"

#include "command.h"

#include <stdio.h>

int bench_ceilings(const bench_case *c, quern_context *ctx, bench_results *to)
{
    const int threads = quern_context_threads(ctx);
    bool memory = false;
    for (int i = 0; i < CEILINGS; i++) {
        progress("ceiling %s", ceiling_name((ceiling)i));
        const double rate = ceiling_measure((ceiling)i, threads);
        progress_clear();
        memory = memory || (i == CEILING_READ && rate > 0);
        if (rate <= 0) continue;
        printf("%-8s %2d threads %10.1f %s\n", ceiling_name((ceiling)i), threads, rate,
               ceiling_unit((ceiling)i));
        bench_result *row = bench_add(to, c, ctx, ceiling_name((ceiling)i));
        snprintf(row->label, sizeof row->label, "%d threads", threads);
        row->value = rate;
        for (int t = 0; t < to->thread_counts; t++)
            if (to->threads[t] == threads) to->ceilings[i][t] = rate;
    }
    return memory ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the ceilings, or no %d threads", threads);
}
