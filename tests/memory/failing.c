/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * failing.c - preloaded: of the allocations that the command, the library and jansson make, counted from 0,
 * that of QUERN_TEST_FAIL_AT fails, and with QUERN_TEST_FAIL_ON those after it. The file of QUERN_TEST_FAILED
 * is made when one does. Other libraries end the process themselves where memory lacks, and are spared.
 * QUERN_TEST_SIGNAL is a signal that the process gets as soon as a file has its name.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static atomic_long allocations;
static long fail_at = -1;
static bool fail_on;

__attribute__((constructor)) static void read_environment(void)
{
    const char *at = getenv("QUERN_TEST_FAIL_AT");
    fail_on = getenv("QUERN_TEST_FAIL_ON") != NULL;
    if (at != NULL) fail_at = atol(at);
}

/* Whether the allocation that the code at `caller` asks for fails. */
static bool fails(const void *caller)
{
    Dl_info info;
    if (fail_at < 0 || dladdr(caller, &info) == 0 || info.dli_fname == NULL) return false;
    const char *slash = strrchr(info.dli_fname, '/'), *file = slash != NULL ? slash + 1 : info.dli_fname;
    if (strncmp(file, "quern", 5) != 0 && strncmp(file, "libquern", 8) != 0 &&
        strncmp(file, "libjansson", 10) != 0)
        return false;
    const long i = atomic_fetch_add(&allocations, 1);
    if (i != fail_at && !(fail_on && i > fail_at)) return false;
    const char *mark = getenv("QUERN_TEST_FAILED");
    const int fd = mark != NULL ? open(mark, O_CREAT | O_WRONLY | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) close(fd);
    errno = ENOMEM;
    return true;
}

void *malloc(size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, size);
}

char *strdup(const char *text)
{
    const size_t size = strlen(text) + 1;
    char *copy = fails(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
    return copy != NULL ? memcpy(copy, text, size) : NULL;
}

int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    const char *number = getenv("QUERN_TEST_SIGNAL");
    const long code = syscall(SYS_renameat2, from_folder, from, to_folder, to, 0);
    if (number != NULL) raise(atoi(number));
    return (int)code;
}
