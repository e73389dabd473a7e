/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "output.h"

#include "command.h"

#include <quern/file.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int output_check(const char *path)
{
    const quern_status status = path != NULL ? quern_file_check(path) : QUERN_OK;
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

static int put(const char *bytes, size_t size, void *file)
{
    return quern_file_write(file, bytes, size) == QUERN_OK ? 0 : -1;
}

int output_json(const char *path, const json_t *root, size_t flags)
{
    quern_file *file = NULL;
    const int code = output_flush(EXIT_DONE);
    if (code != EXIT_DONE) return code;
    quern_status status = quern_file_create(path, &file);
    if (status != QUERN_OK) return fail_status(status);
    const bool dumped = json_dump_callback(root, put, file, flags) == 0;
    status = quern_file_write(file, "\n", 1);
    if (!dumped && status == QUERN_OK) {
        quern_file_discard(file);
        return fail(EXIT_MACHINE, "no memory to write '%s'", TEXT_NAME(path));
    }
    status = quern_file_commit(file);
    return status == QUERN_OK ? EXIT_DONE : fail_status(status);
}

bool have_program(const char *name)
{
    char path[4096];
    const char *at = getenv("PATH");
    while (at != NULL && *at != '\0') {
        const size_t n = strcspn(at, ":");
        snprintf(path, sizeof path, "%.*s/%s", (int)n, at, name);
        if (access(path, X_OK) == 0) return true;
        at += n + (at[n] == ':');
    }
    return false;
}

int output_chart(const char *path, FILE *script)
{
    char command[128], bytes[4096];
    quern_file *file = NULL;
    if (fflush(script) != 0) return fail(EXIT_MACHINE, "no room for gnuplot's script: %s", strerror(errno));
    const int code = output_flush(EXIT_DONE);
    if (code != EXIT_DONE) return code;
    const quern_status status = quern_file_create(path, &file);
    if (status != QUERN_OK) return fail_status(status);
    snprintf(command, sizeof command, "exec gnuplot -d /proc/%ld/fd/%d", (long)getpid(), fileno(script));
    FILE *svg = popen(command, "r");
    size_t size = 0;
    for (size_t n; svg != NULL && (n = fread(bytes, 1, sizeof bytes, svg)) > 0; size += n)
        (void)quern_file_write(file, bytes, n);
    if (svg == NULL || pclose(svg) != 0 || size == 0) {
        quern_file_discard(file);
        return fail(EXIT_MACHINE, "gnuplot could not draw '%s'", TEXT_NAME(path));
    }
    const quern_status done = quern_file_commit(file);
    return done == QUERN_OK ? EXIT_DONE : fail_status(done);
}

void output_print(const json_t *root, size_t flags)
{
    json_dumpf(root, stdout, flags);
    putchar('\n');
}

json_t *output_text(const char *text)
{
    size_t n = 0;
    char *bytes = need_memory(strlen(text) + 1);
    for (const char *at = text; *at != '\0'; at++) {
        const bool zero = at[0] == '\xc0' && at[1] == '\x80';
        bytes[n++] = zero ? '\0' : *at;
        at += zero;
    }
    json_t *string = json_stringn(bytes, n);
    free(bytes);
    return string;
}

json_t *output_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static pthread_t main_thread;
static const char *volatile result_path; /* NULL: none is the last */
static struct stat result_before;

static struct stat standing_at(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? st : (struct stat){0};
}

void output_last(const char *path)
{
    result_path = NULL;
    result_before = standing_at(path);
    result_path = path;
}

/* Whether the last result stands where it belongs: a file gets there by a rename, so it is another one. */
static bool result_in_place(void)
{
    const int before = errno;
    if (result_path == NULL) return false;
    const struct stat now = standing_at(result_path);
    errno = before;
    return now.st_ino != result_before.st_ino || now.st_dev != result_before.st_dev;
}

/* Ends the program in its main thread, which writes the files: another thread would take a file away while
 * the main thread finishes it, and that one would report an error. */
static void end(int number)
{
    if (!pthread_equal(pthread_self(), main_thread)) {
        pthread_kill(main_thread, number);
        return;
    }
    if (result_in_place()) return;
    quern_file_discard_all();
    _exit(128 + number);
}

void output_keep_streams(void)
{
    int fd;
    do fd = open("/", O_PATH | O_CLOEXEC);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd >= 0) close(fd);
}

void output_end_on_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    struct sigaction action = {.sa_handler = end, .sa_flags = SA_RESTART}, before;
    main_thread = pthread_self();
    sigfillset(&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        /* nohup stays; SIGINT that a shell ignores for its background jobs still ends a command that it is
         * sent to */
        if (numbers[i] == SIGHUP && sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler == SIG_IGN)
            continue;
        sigaction(numbers[i], &action, NULL);
    }
    signal(SIGXFSZ, SIG_IGN); /* a file limit is then an error of write(), reported like a full disk */
}

int output_flush(int code)
{
    errno = 0; /* an earlier write's is lost; where that failed, what is left fails for the same reason */
    const bool flushed = fflush(stdout) == 0;
    if ((flushed && ferror(stdout) == 0) || code > EXIT_MISMATCH) return code;
    return fail(EXIT_INPUT, "cannot write to standard output%s%s", errno != 0 ? ": " : "",
                errno != 0 ? strerror(errno) : "");
}
