/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bench.h - one measurement: its operation, data, time and limit. */
#ifndef QUERN_TOOLS_BENCH_H
#define QUERN_TOOLS_BENCH_H

#include "ceilings.h"
#include "job.h"

#include <jansson.h>

typedef enum bench_data { DATA_NORMAL, DATA_SMOOTH } bench_data;
typedef enum bench_gate { GATE_WEIGHTS, GATE_NONE, GATE_GIVEN } bench_gate;
typedef enum bench_project { PROJECT_K = 1, PROJECT_V = 2 } bench_project;         /* a set */
typedef enum bench_separate { SEPARATE_SLC = 1, SEPARATE_WIN = 2 } bench_separate; /* a set */
typedef enum bench_weights { WEIGHTS_F32, WEIGHTS_INPUT } bench_weights;
typedef enum bench_selection { SELECTION_COMPUTED, SELECTION_GIVEN } bench_selection;

/* What is measured. */
typedef struct bench_case {
    const operation *op;
    int64_t batch, n, heads, kv_heads, dim, dim_v;
    int64_t documents; /* 0: sequences of fixed length; else a varlen batch of n tokens */
    int dtype;         /* quern_dtype: f32, f16, bf16 */
    int device;        /* quern_device */
    bool backward, encodings;
    int data, gate, project, separate, weights, selection; /* the enums above */
    int64_t seed;
    any_params params;
} bench_case;

/* The options for the inputs' presence and kind; base: a bench_case. */
extern const option_row bench_case_rows[];
extern const size_t bench_case_row_count;
/* Their defaults; op NULL: of nsa. */
bench_case bench_case_init(const operation *op);

enum { BENCH_REPS_MAX = 101 };
typedef struct timing {
    int reps;
    double median, p10, p90; /* milliseconds */
} timing;

/* The least work of a pass: the denominator. With flops and bytes, the bytes are read beside them, and the
 * slower of the two is the limit. */
typedef struct work {
    double flops, bytes;
    ceiling limit; /* of the flops, of the bytes where there are none; CEILINGS if none fits the CPU level */
    const char *formula;
} work;

/* What a forward pass is compared with, in turns with it. */
typedef struct bench_beside {
    const char *name;        /* "oneDNN" */
    double (*ms)(void *arg); /* runs it once; below 0: it failed */
    void *arg;
} bench_beside;

/* A pass, and its limits on as many threads. */
typedef struct measurement {
    timing time;
    ceiling limit;      /* the one that binds in most rounds; CEILINGS: none */
    double ceiling;     /* median over rounds; 0: none */
    double fraction;    /* of the ceiling, median over rounds; 0: none */
    double of_read;     /* with flops and bytes: of the time that reading takes, median over rounds; else 0 */
    double moved;       /* the mover's time over the pass's, median over rounds; 0: none */
    double beside_ms;   /* median over rounds; 0: there is nothing beside */
    double over_beside; /* its time over the pass's, median over rounds */
} measurement;

/* One line of results. */
typedef struct bench_row {
    const bench_case *what;
    bool backward;
    int threads;
    measurement measured;
    work work;
    const char *peer; /* NULL: none */
    double peer_ms;
    size_t workspace_bytes;
    double workspace_fraction; /* nsa's forward: bench_workspace(); else 0 */
} bench_row;

/* Starts a job, allocates and fills its inputs, prepares it; with `plan` only sizes it. Returns an exit code;
 * job_free in any case. */
int bench_open(job *j, const bench_case *c, quern_context *ctx, bool plan);
/* Measures the passes of a job in turns with their limits, and with `beside` (NULL: nothing). rounds > 0: so
 * many rounds of a moment each; else `reps` runs, or with reps 0 at least 3 and a second, one where a run
 * takes more than 8 seconds. A first run warms up; it counts only if it took more than 8 seconds. Returns an
 * exit code. */
int bench_measure(job *j, const work w[2], const bench_beside *beside, quern_context *ctx, int rounds,
                  int reps, const char *label, measurement out[2]);
/* Only the times, for a numerator or a peer. */
int bench_time(job *j, quern_context *ctx, int reps, const char *label, timing *forward, timing *backward);
/* Forward workspace of NSA with O as the only result, over its bound: one copy of K and V in panels in the
 * compute dtype, compressed K and V, indices, statistics (LSE of three branches, gates), 4 MiB a thread. 0
 * for other operations. */
double bench_workspace(const job *j, const bench_case *c, quern_context *ctx);
work bench_work(const bench_case *c, bool backward, quern_cpu_level level);
/* The arithmetic peak that a level has for a dtype. */
ceiling bench_compute_limit(int dtype, quern_cpu_level level);

/* `quern bench overhead`. */
int bench_overhead(int device, int64_t threads, const char *json);
/* `quern bench` csa-compress, hca-compress, csa-append. */
int bench_compressor(int argc, char **argv, const char *subject);

timing timing_of(double *ms, int count);
/* GFLOP/s or GB/s of a row, as its limit counts. */
double row_rate(const bench_row *row);

/* The table, a row of the JSON, the chart. */
void report_header(void);
void report_row(const bench_row *row);
/* Prints the formula of G/s for each operation. */
void report_formulas(const bench_row *rows, size_t count);
json_t *report_json(const bench_row *row);
/* The value that `base` holds for an option: a number, a boolean or a word. */
json_t *report_option(const option_row *row, const void *base);
/* Writes a scenario's results, measured on the CPU, with the machine that they are of. An exit code. */
int report_results(const char *path, const quern_context *ctx, json_t *results);
/* A scenario's options and its one word, the subject. *help: `usage` and the options are printed, and there
 * is nothing left to do. An exit code. */
int scenario_options(int argc, char **argv, const option_group *group, const char *usage, bool *help);
/* Draws time, and speed-up over the peer, against length; needs gnuplot. Returns an exit code. */
int report_svg(const char *path, const bench_row *rows, size_t count);

/* A progress line that the next one overwrites, on a terminal only. */
void progress(const char *format, ...) __attribute__((format(printf, 1, 2)));
void progress_clear(void);

#endif
