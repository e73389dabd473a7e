/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors_fuzz.c - feeds any bytes to the reader; whatever it accepts must be readable to the last
 * byte. */
#include "fuzz.h"

#include <quern/safetensors.h>

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    quern_safetensors *file = NULL;
    volatile unsigned sink = 0;
    /* A copy of the exact size: reading past it is then seen by AddressSanitizer. */
    uint8_t *exact = malloc(size > 0 ? size : 1);
    if (exact == NULL) return 0;
    if (size > 0) memcpy(exact, data, size);
    const quern_status status = quern_safetensors_open_bytes(exact, size, &file);
    if (status != QUERN_OK) {
        if (file != NULL || *quern_last_error(NULL) == '\0')
            abort(); /* an error has a sentence and no file */
        free(exact);
        return 0;
    }
    for (size_t i = 0; i < quern_safetensors_count(file); i++) {
        quern_tensor t;
        const char *name = quern_safetensors_name(file, i);
        quern_safetensors_data data_of = QUERN_SAFETENSORS_DATA_INIT;
        if (!quern_safetensors_has(file, name)) abort();
        if (quern_safetensors_bytes(file, name, &data_of) != QUERN_OK || data_of.bytes > size) abort();
        for (size_t b = 0; b < data_of.bytes; b++) sink += ((const uint8_t *)data_of.data)[b];
        for (int32_t d = 0; d < data_of.ndim; d++) sink += (unsigned)data_of.shape[d];
        if (quern_safetensors_get(file, name, &t) != QUERN_OK) continue;
        size_t bytes = quern_dtype_size(t.dtype);
        if ((uintptr_t)t.data % bytes != 0) abort();
        for (int32_t d = 0; d < t.ndim; d++) bytes *= (size_t)t.shape[d];
        if (bytes > size) abort();
        for (size_t b = 0; b < bytes; b++) sink += ((const uint8_t *)t.data)[b];
    }
    for (size_t i = 0; i < quern_safetensors_metadata_count(file); i++) {
        const char *key = quern_safetensors_metadata_key(file, i);
        if (quern_safetensors_metadata(file, key) == NULL) abort();
    }
    quern_safetensors_close(file);
    free(exact);
    return 0;
}
