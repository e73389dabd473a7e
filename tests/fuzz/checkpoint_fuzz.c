/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * checkpoint_fuzz.c - small models whose headers lie: what `quern inspect` decodes and checks of them,
 * and the experts of their first layers. Only a header's tokens change, so that most files are read to
 * the end.
 */
#include "fuzz.h"
#include "json_grammar.h"
#include "made_model.h"

#include "inspect/decode.h"
#include "inspect/inspect.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[] = "checkpoint_fuzz.XXXXXX";
static quern_context *context;

static void remove_path(void)
{
    unlink(path);
    quern_context_destroy(context);
}

static void prepare(void)
{
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    params.threads = 1;
    const int fd = mkstemp(path);
    if (fd < 0 || close(fd) != 0 || quern_context_create(&params, &context) != QUERN_OK) abort();
    atexit(remove_path);
}

static void decode_all(inspection *in)
{
    static float values[DECODE_VALUES];
    for (size_t i = 0; i < in->count; i++) {
        const statistics_source source = source_of(in, &in->tensors[i]);
        statistics s = {0};
        decoder d;
        if (!decoder_begin(&source, &d)) continue;
        for (int64_t at = 0; at < d.values; at += DECODE_VALUES)
            decode(&d, at, d.values - at < DECODE_VALUES ? d.values - at : DECODE_VALUES, values, &s);
    }
}

static void read_experts(const quern_checkpoint *c, int64_t layer, bool repacked)
{
    enum { MOST = 1 << 24 };
    quern_checkpoint_moe experts = QUERN_CHECKPOINT_MOE_INIT;
    size_t bytes = 0;
    if (quern_checkpoint_experts_bytes(context, c, layer, QUERN_CPU, repacked, &bytes) != QUERN_OK ||
        bytes > MOST)
        return;
    void *memory = malloc(bytes + 1);
    if (memory == NULL) abort();
    (void)quern_checkpoint_experts(context, c, layer, QUERN_CPU, repacked, memory, bytes, &experts);
    free(memory);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    inspection in = {.path = path};
    if (context == NULL) prepare();
    unlink(path); /* a new file: what replaces another's bytes may go to the disk at once */
    FILE *f = fopen(path, "wb");
    if (f == NULL || fwrite(data, 1, size, f) != size || fclose(f) != 0) abort();
    if (quern_checkpoint_open(path, &in.checkpoint) != QUERN_OK) return 0;
    if (!inspection_list(&in)) abort();
    decode_all(&in);
    check_all(&in);
    for (int64_t layer = 0; layer < 2; layer++)
        for (int repacked = 0; repacked < 2; repacked++) read_experts(in.checkpoint, layer, repacked != 0);
    inspection_close(&in);
    return 0;
}

size_t fuzz_mutate(uint8_t *file, size_t size, size_t room)
{
    static json_token tokens[JSON_TOKENS];
    static char text[FUZZ_ROOM];
    static uint8_t data[FUZZ_ROOM];
    uint64_t length = 0;
    for (int i = 7; i >= 0 && size >= 8; i--) length = length << 8 | file[i];
    if (size < 8 || length > size - 8) return size;
    const size_t rest = size - 8 - (size_t)length;
    memcpy(text, file + 8, (size_t)length);
    memcpy(data, file + 8 + length, rest);
    if (rest > 0 && fuzz_random(2) == 0) data[fuzz_random((uint32_t)rest)] = (uint8_t)fuzz_random(256);
    size_t n = json_tokens(text, (size_t)length, tokens), at = 8;
    if (n > 0) n = json_mutate(tokens, n);
    for (size_t i = 0; i < n && at + rest <= room && tokens[i].size <= room - at - rest; i++) {
        memcpy(file + at, tokens[i].text, tokens[i].size);
        at += tokens[i].size;
    }
    if (at + rest > room) return size;
    memcpy(file + at, data, rest);
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)(at - 8) >> 8 * i);
    return at + rest;
}

/* Experts of two layers in one of the formats. */
static void make_model(made_model *m, size_t which)
{
    char name[96];
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"}, *const short_parts[] = {
                                                                                  "w1", "w3", "w2"};
    for (int i = 0; i < 3 && which < 3; i++) {
        if (which == 2) snprintf(name, sizeof name, "layers.1.ffn.experts.0.%s", short_parts[i]);
        else snprintf(name, sizeof name, "model.layers.0.mlp.experts.0.%s", parts[i]);
        if (which == 0) made_modelopt(m, name, 32, 32, 1e-3f);
        if (which == 1) made_compressed_tensors(m, name, 32, 32, 1e-3f);
        if (which == 2) made_mxfp4(m, name, 32, 32);
    }
    if (which == 3) {
        made_add(m, QUERN_U8, "layers.0.experts.gate_up_proj_blocks", 4, (const int64_t[]){1, 64, 1, 16});
        made_add(m, QUERN_U8, "layers.0.experts.gate_up_proj_scales", 3, (const int64_t[]){1, 64, 1});
        made_add(m, QUERN_U8, "layers.0.experts.down_proj_blocks", 4, (const int64_t[]){1, 32, 1, 16});
        made_add(m, QUERN_U8, "layers.0.experts.down_proj_scales", 3, (const int64_t[]){1, 32, 1});
    }
    if (which == 4) {
        made_add(m, QUERN_BF16, "layers.0.experts.gate_up_proj", 3, (const int64_t[]){2, 16, 8});
        made_add(m, QUERN_BF16, "layers.0.experts.gate_up_proj_bias", 2, (const int64_t[]){2, 8});
        made_add(m, QUERN_BF16, "layers.0.experts.down_proj", 3, (const int64_t[]){2, 4, 16});
    }
    if (which == 5) made_fp8(m, "layers.0.attn.wkv", 40, 34, 32);
    for (int i = 0; i < 3 && which == 6; i++) {
        snprintf(name, sizeof name, "layers.0.ffn.experts.0.%s", short_parts[i]);
        made_fp8(m, name, 48, 48, 32);
        snprintf(name, sizeof name, "layers.0.ffn.shared_experts.%s", short_parts[i]);
        made_modelopt(m, name, i == 2 ? 48 : 16, i == 2 ? 16 : 48, 1e-3f);
    }
}

size_t fuzz_seed(size_t index, uint8_t *file)
{
    static made_model m;
    if (index > 6) return 0;
    if (context == NULL) prepare();
    make_model(&m, index);
    made_write(&m, path, 0, m.count);
    made_free(&m);
    FILE *f = fopen(path, "rb");
    const size_t size = f != NULL ? fread(file, 1, FUZZ_ROOM, f) : 0;
    if (f != NULL) fclose(f);
    return size;
}
