/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* output.h - writes results: files, whole or not at all (quern/file.h), charts, standard output. */
#ifndef QUERN_TOOLS_OUTPUT_H
#define QUERN_TOOLS_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Checks before the work that a file can be written. path NULL: no file. Returns an exit code. */
int output_check(const char *path);
/* Writes JSON and a line's end. Returns an exit code. */
int output_json(const char *path, const json_t *root, size_t flags);
/* True if a program of this name is on the PATH. */
bool have_program(const char *name);
/* Runs gnuplot over the script, which is read from its beginning, and writes the SVG that it prints. No path
 * reaches gnuplot. Returns an exit code. */
int output_chart(const char *path, FILE *script);
/* Prints JSON to standard output. */
void output_print(const json_t *root, size_t flags);
/* A string of a file; its U+0000, which quern/safetensors.h hands out as C0 80, is one again. NULL where it
 * is no UTF-8. */
json_t *output_text(const char *text);
/* A number, or null where it is none: JSON has no infinity and no NaN. */
json_t *output_number(double value);

/* Opens a place that takes no bytes where standard input, output or error is closed, so that no other file
 * takes its number. */
void output_keep_streams(void);
/* From here on the file at `path`, which is written next, is all that the command still has to do. The caller
 * keeps the path. */
void output_last(const char *path);
/* SIGINT, SIGTERM, SIGHUP and SIGPIPE end the command at once, with 128 + the signal's number as the exit
 * code, and leave neither a temporary file nor a child process. Once the last result is in place they end
 * nothing: the exit code says that it is. */
void output_end_on_signals(void);
/* Flushes standard output. If that fails, an exit code of 0 or 1 becomes that of an unwritable file. Called
 * before a result is written to a file, too: the file stays as it was where standard output cannot be
 * written, and gets what was printed before it where it is standard output. */
int output_flush(int code);

#endif
