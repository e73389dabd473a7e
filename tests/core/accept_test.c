/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* accept_test.c - the runner of bench/accept: what it measures, in which order, and how it judges. */
#include "cmocka_c11.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char dir[64], output[8192];

/* Runs the figures; returns the exit code, what was printed in `output`. */
static int accept_figures(const char *area)
{
    char path[128], command[512];
    snprintf(path, sizeof path, "%s/area.json", dir);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(area, f);
    fclose(f);
    snprintf(command, sizeof command, "%s %s %s 2>&1", ACCEPT_COMMAND, path, dir);
    f = popen(command, "r");
    assert_non_null(f);
    output[fread(output, 1, sizeof output - 1, f)] = '\0';
    return WEXITSTATUS(pclose(f));
}

static void expect(int code, const char *area, const char *said)
{
    const int got = accept_figures(area);
    if (got != code || strstr(output, said) == NULL)
        fail_msg("exit code %d instead of %d, or no \"%s\" in: %s", got, code, said, output);
}

#define FIGURES(rows) "{\"figures\": [" rows "]}"
#define RUN(json) "\"what\": \"w\", \"run\": \"echo '" json "'\", \"field\": "

static void a_figure_is_judged_by_its_target(void **state)
{
    (void)state;
    expect(
        0,
        FIGURES("{" RUN("{\\\"a\\\": [{\\\"b\\\": 0.5}, {\\\"b\\\": 2}]}") "\"a.0.b\", \"at_least\": 0.5}"),
        "PASS\n1 passed, 0 failed");
    expect(1, FIGURES("{" RUN("{\\\"a\\\": [{\\\"b\\\": 0.5}]}") "\"a.0.b\", \"at_least\": 0.51}"),
           "FAIL\n0 passed, 1 failed");
    expect(0, FIGURES("{" RUN("{\\\"a\\\": [1, 2]}") "\"a.0 + a.1\", \"at_most\": 3, \"unit\": \"us\"}"),
           "measured 3        us       PASS");
    expect(1, FIGURES("{" RUN("{\\\"a\\\": [1, 2]}") "\"a.0 + a.1\", \"at_most\": 3, \"scale\": 2}"),
           "measured 6");
    expect(0, FIGURES("{" RUN("{\\\"a\\\": 7}") "\"a\", \"information\": true}"),
           "INFORMATION\n0 passed, 0 failed");
    expect(0,
           FIGURES("{\"what\": \"of {limit.name}, {cpus} {x}\", \"run\": \"echo '{\\\"limit\\\": "
                   "{\\\"name\\\": \\\"read\\\"}, \\\"y\\\": 1}'\", "
                   "\"field\": \"y\", \"at_least\": 1}"),
           "of read, ");
    assert_non_null(strstr(output, "{x}"));
    expect(0, FIGURES("{" RUN("{\\\"a\\\": 7}") "\"a\", \"at_least\": 8, \"cpus\": 100000}"),
           "0 passed, 0 failed");
}

/* A figure does not pass if its command fails, prints no JSON or lacks the field. */
static void what_cannot_be_measured_fails(void **state)
{
    (void)state;
    expect(1, FIGURES("{" RUN("{\\\"a\\\": null}") "\"a\", \"at_least\": 0}"), "could not be measured FAIL");
    expect(1, FIGURES("{" RUN("{}") "\"a\", \"at_least\": 0}"), "could not be measured FAIL");
    expect(1, FIGURES("{\"what\": \"w\", \"run\": \"echo no JSON\", \"field\": \"a\", \"at_least\": 0}"),
           "could not be measured FAIL");
    expect(1,
           FIGURES("{\"what\": \"w\", \"run\": \"echo '{\\\"a\\\": 1}'; exit 3\", \"field\": \"a\", "
                   "\"at_least\": 0}"),
           "could not be measured");
    expect(1, FIGURES("{" RUN("{\\\"a\\\": 1}") "\"a\"}"), "could not be measured");
    expect(1, FIGURES("{\"prints\": \"echo a line; exit 1\"}"), "a line\n0 passed, 1 failed");
    expect(2, "{\"figures\": 1}", "a list of figures");
    expect(2, "{", "area.json");
    expect(0, "{\"needs\": \"exit 1\", \"otherwise\": \"nothing here\", \"figures\": []}", "nothing here\n");
}

/* Commands take turns; each ratio is of one round, and the median counts, not the best. Figures with the same
 * commands share the rounds. The counter's n-th run prints n. */
static void rounds_are_in_turns_and_their_median_counts(void **state)
{
    char area[2048];
    (void)state;
    snprintf(area, sizeof area,
             FIGURES("{\"what\": \"a\", \"run\": \"echo x >>%s/log; echo '{\\\"v\\\": '$(wc -l "
                     "<%s/log)'}'\", \"over\": \"echo y >>%s/log; echo '{\\\"v\\\": 1}'\", "
                     "\"field\": \"v\", \"rounds\": 3, \"at_least\": 3.5},"
                     "{\"what\": \"b\", \"run\": \"echo x >>%s/log; echo '{\\\"v\\\": '$(wc -l "
                     "<%s/log)'}'\", \"over\": \"echo y >>%s/log; echo '{\\\"v\\\": 1}'\", "
                     "\"field\": \"v\", \"rounds\": 3, \"at_most\": 3}"),
             dir, dir, dir, dir, dir, dir);
    expect(1, area, "measured 3 "); /* 1, 3, 5 */
    assert_non_null(strstr(output, "1 passed, 1 failed"));
    snprintf(area, sizeof area, "cat %s/log | tr -d '\\n'; rm %s/log", dir, dir);
    FILE *f = popen(area, "r");
    assert_non_null(f);
    output[fread(output, 1, sizeof output - 1, f)] = '\0';
    pclose(f);
    assert_string_equal(output, "xyxyxy");
}

/* The first word of a file in the folder; false while there is none. */
static bool read_word(const char *name, char word[64])
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "r");
    const bool found = f != NULL && fscanf(f, "%63s", word) == 1;
    if (f != NULL) fclose(f);
    return found;
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A signal to the runner alone, as from kill, ends it, the command that it runs and that command's own
 * children, and removes its folder. */
static void signals_end_it_and_its_commands(void **state)
{
    static const struct {
        int number, code;
    } signals[] = {{SIGINT, 130}, {SIGTERM, 143}};
    char path[128], folder[64], command[64];
    (void)state;
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        snprintf(path, sizeof path, "%s/area.json", dir);
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fprintf(
            f,
            FIGURES("{\"what\": \"w\", \"field\": \"a\", \"at_least\": 0, \"run\": \"sleep 20 & echo {dir} "
                    ">%s/folder; echo $! >%s/command; wait\"}"),
            dir, dir);
        fclose(f);
        const pid_t runner = fork();
        if (runner == 0) {
            execl(ACCEPT_COMMAND, ACCEPT_COMMAND, path, dir, (char *)NULL);
            _exit(99);
        }
        const double start = seconds_now();
        while (!read_word("command", command) && seconds_now() - start < 10) usleep(1000);
        assert_true(read_word("folder", folder));
        const double sent = seconds_now();
        assert_int_equal(kill(runner, signals[i].number), 0);
        int status = 0;
        assert_int_equal(waitpid(runner, &status, 0), runner);
        assert_true(seconds_now() - sent < 1);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), signals[i].code);
        assert_int_equal(access(folder, F_OK), -1);
        while (kill((pid_t)atol(command), 0) == 0 && seconds_now() - sent < 5) usleep(1000);
        assert_int_equal(kill((pid_t)atol(command), 0), -1);
        assert_int_equal(errno, ESRCH);
        snprintf(path, sizeof path, "%s/command", dir);
        assert_int_equal(unlink(path), 0);
    }
}

static int make_folder(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/accept-test-XXXXXX");
    return mkdtemp(dir) != NULL ? 0 : -1;
}

static int remove_folder(void **state)
{
    char command[128];
    (void)state;
    snprintf(command, sizeof command, "rm -r %s", dir);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_figure_is_judged_by_its_target),
        cmocka_unit_test(what_cannot_be_measured_fails),
        cmocka_unit_test(rounds_are_in_turns_and_their_median_counts),
        cmocka_unit_test(signals_end_it_and_its_commands),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
