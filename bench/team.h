/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* team.h - the size of a team that OpenMP is asked for outside the library. */
#ifndef QUERN_BENCH_TEAM_H
#define QUERN_BENCH_TEAM_H

#ifdef _OPENMP
#include "core/spare_threads.h"

#include <omp.h>
#endif

/* `wanted` threads (0: as many as OpenMP takes), or 1 where these cannot be created. A size between would end
 * threads of the team that the library counts on. */
static inline int openmp_team(int wanted)
{
#ifdef _OPENMP
    if (wanted <= 0) wanted = omp_get_max_threads();
    return wanted > 1 && spare_threads(wanted) == wanted ? wanted : 1;
#else
    (void)wanted;
    return 1;
#endif
}

#endif
