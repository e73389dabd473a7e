/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "safetensors_bytes.h"

#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

uint8_t *safetensors_bytes(const char *header, size_t data_bytes, size_t *size)
{
    const size_t length = strlen(header);
    *size = 8 + length + data_bytes;
    uint8_t *file = malloc(*size);
    assert_non_null(file);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)length >> 8 * i);
    memcpy(file + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++) file[8 + length + i] = (uint8_t)i;
    return file;
}
