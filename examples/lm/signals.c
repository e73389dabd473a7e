/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* signals.c - signals that end the program. */
#include "lm.h"

#include <quern/file.h>

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
enum { ENDING = sizeof ending / sizeof *ending, HANDLER_STACK = 64 << 10 };

static void mask_ending(int how)
{
    sigset_t set;
    sigemptyset(&set);
    for (int i = 0; i < ENDING; i++) sigaddset(&set, ending[i]);
    pthread_sigmask(how, &set, NULL);
}

void signals_hold(void)
{
    mask_ending(SIG_BLOCK);
}

static void end(int number)
{
    quern_file_discard_all();
    _exit(128 + number);
}

/* oneDNN's sgemm points the stack pointer into its workspace on the heap, which has no room for a handler's
 * frame. So the handler has a stack of its own. */
void signals_end_program(void)
{
    static char stack[HANDLER_STACK];
    struct sigaction action = {.sa_handler = end, .sa_flags = SA_ONSTACK}, before;
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    sigfillset(&action.sa_mask);
    for (int i = 0; i < ENDING; i++) {
        if (ending[i] == SIGHUP && sigaction(SIGHUP, NULL, &before) == 0 && before.sa_handler == SIG_IGN)
            continue; /* nohup */
        sigaction(ending[i], &action, NULL);
    }
    signal(SIGXFSZ, SIG_IGN); /* a file limit is then an error of write(), reported like a full disk */
    mask_ending(SIG_UNBLOCK);
}
