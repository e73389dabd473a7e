/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "io/map.h"

#include "core/error.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static quern_status map_descriptor(int fd, const char *path, void **bytes, size_t *size)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return error_set(QUERN_ERR_IO, "cannot open '%s': %s", TEXT_NAME(path), strerror(errno));
    if (!S_ISREG(st.st_mode))
        return error_set(QUERN_ERR_IO, "cannot map '%s': it is no regular file", TEXT_NAME(path));
    void *mapping = NULL;
    if (st.st_size > 0) mapping = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapping == MAP_FAILED)
        return error_set(errno == ENOMEM ? QUERN_ERR_OUT_OF_MEMORY : QUERN_ERR_IO, "cannot map '%s': %s",
                         TEXT_NAME(path), strerror(errno));
    *bytes = mapping;
    *size = (size_t)st.st_size;
    return QUERN_OK;
}

quern_status map_file(const char *path, void **bytes, size_t *size)
{
    /* O_NONBLOCK: a pipe is refused, not waited for. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return error_set(QUERN_ERR_IO, "cannot open '%s': %s", TEXT_NAME(path), strerror(errno));
    const quern_status status = map_descriptor(fd, path, bytes, size);
    close(fd);
    return status;
}
