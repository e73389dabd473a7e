/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * options.h - command line options as tables: a row has an option's name, type, offset in a struct and help.
 * Parsing, --help, `run --list` and docs/run.md all read the same rows.
 */
#ifndef QUERN_TOOLS_OPTIONS_H
#define QUERN_TOOLS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum option_type {
    OPTION_FLAG,   /* bool, no value */
    OPTION_BOOL,   /* bool: true or false */
    OPTION_INT,    /* int64_t */
    OPTION_FLOAT,  /* float */
    OPTION_TEXT,   /* const char * */
    OPTION_LIST,   /* option_list: may be given several times */
    OPTION_CHOICE, /* an enum: the index of the word in `choices` */
    OPTION_PARAM   /* a parameter of an operation of the library */
} option_type;

typedef struct option_row {
    const char *name;
    option_type type;
    size_t offset;              /* in the struct of the row's group. OPTION_PARAM: the parameter's number */
    const char *const *choices; /* CHOICE: NULL-terminated. PARAM: the operation, its values */
    const char *help;
} option_row;

enum { OPTION_LIST_MAX = 64 };
typedef struct option_list {
    const char *text[OPTION_LIST_MAX];
    int count;
} option_list;

/* Rows and the struct that they fill. */
typedef struct option_group {
    const option_row *rows;
    size_t count;
    void *base;
} option_group;

enum { OPTION_MAX = 64 }; /* rows of a verb, over all its groups */

/* Parses argv[1 ...]. Leaves the other words in argv[*first ... argc - 1]. --help sets *help and stops.
 * Returns EXIT_DONE, or EXIT_USAGE after a message. */
int parse_options(int argc, char **argv, const option_group *groups, size_t group_count, int *first,
                  bool *help);

/* One line a row: "  --name VALUE  help (default)"; the default is the value in the group's struct; no
 * default if base is NULL. */
void print_options(const option_group *group);
/* The value a row accepts, as text for help and documents: "INT", "true|false", "group|head" ... */
void option_value_text(const option_row *row, char *text, size_t room);
/* The value that `base` holds for a row. */
void option_current_text(const option_row *row, const void *base, char *text, size_t room);

/* Reads a comma list of integers in [least, most], each with an optional suffix k or M (powers of 1024).
 * Returns how many, or -1 if the text is no such list or has more than `room`. */
int parse_integers(const char *text, int64_t least, int64_t most, int64_t *out, int room);
/* "A/B", or "A" for both; numbers from 1 to 2^20. */
bool parse_pair(const char *text, int64_t *a, int64_t *b);

#endif
