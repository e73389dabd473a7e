/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors_bytes.h - a safetensors file by its header's text. */
#ifndef QUERN_TEST_SAFETENSORS_BYTES_H
#define QUERN_TEST_SAFETENSORS_BYTES_H

#include <stddef.h>
#include <stdint.h>

/* A file of `header` and data_bytes bytes of data 0, 1, 2 ...; free it. */
uint8_t *safetensors_bytes(const char *header, size_t data_bytes, size_t *size);

#endif
