/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command.h - what the verbs share: exit codes, failing, the context. */
#ifndef QUERN_TOOLS_COMMAND_H
#define QUERN_TOOLS_COMMAND_H

#include "options.h"

#include "core/text.h"

#include <quern/quern.h>

/* The command's exit codes; documented in its help. */
enum {
    EXIT_DONE = 0,
    EXIT_MISMATCH = 1, /* a comparison failed */
    EXIT_USAGE = 2,    /* the command line: unknown verb, option or value */
    EXIT_INPUT = 3,    /* a file, its tensors, or a parameter that does not go with them */
    EXIT_MACHINE = 4,  /* the machine lacks a device, a CPU level, memory or a program */
    EXIT_DEFECT = 5    /* a defect of Quern */
};

/* Prints "quern VERB: sentence" to stderr, control characters escaped, and returns `code`. A path goes in as
 * TEXT_NAME(path), so that a long one does not hide the reason. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same with the library's last error; the code follows from the status. */
int fail_status(quern_status status);
/* Memory for small things, JSON among them; without it the command ends. */
void *need_memory(size_t bytes);
/* The same for a file that is read, whose contents the command does not accept. `path` NULL: the library's
 * sentence alone. */
int fail_file(const char *path, quern_status status);

/* The current verb, for messages. */
extern const char *command_verb;

/* Options of every verb that computes. */
typedef struct machine_options {
    int64_t threads; /* 0: as the library decides */
    int device;      /* quern_device */
    bool json;
} machine_options;
extern const char *const device_choices[]; /* by quern_device */
extern const option_row machine_rows[];
extern const size_t machine_row_count;

/* A context for the options; on failure prints the error and returns an exit code. */
int open_context(const machine_options *options, quern_context **ctx);

int verb_info(int argc, char **argv);
int verb_run(int argc, char **argv);
int verb_quantize(int argc, char **argv);
int verb_compare(int argc, char **argv);
int verb_inspect(int argc, char **argv);
int verb_bench(int argc, char **argv);
int verb_probe(int argc, char **argv);

#endif
