/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gguf_file.h - the whole model as one GGUF file: NVFP4 is ggml's type 40, with its global scales beside
 * it. */
#ifndef QUERN_QUANTIZE_GGUF_FILE_H
#define QUERN_QUANTIZE_GGUF_FILE_H

#include "quantize/conversion.h"

/* Plans, and without --dry-run writes, the file. Returns an exit code. */
int gguf_file_write(conversion *c);

#endif
