/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* command.h - runs the command as a script does, in a folder of the test program's own. */
#ifndef QUERN_TEST_COMMAND_H
#define QUERN_TEST_COMMAND_H

#include "cmocka_c11.h"

#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

static char directory[] = "command_test.XXXXXX";
static char output[1 << 18]; /* stdout and stderr of the last run */

/* The tests judge no rate: a bench's ceilings go through little memory. */
static inline int make_directory(void **state)
{
    (void)state;
    if (setenv("QUERN_CEILING_MIB", "4", 0) != 0) return -1;
    return mkdtemp(directory) == NULL ? -1 : 0;
}

static inline int remove_directory(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    return system(command);
}

/* What follows the arguments of `quern run`. */
#ifndef QUERN_COMMAND_DEVICE
#define QUERN_COMMAND_DEVICE ""
#endif

/* Runs `quern ARGUMENTS` with DIR standing for the test's directory, VECTORS for the golden vectors; returns
 * the exit code. `prefix` goes before the command. */
static inline int run_with(const char *prefix, const char *arguments)
{
    char command[4096];
    snprintf(command, sizeof command, "DIR='%s'; VECTORS='%s'; %s '%s' %s %s 2>&1", directory,
             QUERN_TEST_VECTORS, prefix, QUERN_COMMAND, arguments,
             strncmp(arguments, "run ", 4) == 0 ? QUERN_COMMAND_DEVICE : "");
    FILE *f = popen(command, "r");
    assert_non_null(f);
    output[fread(output, 1, sizeof output - 1, f)] = '\0';
    const int how = pclose(f);
    assert_true(WIFEXITED(how));
    return WEXITSTATUS(how);
}

static inline int run(const char *arguments)
{
    return run_with("", arguments);
}

static inline void expect(int code, const char *arguments, const char *part)
{
    const int got = run(arguments);
    if (got != code || strstr(output, part) == NULL)
        fail_msg("quern %s: exit code %d instead of %d, or no \"%s\" in: %s", arguments, got, code, part,
                 output);
    if (code != 0 && code != 1 && strchr(output, '\n') != output + strlen(output) - 1)
        fail_msg("quern %s: more than one sentence: %s", arguments, output);
}

static inline const char *path_of(const char *name)
{
    static char path[4][256];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", directory, name);
    return path[next];
}

static inline bool exists(const char *name)
{
    struct stat st;
    return stat(path_of(name), &st) == 0;
}

static inline void write_text(const char *name, const char *text, size_t size)
{
    FILE *f = fopen(path_of(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

/* No temporary file was left in the test's directory. */
static inline void check_no_leftovers(void)
{
    DIR *d = opendir(directory);
    assert_non_null(d);
    for (const struct dirent *e; (e = readdir(d)) != NULL;)
        if (strstr(e->d_name, ".tmp") != NULL) fail_msg("%s was left behind", e->d_name);
    closedir(d);
}

#endif
