/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * model_fuzz.c - feeds any text to what reads a model's folder: as the index of two small shards, and as the
 * config.json of a model that `quern inspect` checks. An index that is accepted says exactly what the
 * shards hold.
 */
#include "fuzz.h"
#include "json_grammar.h"
#include "made_model.h"

#include "inspect/inspect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "model_fuzz.XXXXXX", path[64];
static inspection base; /* of a model in NVFP4 */
static size_t tensors;  /* of both shards */

static const char *file_of(const char *name)
{
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void remove_folder(void)
{
    static const char *const names[] = {"one.safetensors", "two.safetensors", "model.safetensors.index.json"};
    inspection_close(&base);
    for (size_t i = 0; i < 3; i++) unlink(file_of(names[i]));
    rmdir(folder);
}

static void make_folder(void)
{
    static made_model m;
    if (mkdtemp(folder) == NULL) abort();
    made_add(&m, QUERN_BF16, "model.embed_tokens.weight", 2, (const int64_t[]){10, 16});
    made_add(&m, QUERN_BF16, "lm_head.weight", 2, (const int64_t[]){10, 16});
    made_modelopt(&m, "model.layers.0.mlp.experts.0.up_proj", 16, 16, 1e-3f);
    tensors = (size_t)m.count;
    made_write(&m, file_of("one.safetensors"), 0, 2);
    made_write(&m, file_of("two.safetensors"), 2, m.count);
    made_write(&m, file_of("model.safetensors.index.json"), 0, m.count); /* all, until it is mapped */
    if (quern_checkpoint_open(path, &base.checkpoint) != QUERN_OK || !inspection_list(&base)) abort();
    made_free(&m);
    atexit(remove_folder);
}

static void read_index(const uint8_t *data, size_t size)
{
    quern_checkpoint *c = NULL;
    unlink(file_of("model.safetensors.index.json")); /* the mapped file stays as it is */
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
    const quern_status status = quern_checkpoint_open(folder, &c);
    if (status != QUERN_OK) {
        if (c != NULL || *quern_last_error(NULL) == '\0') abort();
        return;
    }
    if (quern_checkpoint_count(c) > tensors) abort();
    quern_checkpoint_close(c);
}

static void read_config(const uint8_t *data, size_t size)
{
    base.config = json_loadb((const char *)data, size, 0, NULL);
    check_all(&base);
    for (size_t i = 0; i < base.problem_count; i++) {
        if (*base.problems[i].sentence == '\0') abort();
        free(base.problems[i].sentence);
    }
    base.problem_count = 0;
    json_decref(base.config);
    base.config = NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (base.checkpoint == NULL) make_folder();
    read_index(data, size);
    read_config(data, size);
    return 0;
}

size_t fuzz_mutate(uint8_t *file, size_t size, size_t room)
{
    return json_mutate_text(file, size, room);
}

size_t fuzz_seed(size_t index, uint8_t *file)
{
    return json_seed(QUERN_FUZZ_CORPUS "/model/*", index, file);
}
