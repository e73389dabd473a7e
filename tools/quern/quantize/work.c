/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* work.c - the team of threads. */
#include "quantize/work.h"

#include "command.h"
#include "team.h"

#include <string.h>

void work_run(int threads, int64_t count, work_piece *piece, void *arg, work_trouble *trouble)
{
    const int team = count > 1 ? openmp_team(threads) : 1;
    (void)team;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t i = 0; i < count; i++) {
        char sentence[sizeof trouble->sentence] = "";
        int64_t failed;
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
#pragma omp atomic read
        failed = trouble->piece;
        if (i > failed) continue;
        const int code = piece(arg, i, thread, sentence);
        if (code == EXIT_DONE) continue;
#pragma omp critical
        if (i < trouble->piece) {
            trouble->code = code;
            memcpy(trouble->sentence, sentence, sizeof sentence);
#pragma omp atomic write
            trouble->piece = i;
        }
    }
}
