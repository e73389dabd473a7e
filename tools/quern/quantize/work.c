/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* work.c - the team of threads. */
#include "quantize/work.h"

#include "command.h"
#include "team.h"

#include <string.h>

static void run_one(work_piece *piece, void *arg, int64_t index, int thread, work_trouble *trouble)
{
    char sentence[sizeof trouble->sentence] = "";
    int64_t failed;
#pragma omp atomic read
    failed = trouble->piece;
    if (index > failed) return;
    const int code = piece(arg, index, thread, sentence);
    if (code == EXIT_DONE) return;
#pragma omp critical
    if (index < trouble->piece) {
        trouble->code = code;
        memcpy(trouble->sentence, sentence, sizeof sentence);
#pragma omp atomic write
        trouble->piece = index;
    }
}

void work_run(int threads, int64_t count, work_piece *piece, void *arg, work_trouble *trouble)
{
    const int team = count > 1 ? openmp_team(threads) : 1;
    if (team == 1) { /* OpenMP ends the process where it has no memory */
        for (int64_t i = 0; i < count; i++) run_one(piece, arg, i, 0, trouble);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t i = 0; i < count; i++) {
        int thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        run_one(piece, arg, i, thread, trouble);
    }
}
