/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* v4_case.h - a made model in a folder of its own, prompts in files beside it, and runs of examples/v4. */
#ifndef QUERN_TEST_V4_CASE_H
#define QUERN_TEST_V4_CASE_H

#include "cmocka_c11.h"
#include "v4_model.h"

enum { V4_MOST = 64 };

/* cmocka's set-up and tear-down of the group: the folder, with the model in `model`. */
int v4_set_up(void **state);
int v4_tear_down(void **state);
extern made_model v4_made;

/* Fixed tokens; all of these begin alike. */
void v4_tokens(int32_t *tokens, int count);
/* `tokens` I32 [count] in file `name`; with `lengths` [count, V4_MOST], and `lengths` I32 [count]. */
void v4_put(const char *name, const int32_t *tokens, const int32_t *lengths, int64_t count);

/* The program that is run; V4_COMMAND at first. */
extern const char *v4_command;
/* Runs the example in the folder with --quiet; its exit code. */
int v4_run(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* A run that must end so; with 0 the whole numbers that it printed, whose count is returned. */
int v4_ends(int code, int32_t *numbers, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* What the last run wrote to stderr contains these words. */
void v4_says(const char *words);
/* A file of the folder, whole; malloc'ed. */
uint8_t *v4_read(const char *name, size_t *size);
void v4_write_file(const char *name, const uint8_t *bytes, size_t size);
bool v4_exists(const char *name);
/* `logits` of a file of the folder: [count, V4_VOCABULARY]. */
void v4_logits(const char *name, int64_t count, float *logits);
/* The folder itself. */
const char *v4_folder(void);

#endif
