/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * safetensors.h - reads and writes safetensors files: named tensors behind a JSON header.
 *
 * File: 8 bytes n (little-endian), n bytes of JSON {"name": {"dtype", "shape", "data_offsets"}, ...,
 * "__metadata__": {"key": "value"}}, then the data. The tensors' ranges tile the data exactly: no
 * overlap, no hole, nothing after the last. "__metadata__": null is as if it were not there. An escaped
 * U+0000 in a name, a key or a value comes out as the bytes C0 80, and goes in so: strings stay C's.
 *
 * Reading maps the file; tensor views point into the mapping and are read-only (a write to one is a
 * fault). They live until the file is closed. Whoever shortens a file while it is mapped gets SIGBUS:
 * replace files by rename, as quern_safetensors_save does. Finding a tensor by its name takes time
 * logarithmic in their number.
 */
#ifndef QUERN_SAFETENSORS_H
#define QUERN_SAFETENSORS_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An open file. May be read from several threads at once. */
typedef struct quern_safetensors quern_safetensors;

/* Opens and validates the whole header. QUERN_ERR_IO: the file cannot be read. QUERN_ERR_FORMAT: it is no
 * valid safetensors file; the sentence names the tensor and what is wrong. Close with _close. */
QUERN_API quern_status quern_safetensors_open(const char *path, quern_safetensors **file);
/* The same from memory, which the caller owns and which must outlive the file. */
QUERN_API quern_status quern_safetensors_open_bytes(const void *bytes, size_t size, quern_safetensors **file);
/* Unmaps and frees; NULL is allowed. */
QUERN_API void quern_safetensors_close(quern_safetensors *file);

/* Number of tensors, and the name of one in the order of their data; NULL past the end. The string
 * belongs to the file. (Here and below a `file` of NULL has no tensors and no metadata.) */
QUERN_API size_t quern_safetensors_count(const quern_safetensors *file);
QUERN_API const char *quern_safetensors_name(const quern_safetensors *file, size_t index);
/* True if a tensor of this name is in the file. */
QUERN_API bool quern_safetensors_has(const quern_safetensors *file, const char *name);
/* A contiguous CPU view of the named tensor, its data aligned to its element: in rare files a copy, made
 * at the first call and freed with the file, else the mapping itself. The format's F8_E4M3, F8_E5M2,
 * F8_E8M0, F8_E4M3FNUZ, F8_E5M2FNUZ and F4 are QUERN_E4M3, QUERN_E5M2, QUERN_E8M0, QUERN_E4M3FNUZ,
 * QUERN_E5M2FNUZ and QUERN_E2M1X2. Of F4 the view's last extent counts bytes; the file's counts elements,
 * or pairs as torch does: whichever agrees with the bytes. No such tensor: QUERN_ERR_INVALID_ARGUMENT.
 * F6_E2M3 and F6_E3M2, F4 of an odd last extent, or more than QUERN_MAX_DIMS dimensions:
 * QUERN_ERR_UNSUPPORTED. */
QUERN_API quern_status quern_safetensors_get(const quern_safetensors *file, const char *name,
                                             quern_tensor *view);

/* A tensor as the file has it, whatever its dtype. All pointers belong to the file. */
typedef struct quern_safetensors_data {
    size_t size;
    const char *dtype; /* the format's own name, "F6_E2M3" */
    const void *data;  /* where it stands in the mapping: not necessarily aligned to its element */
    size_t bytes;
    int32_t ndim; /* any number */
    const int64_t *shape;
} quern_safetensors_data;
#define QUERN_SAFETENSORS_DATA_INIT QUERN_SIZED(quern_safetensors_data)

/* Fills *data, every field but size. No such tensor: QUERN_ERR_INVALID_ARGUMENT. */
QUERN_API quern_status quern_safetensors_bytes(const quern_safetensors *file, const char *name,
                                               quern_safetensors_data *data);

/* The header's "__metadata__": number of pairs, the key of one (NULL past the end), and the value of a key
 * (NULL if absent). The strings belong to the file. */
QUERN_API size_t quern_safetensors_metadata_count(const quern_safetensors *file);
QUERN_API const char *quern_safetensors_metadata_key(const quern_safetensors *file, size_t index);
QUERN_API const char *quern_safetensors_metadata(const quern_safetensors *file, const char *key);

typedef struct quern_safetensors_item {
    const char *name;           /* UTF-8, unique, not "__metadata__" */
    const quern_tensor *tensor; /* on the CPU; any strides */
} quern_safetensors_item;

typedef struct quern_safetensors_pair {
    const char *key, *value; /* UTF-8; keys unique */
} quern_safetensors_pair;

/* Writes the tensors, streamed one after another, and the metadata as quern/file.h writes: readers of a
 * regular file see the old one or the new one, never a part. */
QUERN_API quern_status quern_safetensors_save(const char *path, const quern_safetensors_item *items,
                                              size_t count, const quern_safetensors_pair *metadata,
                                              size_t metadata_count);

#ifdef __cplusplus
}
#endif
#endif
