/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* accept_test.c - the runner of bench/accept: what it measures, in which order, and how it judges. */
#include "cmocka_c11.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
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
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
