/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lm_signals_test.c - a signal ends the example: wherever the stack pointer is, and in the main thread. */
#include "cmocka_c11.h"

#include "lm.h"

#include <quern/file.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

/* The exit code of a child process that runs body; -1 where a signal killed it. */
static int code_of_child(void (*body)(void))
{
    int how = 0;
    const pid_t child = fork();
    if (child == 0) {
        body();
        _exit(1);
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

static char folder[32];
static pid_t self;

static void begin_file(void)
{
    char path[64];
    quern_file *file = NULL;
    snprintf(path, sizeof path, "%s/file", folder);
    if (quern_file_create(path, &file) != QUERN_OK || quern_file_write(file, "x", 1) != QUERN_OK) _exit(2);
}

static void terminate(void)
{
    kill(self, SIGTERM);
    _exit(3); /* the signal comes before kill returns */
}

/* On a stack that has no room for the frame of a handler. */
static void terminate_on_short_stack(void)
{
    static ucontext_t here, there;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), room = 1024;
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, page, PROT_NONE) != 0) _exit(2);
    signals_hold();
    signals_end_program();
    begin_file();
    self = getpid();
    kill(self, 0); /* the dynamic linker's search for it needs more room, too */
    getcontext(&there);
    there.uc_stack = (stack_t){.ss_sp = pages + page, .ss_size = room};
    makecontext(&there, terminate, 0);
    swapcontext(&here, &there);
}

static void ends_on_any_stack(void **unused)
{
    (void)unused;
    assert_int_equal(code_of_child(terminate_on_short_stack), 128 + SIGTERM);
}

/* A signal that is sent to this thread alone waits. */
static void *other_thread(void *unused)
{
    sigset_t waiting;
    pthread_kill(pthread_self(), SIGTERM);
    if (sigpending(&waiting) != 0 || !sigismember(&waiting, SIGTERM)) _exit(4);
    return unused;
}

static void terminate_beside_thread(void)
{
    pthread_t thread;
    signals_hold();
    if (pthread_create(&thread, NULL, other_thread, NULL) != 0) _exit(2);
    signals_end_program();
    pthread_join(thread, NULL);
    kill(getpid(), SIGINT);
}

static void other_threads_take_none(void **unused)
{
    (void)unused;
    assert_int_equal(code_of_child(terminate_beside_thread), 128 + SIGINT);
}

static void terminate_too_early(void)
{
    signals_hold();
    kill(getpid(), SIGTERM);
    begin_file();
    signals_end_program();
}

static void early_ones_wait(void **unused)
{
    (void)unused;
    assert_int_equal(code_of_child(terminate_too_early), 128 + SIGTERM);
}

static int make_folder(void **unused)
{
    (void)unused;
    strcpy(folder, "/tmp/lm_signals_test_XXXXXX");
    return mkdtemp(folder) == NULL;
}

/* Fails where a child left a temporary file. */
static int remove_folder(void **unused)
{
    (void)unused;
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(ends_on_any_stack, make_folder, remove_folder),
        cmocka_unit_test(other_threads_take_none),
        cmocka_unit_test_setup_teardown(early_ones_wait, make_folder, remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
