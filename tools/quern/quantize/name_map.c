/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "quantize/name_map.h"

#include "command.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The whole file with a zero after it; NULL with errno. */
static char *read_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    char *text = NULL;
    size_t size = 0, room = 0;
    while (f != NULL && !feof(f) && !ferror(f)) {
        if (size + 1 >= room) {
            room = 2 * room + 4096;
            char *grown = realloc(text, room);
            if (grown == NULL) break;
            text = grown;
        }
        size += fread(text + size, 1, room - size - 1, f);
    }
    const bool good = f != NULL && feof(f) && !ferror(f);
    const int why = errno;
    if (f != NULL) fclose(f);
    if (good) {
        text[size] = '\0';
        return text;
    }
    free(text);
    errno = why;
    return NULL;
}

static int count_of(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++) n++;
    return n;
}

static bool is_rule(const name_rule *r)
{
    return r->from != NULL && r->to != NULL && count_of(r->from, "{n}") <= 1 &&
           count_of(r->from, "{e}") <= 1 && count_of(r->to, "{n}") <= count_of(r->from, "{n}") &&
           count_of(r->to, "{e}") <= count_of(r->from, "{e}");
}

static int read_rule(const char *path, char *line, int number, name_map *map)
{
    char *rest = NULL;
    name_rule rule = {strtok_r(line, " \t\r", &rest), NULL};
    if (rule.from == NULL || *rule.from == '#') return EXIT_DONE;
    rule.to = strtok_r(NULL, " \t\r", &rest);
    if (!is_rule(&rule) || strtok_r(NULL, " \t\r", &rest) != NULL)
        return fail(EXIT_INPUT,
                    "--name-map '%s', line %d: two names, the second with no more {n} and {e} than the "
                    "first, are accepted",
                    TEXT_NAME(path), number);
    map->rules[map->count++] = rule;
    return EXIT_DONE;
}

int name_map_read(const char *path, name_map *map)
{
    *map = (name_map){.text = read_file(path)};
    if (map->text == NULL) return fail(EXIT_INPUT, "--name-map '%s': %s", TEXT_NAME(path), strerror(errno));
    size_t lines = 1;
    for (const char *at = map->text; *at != '\0'; at++) lines += *at == '\n';
    map->rules = calloc(lines, sizeof *map->rules);
    int code = map->rules != NULL ? EXIT_DONE : fail(EXIT_MACHINE, "no memory for the name map"), number = 1;
    for (char *line = map->text; line != NULL && code == EXIT_DONE; number++) {
        char *end = strchr(line, '\n');
        if (end != NULL) *end++ = '\0';
        code = read_rule(path, line, number, map);
        line = end;
    }
    return code;
}

void name_map_free(name_map *map)
{
    free(map->text);
    free(map->rules);
}

/* Whether the name fits; numbers[0] is that of {n}, numbers[1] of {e}, -1 where the pattern has none. */
static bool fits(const char *pattern, const char *name, int64_t numbers[2])
{
    numbers[0] = numbers[1] = -1;
    while (*pattern != '\0') {
        const bool number = strncmp(pattern, "{n}", 3) == 0 || strncmp(pattern, "{e}", 3) == 0;
        if (!number) {
            if (*pattern++ != *name++) return false;
            continue;
        }
        char *end;
        if (*name < '0' || *name > '9') return false;
        numbers[pattern[1] == 'e'] = strtoll(name, &end, 10);
        name = end;
        pattern += 3;
    }
    return *name == '\0';
}

static char *fill_in(const char *target, const int64_t numbers[2])
{
    char *name = malloc(strlen(target) + 64), *to = name;
    while (name != NULL && *target != '\0') {
        const bool number = strncmp(target, "{n}", 3) == 0 || strncmp(target, "{e}", 3) == 0;
        if (number) to += sprintf(to, "%lld", (long long)numbers[target[1] == 'e']);
        else *to++ = *target;
        target += number ? 3 : 1;
    }
    if (name != NULL) *to = '\0';
    return name;
}

char *name_map_apply(const name_map *map, const char *name, int64_t *expert)
{
    int64_t numbers[2];
    *expert = -1;
    for (size_t i = 0; i < map->count; i++) {
        if (!fits(map->rules[i].from, name, numbers)) continue;
        if (strstr(map->rules[i].to, "{e}") == NULL) *expert = numbers[1];
        return fill_in(map->rules[i].to, numbers);
    }
    return strdup(name);
}
