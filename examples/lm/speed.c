/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* speed.c - how fast bytes come from the layers' caches, and what these hold. */
#include "decode.h"
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What decoding costs after so many bytes. */
typedef struct pace {
    const char *name;
    int64_t context, cache_bytes;
    double ms; /* of a byte, median */
} pace;
enum { PACES = 3, TIMED = 64 };

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool measure(lm_decoder *d, const uint8_t *text, pace *p)
{
    double times[TIMED];
    if (!decoder_extend(d, text, p->context - d->position)) return false;
    p->cache_bytes = decoder_bytes(d);
    for (int i = 0; i < TIMED; i++) {
        const double before = seconds();
        if (!decoder_extend(d, text, 1)) return false;
        times[i] = 1e3 * (seconds() - before);
    }
    qsort(times, TIMED, sizeof *times, by_value);
    p->ms = times[TIMED / 2];
    return true;
}

int verb_speed(int argc, char **argv)
{
    static const char text[] =
        "lm speed --checkpoint FILE [--corpus PATH] [--json FILE] [--expert-weights f32|bf16|nvfp4]\n"
        "Bytes per second from caches that hold 1024, 4096 and 16384 bytes of held-out text, and what the "
        "caches\nhold.\n\n"
        "example:\n  lm speed --checkpoint csa.safetensors\n";
    lm_options o;
    if (!options_parse(argc, argv, text, &o)) return 2;
    if (o.checkpoint == NULL) return failure("--checkpoint FILE is needed") * 2;
    if (!output_check(o.json)) return 3;
    pace paces[PACES] = {{"1k", 1024, 0, 0}, {"4k", 4096, 0, 0}, {"16k", 16384, 0, 0}};
    const int64_t capacity = paces[PACES - 1].context + TIMED;
    lm_model m = {0};
    lm_corpus corpus;
    lm_run run;
    lm_decoder d = {0};
    if (!corpus_load(o.corpus, &corpus)) return 3;
    uint8_t *held_out = malloc((size_t)capacity);
    bool ok = held_out != NULL || failure("no memory for the text") == 0;
    for (int64_t i = 0; ok && i < capacity; i++) /* a short text is repeated */
        held_out[i] = corpus.bytes[corpus.train + i % (corpus.size - corpus.train)];
    ok = ok && checkpoint_load(&m, o.checkpoint, &run) && served_create(&m, o.expert_weights) &&
         decoder_open(&d, &m, capacity);
    for (int i = 0; ok && i < PACES; i++) {
        ok = measure(&d, held_out, &paces[i]);
        if (ok)
            printf("%s: %.0f bytes a second after %lld bytes, whose caches hold %lld bytes\n",
                   config_title(&m.config), 1e3 / paces[i].ms, (long long)paces[i].context,
                   (long long)paces[i].cache_bytes);
    }
    char fields[512] = "";
    for (int i = 0; ok && i < PACES; i++)
        snprintf(fields + strlen(fields), sizeof fields - strlen(fields),
                 "%s\"tokens_per_second_%s\": %.2f, \"cache_bytes_%s\": %lld", i > 0 ? ", " : "",
                 paces[i].name, 1e3 / paces[i].ms, paces[i].name, (long long)paces[i].cache_bytes);
    ok = ok && json_write(o.json, "{%s}\n", fields);
    decoder_close(&d);
    free(held_out);
    model_destroy(&m);
    corpus_free(&corpus);
    return ok ? 0 : 3;
}
