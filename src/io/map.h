/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* map.h - a file's bytes, read-only. */
#ifndef QUERN_IO_MAP_H
#define QUERN_IO_MAP_H

#include <quern/quern.h>

/* Maps a regular file. *bytes is NULL where it is empty; else unmap with munmap. On failure `why` has the
 * sentence, of at most room - 1 characters. */
quern_status map_file(const char *path, void **bytes, size_t *size, char *why, size_t room);

#endif
