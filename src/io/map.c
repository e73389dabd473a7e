/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "io/map.h"

#include "core/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static quern_status fail(const char *verb, const char *path, const char *reason, char *why, size_t room)
{
    snprintf(why, room, "cannot %s '%s': %s", verb, TEXT_NAME(path), reason);
    return QUERN_ERR_IO;
}

static quern_status map_descriptor(int fd, const char *path, void **bytes, size_t *size, char *why,
                                   size_t room)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return fail("open", path, strerror(errno), why, room);
    if (!S_ISREG(st.st_mode)) return fail("map", path, "it is no regular file", why, room);
    void *mapping = NULL;
    if (st.st_size > 0) mapping = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapping == MAP_FAILED) {
        const bool memory = errno == ENOMEM;
        fail("map", path, strerror(errno), why, room);
        return memory ? QUERN_ERR_OUT_OF_MEMORY : QUERN_ERR_IO;
    }
    *bytes = mapping;
    *size = (size_t)st.st_size;
    return QUERN_OK;
}

quern_status map_file(const char *path, void **bytes, size_t *size, char *why, size_t room)
{
    /* O_NONBLOCK: a pipe is refused, not waited for. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return fail("open", path, strerror(errno), why, room);
    const quern_status status = map_descriptor(fd, path, bytes, size, why, room);
    close(fd);
    return status;
}
