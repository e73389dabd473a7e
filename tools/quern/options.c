/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "options.h"

#include "command.h"

#include <quern/op.h>

#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool parse_integer(const char *text, char **end, int64_t *out)
{
    errno = 0;
    const long long value = strtoll(text, end, 10);
    if (*end == text || errno != 0) return false;
    *out = value;
    return true;
}

int parse_integers(const char *text, int64_t least, int64_t most, int64_t *out, int room)
{
    int n = 0;
    for (char *end;; text = end + 1) {
        int64_t value, unit = 1;
        if (n == room || !parse_integer(text, &end, &value)) return -1;
        if (*end == 'k') unit = 1 << 10;
        if (*end == 'M') unit = 1 << 20;
        if (unit > 1) end++;
        if (__builtin_mul_overflow(value, unit, &value) || value < least || value > most) return -1;
        out[n++] = value;
        if (*end == '\0') return n;
        if (*end != ',') return -1;
    }
}

bool parse_pair(const char *text, int64_t *a, int64_t *b)
{
    char copy[64];
    if (strlen(text) >= sizeof copy) return false;
    memcpy(copy, text, strlen(text) + 1);
    char *slash = strchr(copy, '/');
    if (slash != NULL) *slash = '\0';
    return parse_integers(copy, 1, 1 << 20, a, 1) == 1 &&
           parse_integers(slash != NULL ? slash + 1 : copy, 1, 1 << 20, b, 1) == 1;
}

/* Words have dashes; underscores are read as such. */
static bool same_word(const char *word, const char *text)
{
    for (; *word != '\0' && (*word == *text || (*word == '-' && *text == '_')); word++, text++) continue;
    return *word == *text;
}

static bool append(option_list *list, const char *text)
{
    if (list->count == OPTION_LIST_MAX) return false;
    list->text[list->count++] = text;
    return true;
}

/* Stores the value; false if the row does not accept it. */
static bool store(const option_row *row, void *base, const char *value)
{
    void *at = row->type == OPTION_PARAM ? base : (char *)base + row->offset;
    char *end;
    int64_t integer;
    switch (row->type) {
    case OPTION_FLAG: *(bool *)at = true; return true;
    case OPTION_BOOL:
        *(bool *)at = strcmp(value, "true") == 0 || strcmp(value, "1") == 0;
        return *(bool *)at || strcmp(value, "false") == 0 || strcmp(value, "0") == 0;
    case OPTION_INT:
        if (!parse_integer(value, &end, &integer) || *end != '\0') return false;
        *(int64_t *)at = integer;
        return true;
    case OPTION_FLOAT:
        *(float *)at = strtof(value, &end);
        return end != value && *end == '\0' && isfinite(*(float *)at);
    case OPTION_TEXT: *(const char **)at = value; return true;
    case OPTION_LIST: return append(at, value);
    case OPTION_CHOICE:
        for (int i = 0; row->choices[i] != NULL; i++) {
            if (same_word(row->choices[i], value)) {
                *(int *)at = i;
                return true;
            }
        }
        return false;
    case OPTION_PARAM:
        return quern_op_set(quern_op_named(row->choices[0]), base, row->name, value) == QUERN_OK;
    }
    return false;
}

void option_value_text(const option_row *row, char *text, size_t room)
{
    static const char *const words[] = {"", "true|false", "INT", "NUMBER", "TEXT", "TEXT", "", ""};
    size_t used =
        (size_t)snprintf(text, room, "%s", row->type == OPTION_PARAM ? row->choices[1] : words[row->type]);
    for (int i = 0; row->type == OPTION_CHOICE && row->choices[i] != NULL; i++)
        used += (size_t)snprintf(text + used, room - used, "%s%s", i > 0 ? "|" : "", row->choices[i]);
}

void option_current_text(const option_row *row, const void *base, char *text, size_t room)
{
    const void *at = row->type == OPTION_PARAM ? base : (const char *)base + row->offset;
    const char *word;
    switch (row->type) {
    case OPTION_FLAG: snprintf(text, room, "off"); break;
    case OPTION_BOOL: snprintf(text, room, "%s", *(const bool *)at ? "true" : "false"); break;
    case OPTION_INT: snprintf(text, room, "%" PRId64, *(const int64_t *)at); break;
    case OPTION_FLOAT: snprintf(text, room, "%g", (double)*(const float *)at); break;
    case OPTION_TEXT:
        word = *(const char *const *)at;
        snprintf(text, room, "%s", word != NULL ? word : "none");
        break;
    case OPTION_LIST:
        snprintf(text, room, "%s",
                 ((const option_list *)at)->count > 0 ? ((const option_list *)at)->text[0] : "none");
        break;
    case OPTION_CHOICE: snprintf(text, room, "%s", row->choices[*(const int *)at]); break;
    case OPTION_PARAM:
        (void)quern_op_text(quern_op_named(row->choices[0]), base, (int32_t)row->offset, text, room);
        break;
    }
}

void print_options(const option_group *group)
{
    for (size_t i = 0; i < group->count; i++) {
        const option_row *row = &group->rows[i];
        char value[100], now[60], left[160];
        option_value_text(row, value, sizeof value);
        snprintf(left, sizeof left, "--%s %s", row->name, value);
        printf("  %-34s %s", left, row->help);
        if (row->type != OPTION_FLAG && group->base != NULL) {
            option_current_text(row, group->base, now, sizeof now);
            printf(" (default %s)", now);
        }
        putchar('\n');
    }
}

int parse_options(int argc, char **argv, const option_group *groups, size_t group_count, int *first,
                  bool *help)
{
    struct option table[OPTION_MAX + 2];
    const option_row *rows[OPTION_MAX];
    void *bases[OPTION_MAX];
    int n = 0;
    for (size_t g = 0; g < group_count; g++) {
        for (size_t i = 0; i < groups[g].count && n < OPTION_MAX; i++, n++) {
            rows[n] = &groups[g].rows[i];
            bases[n] = groups[g].base;
            table[n] = (struct option){
                rows[n]->name, rows[n]->type == OPTION_FLAG ? no_argument : required_argument, NULL, n + 1};
        }
    }
    table[n] = (struct option){"help", no_argument, NULL, OPTION_MAX + 1};
    table[n + 1] = (struct option){NULL, 0, NULL, 0};
    *help = false;
    opterr = 0;
    optind = 0; /* glibc: start afresh, argv may be parsed twice */
    for (int c; (c = getopt_long(argc, argv, ":h", table, NULL)) != -1;) {
        if (c == 'h' || c == OPTION_MAX + 1) {
            *help = true;
            return EXIT_DONE;
        }
        if (c == ':')
            return fail(EXIT_USAGE, "option '%s' needs a value; see quern %s --help", argv[optind - 1],
                        command_verb);
        if (c == '?')
            return fail(EXIT_USAGE,
                        "option '%s' is unknown, ambiguous or takes no value; see quern %s --help",
                        argv[optind - 1], command_verb);
        if (!store(rows[c - 1], bases[c - 1], optarg)) {
            char value[100];
            option_value_text(rows[c - 1], value, sizeof value);
            return fail(EXIT_USAGE, "--%s '%s': %s is accepted", rows[c - 1]->name, optarg, value);
        }
    }
    *first = optind;
    return EXIT_DONE;
}
