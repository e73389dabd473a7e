/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* made_model.h - puts small checkpoints together: tensors by name, written as one file or as shards. */
#ifndef QUERN_TEST_MADE_MODEL_H
#define QUERN_TEST_MADE_MODEL_H

#include <quern/quern.h>

#include <stddef.h>

enum { MADE_TENSORS = 512 };

typedef struct made_tensor {
    char name[128];
    quern_tensor tensor;
} made_tensor;

typedef struct made_model {
    made_tensor tensors[MADE_TENSORS];
    int count;
} made_model;

/* Adds a tensor of fixed pseudo-random bytes (floats: values in -1 ... 1) and returns its data. */
void *made_add(made_model *m, quern_dtype dtype, const char *name, int ndim, const int64_t *shape);
/* An f32 tensor with one number: [] or [1]. */
void made_number(made_model *m, const char *name, int ndim, float value);
/* What stands under this name; a failure where there is none. */
void *made_data(const made_model *m, const char *name);
/* Another dtype of the same element size for it. */
void made_retype(made_model *m, const char *name, quern_dtype dtype);
void made_remove(made_model *m, const char *name);

/* A linear in NVFP4: `module`.weight, .weight_scale, .weight_scale_2 = global; or compressed-tensors'
 * names, whose global is 1 / global. */
void made_modelopt(made_model *m, const char *module, int64_t rows, int64_t columns, float global);
void made_compressed_tensors(made_model *m, const char *module, int64_t rows, int64_t columns, float global);
/* DeepSeek-V4's MXFP4 and FP8: `module`.weight and .scale. */
void made_mxfp4(made_model *m, const char *module, int64_t rows, int64_t columns);
void made_fp8(made_model *m, const char *module, int64_t rows, int64_t columns, int64_t block);

/* Writes all tensors, or those from number `first` to before `end`. */
void made_write(const made_model *m, const char *path, int first, int end);
/* An index that says where they are, in `shards` files of about as many tensors, which are written beside
 * it. */
void made_write_shards(const made_model *m, const char *folder, int shards);
/* Frees the tensors; the model is empty again. */
void made_free(made_model *m);

#endif
