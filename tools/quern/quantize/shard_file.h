/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * shard_file.h - an output shard: its header, and whether an earlier run has finished it.
 *
 * The header's metadata says how the shard was made (a fingerprint of options and inputs) and what the report
 * holds of it, so that a run that was interrupted goes on with the shards that are missing.
 */
#ifndef QUERN_QUANTIZE_SHARD_FILE_H
#define QUERN_QUANTIZE_SHARD_FILE_H

#include "quantize/convert.h"

#include <limits.h>

/* Of the options and all inputs: globals are shared across shards. */
uint64_t shard_hash_inputs(const conversion *c);
/* Orders the tensors of a shard by their elements' width and sets offsets, header_bytes and bytes.
 * Returns an exit code. */
int shard_lay_out(const conversion *c, size_t shard, output_file *f);
/* Whether the file at `path` was made from the same inputs with the same options; its report is then read. */
bool shard_is_done(conversion *c, size_t shard, const output_file *f, const char *path);
/* A shard to write. */
typedef struct shard_job {
    size_t shard;
    output_file *file;
    char path[PATH_MAX];
} shard_job;
/* Converts and writes shards, at most FILES_AT_ONCE. Returns an exit code. */
int shards_write(conversion *c, const shard_job *jobs, size_t count, progress *p);

#endif
