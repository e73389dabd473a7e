/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * file.h - writes a file whole or not at all: every result of Quern's programs, and safetensors files, go
 * through it.
 *
 *     quern_file *file;
 *     if (quern_file_create("result.json", &file) == QUERN_OK &&
 *         quern_file_write(file, text, strlen(text)) == QUERN_OK) ...
 *     status = quern_file_commit(file);
 *
 * Where the path names a regular file, or nothing yet, the bytes go to a temporary file in the same folder,
 * without a name where the file system has such files (a process that is killed leaves none of it), else of
 * a name that nobody else has; quern_file_commit syncs it and puts it in the place of the path's. Readers
 * see the old file or the new one, never a part, and on any error the old one stays. A new file gets the
 * modes that the umask allows. One that replaces another keeps its permissions and, where the process may
 * set them, owner and group; hard links keep the old contents.
 *
 * A symbolic link is followed, whether its target exists or not: the target is replaced, the link stays. A
 * pipe or a character device (/dev/stdout, /dev/null, a FIFO) is never renamed over: it is written as it
 * stands, and what was written before an error stays written. A path that names the file behind standard
 * output or standard error is written through that descriptor. Folders, block devices, sockets and files that
 * the process may not write are refused.
 */
#ifndef QUERN_FILE_H
#define QUERN_FILE_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A file that is being written. One thread at a time; at most 64 in a process. */
typedef struct quern_file quern_file;

/* Tells before the work whether quern_file_create would succeed: QUERN_OK or its error. Creates nothing
 * and opens no pipe or device. */
QUERN_API quern_status quern_file_check(const char *path);
/* Starts a file. QUERN_ERR_IO: it cannot be written; the sentence says why. QUERN_ERR_OUT_OF_MEMORY: no
 * memory, or 64 files are open already. Opening a FIFO waits for its reader. End with _commit or _discard. */
QUERN_API quern_status quern_file_create(const char *path, quern_file **file);
/* Appends bytes, buffered. After an error only _commit and _discard are left. */
QUERN_API quern_status quern_file_write(quern_file *file, const void *bytes, size_t size);
/* Writes bytes at an offset, which may lie past the end, unbuffered; several threads may at once. One
 * file takes either this or quern_file_write. A pipe or device is refused; after an error only _discard
 * is left. */
QUERN_API quern_status quern_file_write_at(quern_file *file, int64_t offset, const void *bytes, size_t size);
/* Writes what is buffered, syncs and renames. Returns the error of an earlier _write too. Frees in any
 * case. */
QUERN_API quern_status quern_file_commit(quern_file *file);
/* Removes the temporary file and frees; NULL is allowed. */
QUERN_API void quern_file_discard(quern_file *file);
/* Removes the temporary files of this process. Async-signal-safe: for the handler of a signal that ends the
 * process. The files cannot be written or committed afterwards. */
QUERN_API void quern_file_discard_all(void);

#ifdef __cplusplus
}
#endif
#endif
