/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* thread_team.c - the team of threads. */
#include "quantize/thread_team.h"

#include "command.h"
#include "team.h"

#include <string.h>

static void run_one(team_piece *piece, void *arg, int64_t index, int thread, team_trouble *trouble)
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

void team_run(int threads, const team_lanes *lanes, team_piece *piece, void *arg, team_trouble *trouble)
{
    const int64_t count = lanes->count > 0 ? lanes->ends[lanes->count - 1] : 0;
    const int team = count > 1 ? openmp_team(threads) : 1;
    int64_t next[TEAM_LANES];
    if (team == 1) { /* OpenMP ends the process where it has no memory */
        for (int64_t i = 0; i < count; i++) run_one(piece, arg, i, 0, trouble);
        return;
    }
    for (size_t l = 0; l < lanes->count; l++) next[l] = l > 0 ? lanes->ends[l - 1] : 0;
#pragma omp parallel num_threads(team)
    {
        size_t thread = 0;
#ifdef _OPENMP
        thread = (size_t)omp_get_thread_num();
#endif
        for (size_t k = 0; k < lanes->count; k++) {
            const size_t lane = (thread + k) % lanes->count;
            for (;;) {
                int64_t index;
#pragma omp atomic capture
                index = next[lane]++;
                if (index >= lanes->ends[lane]) break;
                run_one(piece, arg, index, (int)thread, trouble);
            }
        }
    }
}
