/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * run.c - measures an area's figures, which a JSON file describes: prints a line per figure with target,
 * measured, PASS or FAIL. usage: accept AREA.json BUILD_DIRECTORY. Exit code 0: every figure passed, 1: one
 * failed or could not be measured, 2: the command line or the file is wrong.
 *
 * A figure has `what` (its text), `run` (a command for sh that prints JSON, or writes it to {json}), `field`
 * (where the number stands in it: "results.0.fraction"; terms may be added with +), `at_least`, `at_most` or
 * `information`: true, and may have
 *   over         another command: the figure is the first number over its number (of over_field, else field)
 *   rounds       with over: both commands run once a round, in turns; the median of the ratios counts
 *   once         with over: `run` is slow and runs once, not in every round
 *   scale, unit  the measured number is multiplied by, and printed with
 *   cpus         left out on machines with fewer
 * Figures with the same commands share their runs. A field "@seconds" is the command's time. Instead of these
 * a figure may have `prints`: a command that prints its own lines and exits with 1 where one fails. {build}
 * and {dir}, a folder that is removed afterwards, stand in commands; in `what` {cpus}, and fields of the
 * first command's JSON. The file's `needs` is a command that must succeed; `otherwise` is printed where it
 * does not, and nothing is accepted.
 */
#include <jansson.h>

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TEXT = 2048, ROUNDS_MAX = 101, RUNS_MAX = 512 };

/* A run of a command, kept for other figures with the same command. */
typedef struct result {
    char key[TEXT]; /* the command and its round */
    json_t *root;
    double seconds;
    bool done; /* false: it failed */
} result;

typedef struct runner {
    const char *build;
    char dir[64];
    result results[RUNS_MAX];
    size_t count;
    int passed, failed;
} runner;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static const char *text_of(const json_t *figure, const char *name)
{
    return json_string_value(json_object_get(figure, name));
}

/* ---- fields ---- */

/* "results.0.fraction" of a document. */
static const json_t *find(const json_t *root, const char *path, size_t length)
{
    while (root != NULL && length > 0) {
        char word[64];
        size_t n = 0;
        while (n < length && path[n] != '.') n++;
        snprintf(word, sizeof word, "%.*s", (int)n, path);
        root =
            json_is_array(root) ? json_array_get(root, strtoul(word, NULL, 10)) : json_object_get(root, word);
        const size_t used = n + (n < length);
        path += used;
        length -= used;
    }
    return root;
}

/* The sum of the fields that + joins; false if one is no number. */
static bool number_of(const result *r, const char *field, double *sum)
{
    *sum = 0;
    if (!r->done || field == NULL) return false;
    if (strcmp(field, "@seconds") == 0) {
        *sum = r->seconds;
        return true;
    }
    for (const char *at = field; *at != '\0';) {
        const size_t length = strcspn(at, "+ ");
        const json_t *x = find(r->root, at, length);
        if (!json_is_number(x)) return false;
        *sum += json_number_value(x);
        at += length;
        at += strspn(at, "+ ");
    }
    return true;
}

/* ---- commands ---- */

/* Replaces each {name}; an unknown one stays. */
static void fill_in(const runner *a, const char *text, const json_t *root, char *to, size_t room)
{
    size_t used = 0;
    char number[32];
    while (*text != '\0' && used + 1 < room) {
        const size_t length = *text == '{' ? strcspn(text, "}") : 0;
        const char *value = NULL;
        char name[128];
        snprintf(name, sizeof name, "%.*s", length > 0 ? (int)length - 1 : 0, text + 1);
        const json_t *field = length > 0 ? find(root, name, strlen(name)) : NULL;
        if (length > 0 && strcmp(name, "build") == 0) value = a->build;
        if (length > 0 && strcmp(name, "dir") == 0) value = a->dir;
        if (length > 0 && strcmp(name, "cpus") == 0) {
            snprintf(number, sizeof number, "%ld", sysconf(_SC_NPROCESSORS_ONLN));
            value = number;
        }
        if (value == NULL && json_is_string(field)) value = json_string_value(field);
        if (value == NULL) {
            to[used++] = *text++;
            continue;
        }
        const int n = snprintf(to + used, room - used, "%s", value);
        used += n > 0 && (size_t)n < room - used ? (size_t)n : 0;
        text += length + 1;
    }
    to[used] = '\0';
}

static void remove_folder(const runner *a)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", a->dir);
    if (system(command) != 0) fprintf(stderr, "%s stays\n", a->dir);
}

static volatile sig_atomic_t group, ended_by; /* the process group of the command that runs; the signal */

static void pass_on(int number)
{
    ended_by = number;
    if (group > 0) kill(-(pid_t)group, number);
}

static const int ending[] = {SIGINT, SIGTERM, SIGHUP};
enum { ENDING = sizeof ending / sizeof *ending };

static void pass_signals_on(void)
{
    const struct sigaction action = {.sa_handler = pass_on};
    for (int i = 0; i < ENDING; i++) sigaction(ending[i], &action, NULL);
}

/* sh with its children, as wait's status; -1: it could not start. */
static int run_group(const char *line)
{
    sigset_t all, before;
    int status = -1;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before); /* no signal comes between fork and `group` */
    const pid_t child = ended_by == 0 ? fork() : -1;
    if (child == 0) {
        setpgid(0, 0);
        for (int i = 0; i < ENDING; i++) signal(ending[i], SIG_DFL);
        sigprocmask(SIG_SETMASK, &before, NULL);
        execl("/bin/sh", "sh", "-c", line, (char *)NULL);
        _exit(127);
    }
    if (child > 0) setpgid(child, child); /* whichever of the two comes first */
    group = child > 0 ? (sig_atomic_t)child : 0;
    sigprocmask(SIG_SETMASK, &before, NULL);
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    group = 0;
    if (ended_by > 0 && child > 0) kill(-child, SIGTERM); /* sh lets its background jobs ignore SIGINT */
    return status;
}

/* Runs a figure's command and returns its exit code; if a signal ended it, this program ends too. `printed`
 * is the file for its output, "" for our own output. */
static int shell(const runner *a, const char *command, const char *printed)
{
    char filled[TEXT], line[2 * TEXT], json[128];
    const char *at = strstr(command, "{json}");
    snprintf(json, sizeof json, "%s/json", a->dir);
    if (at != NULL)
        snprintf(line, sizeof line, "%.*s%s%s", (int)(at - command), command, json, at + strlen("{json}"));
    fill_in(a, at != NULL ? line : command, NULL, filled, sizeof filled);
    snprintf(line, sizeof line, "%s%s%s", filled, *printed != '\0' ? " >" : "", printed);
    fflush(stdout);
    const int status = run_group(line);
    int number = ended_by;
    if (number == 0 && status != -1 && WIFSIGNALED(status)) number = WTERMSIG(status);
    int code = status != -1 && WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (number > 0) code = 128 + number;
    if (code > 128) { /* sh's exit code, too, for a command that a signal ended */
        remove_folder(a);
        exit(code);
    }
    return code;
}

/* The command's run in a round: a kept one, or a new one. */
static const result *run_of(runner *a, const char *command, const char *pair, int round, const char *field)
{
    static const result nothing;
    char key[TEXT], path[128];
    const bool timed = strcmp(field, "@seconds") == 0;
    snprintf(key, sizeof key, "%d %s | %s", round, command, pair);
    for (size_t i = 0; i < a->count; i++)
        if (strcmp(a->results[i].key, key) == 0) return &a->results[i];
    if (a->count == RUNS_MAX) return &nothing;
    result *r = &a->results[a->count++];
    snprintf(r->key, sizeof r->key, "%s", key);
    snprintf(path, sizeof path, "%s/printed", a->dir);
    const double start = now();
    r->done = shell(a, command, timed ? "" : path) == 0;
    r->seconds = now() - start;
    if (strstr(command, "{json}") != NULL) snprintf(path, sizeof path, "%s/json", a->dir);
    if (r->done && !timed) r->root = json_load_file(path, 0, NULL);
    r->done = r->done && (timed || r->root != NULL);
    return r;
}

/* ---- figures ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* False if a command failed or its field is no number. *first: a run of the first command. */
static bool measure(runner *a, const json_t *figure, double *measured, const result **first)
{
    const char *run = text_of(figure, "run"), *over = text_of(figure, "over"),
               *field = text_of(figure, "field");
    const char *over_field = text_of(figure, "over_field") != NULL ? text_of(figure, "over_field") : field;
    const json_t *scale = json_object_get(figure, "scale"), *count = json_object_get(figure, "rounds");
    const int rounds = json_is_integer(count) ? (int)json_integer_value(count) : 1;
    const bool once = over == NULL || json_is_true(json_object_get(figure, "once"));
    double ratios[ROUNDS_MAX];
    if (run == NULL || field == NULL || rounds < 1 || rounds > ROUNDS_MAX) return false;
    for (int i = 0; i < rounds; i++) {
        double x, y = 1;
        *first = run_of(a, run, once ? "" : over, once ? 0 : i, field);
        if (!number_of(*first, field, &x)) return false;
        if (over != NULL && !number_of(run_of(a, over, run, i, over_field), over_field, &y)) return false;
        ratios[i] = x / y;
    }
    qsort(ratios, (size_t)rounds, sizeof *ratios, by_value);
    *measured = ratios[rounds / 2] * (json_is_number(scale) ? json_number_value(scale) : 1);
    return true;
}

static void accept_figure(runner *a, const json_t *figure)
{
    static const result nothing;
    const result *first = &nothing;
    const json_t *least = json_object_get(figure, "at_least"), *most = json_object_get(figure, "at_most");
    const char *unit = text_of(figure, "unit"), *what = text_of(figure, "what");
    const bool information = json_is_true(json_object_get(figure, "information"));
    char line[TEXT];
    double measured = 0;
    const bool done = measure(a, figure, &measured, &first);
    fill_in(a, what != NULL ? what : "?", first->root, line, sizeof line);
    if (!done || (!information && !json_is_number(least) && !json_is_number(most))) {
        printf("%-74s could not be measured FAIL\n", line);
        a->failed++;
        return;
    }
    if (information) {
        printf("%-74s target    %-8s measured %-8.3g %-8s %s\n", line, "none", measured,
               unit != NULL ? unit : "", "INFORMATION");
        return;
    }
    const double target = json_number_value(json_is_number(least) ? least : most);
    const bool passed = json_is_number(least) ? measured >= target : measured <= target;
    printf("%-74s target %s %-8.3g measured %-8.3g %-8s %s\n", line,
           json_is_number(least) ? ">=" : "<=", target, measured, unit != NULL ? unit : "",
           passed ? "PASS" : "FAIL");
    a->passed += passed;
    a->failed += !passed;
}

static int accept_area(runner *a, const json_t *area)
{
    const char *needs = text_of(area, "needs"), *otherwise = text_of(area, "otherwise");
    const double start = now();
    const json_t *figure;
    size_t i;
    if (needs != NULL && shell(a, needs, "/dev/null 2>&1") != 0) {
        printf("%s\n", otherwise != NULL ? otherwise : "what is needed is not here: nothing is accepted");
        return 0;
    }
    json_array_foreach(json_object_get(area, "figures"), i, figure)
    {
        const char *prints = text_of(figure, "prints");
        const json_t *cpus = json_object_get(figure, "cpus");
        if (json_is_integer(cpus) && sysconf(_SC_NPROCESSORS_ONLN) < (long)json_integer_value(cpus)) continue;
        if (prints == NULL) accept_figure(a, figure);
        else if (shell(a, prints, "") != 0) a->failed++;
        fflush(stdout);
    }
    printf("%d passed, %d failed, %.0f s\n", a->passed, a->failed, now() - start);
    return a->failed > 0;
}

int main(int argc, char **argv)
{
    static runner a;
    json_error_t error;
    json_t *area = argc == 3 ? json_load_file(argv[1], 0, &error) : NULL;
    if (argc != 3) {
        fprintf(stderr, "usage: accept AREA.json BUILD_DIRECTORY\n");
        return 2;
    }
    if (!json_is_array(json_object_get(area, "figures"))) {
        fprintf(stderr, "%s: %s\n", argv[1],
                area == NULL ? error.text : "an object with a list of figures is accepted");
        json_decref(area);
        return 2;
    }
    a.build = argv[2];
    snprintf(a.dir, sizeof a.dir, "/tmp/accept-XXXXXX");
    if (mkdtemp(a.dir) == NULL) {
        fprintf(stderr, "no folder in /tmp\n");
        return 2;
    }
    pass_signals_on();
    const int code = accept_area(&a, area);
    for (size_t i = 0; i < a.count; i++) json_decref(a.results[i].root);
    json_decref(area);
    remove_folder(&a);
    return code;
}
