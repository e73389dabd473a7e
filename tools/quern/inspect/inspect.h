/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* inspect.h - what `quern inspect` gathers of a checkpoint before it prints. */
#ifndef QUERN_INSPECT_INSPECT_H
#define QUERN_INSPECT_INSPECT_H

#include "inspect/statistics.h"

#include "io/checkpoint_names.h"

#include <quern/checkpoint.h>

#include <jansson.h>

typedef struct inspected {
    quern_checkpoint_tensor info;
    checkpoint_name parts; /* of its name */
    statistics values;
} inspected;

/* Something that a loader would trip over. */
typedef struct problem {
    const char *kind; /* for programs: "missing-scale" and the like */
    char *sentence;
} problem;

typedef struct inspection {
    const char *path;
    quern_checkpoint *checkpoint; /* NULL: the index lies, which is then the problem */
    inspected *tensors;           /* by number */
    size_t *by_name;              /* tensors sorted by name */
    size_t count;
    json_t *config; /* config.json of the folder, or of the file's; NULL: none */
    problem *problems;
    size_t problem_count;
    bool no_memory; /* a problem could not be kept */
} inspection;

/* Fills the tensors of an open checkpoint; false without memory. */
bool inspection_list(inspection *in);
/* Frees what it holds, the checkpoint too. */
void inspection_close(inspection *in);

/* Adds a problem. */
void report(inspection *in, const char *kind, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The tensor beside `t`, of the same module, in another role; NULL: there is none. */
const inspected *beside(const inspection *in, const inspected *t, name_role role);
/* A tensor of this name, or NULL. */
const inspected *named(const inspection *in, const char *name);
/* Number `index` of an f32 tensor, wherever it stands; NaN where it is none. */
float number_of(const inspected *t, int64_t index);
int64_t elements_of(const inspected *t);
bool has_dtype(const inspected *t, const char *dtype);
bool is_nvfp4(const inspected *t);

/* A tensor and those that its values depend on. */
statistics_source source_of(const inspection *in, inspected *t);

/* Looks for every kind of problem; the rest look each for its own. */
void check_all(inspection *in);
void check_scales(inspection *in);  /* they are there, of the right shape, numbers; codes without any */
void check_globals(inspection *in); /* of what loaders fuse; reciprocals */
void check_values(inspection *in);  /* what the statistics saw */
void check_layers(inspection *in);  /* no layer, expert or projection is missing among others */
void check_config(inspection *in);  /* config.json says what the tensors are */

/* Results. */
void print_table(const inspection *in, bool summary);
json_t *inspection_json(const inspection *in); /* NULL without memory */

#endif
