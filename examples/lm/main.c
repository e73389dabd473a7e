/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* main.c - lm train | eval | generate | speed | order2. */
#include "options.h"

#include <stdio.h>
#include <string.h>

static const char help[] =
    "lm - a byte-level language model on Quern\n\n"
    "  lm train      train with dense, native sparse or DeepSeek-V4's compressed attention\n"
    "  lm eval       held-out bits per byte of a checkpoint, in one shot or from caches\n"
    "  lm generate   continue a prompt\n"
    "  lm speed      bytes per second from caches, and what they hold\n"
    "  lm order2     held-out bits per byte of an interpolated order-2 byte model\n\n"
    "lm VERB --help says more. Exit codes: 0 done, 2 wrong usage, 3 failed; 130, 143 ended by SIGINT, "
    "SIGTERM. Files are\n"
    "written whole or not at all: an interrupted run leaves the checkpoint before it.\n";

int verb_order2(int argc, char **argv)
{
    static const char text[] =
        "lm order2 [--corpus PATH] [--steps 280] [--context 4096] [--pieces 48] [--json FILE]\n"
        "An order-2 byte model (Witten-Bell) on the bytes that `lm train` sees in --steps steps, and on "
        "all.\n\n"
        "example:\n  lm order2 --steps 280\n";
    lm_options o;
    if (!options_parse(argc, argv, text, &o)) return 2;
    lm_corpus corpus;
    if (!output_check(o.json)) return 3;
    order2 *some = order2_create(), *all = order2_create();
    bool ok = (some != NULL && all != NULL) || failure("no memory for the order-2 model") == 0;
    ok = ok && corpus_load(o.corpus, &corpus);
    if (ok) {
        const int64_t n = o.config.context;
        double bits[2] = {0.0, 0.0};
        int64_t count = 0;
        ok = held_out_fits(&corpus, n);
        for (int64_t i = 0; ok && i < o.run.steps; i++) {
            const int64_t at = corpus_piece(&corpus, n, o.run.seed, i);
            ok = at >= 0;
            if (ok) order2_add(some, corpus.bytes + at, n + 1);
        }
        order2_add(all, corpus.bytes, corpus.train);
        for (int64_t at; ok && (at = corpus_held_out(&corpus, n, count, o.pieces)) >= 0; count++) {
            bits[0] += order2_bits(some, corpus.bytes + at, n + 1);
            bits[1] += order2_bits(all, corpus.bytes + at, n + 1);
        }
        for (int i = 0; ok && i < 2; i++) bits[i] /= (double)(count * n);
        if (ok) {
            printf("order-2 (Witten-Bell): %.4f held-out bits per byte on the same bytes, %.4f on all\n",
                   bits[0], bits[1]);
            ok = json_write(o.json, "{\"same_bytes\": %.6f, \"all_bytes\": %.6f}\n", bits[0], bits[1]);
        }
        corpus_free(&corpus);
    }
    order2_free(some);
    order2_free(all);
    return ok ? 0 : 3;
}

static int run_verb(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int, char **);
    } verbs[] = {{"train", verb_train},
                 {"eval", verb_eval},
                 {"generate", verb_generate},
                 {"speed", verb_speed},
                 {"order2", verb_order2}};
    for (size_t i = 0; argc > 1 && i < sizeof verbs / sizeof *verbs; i++)
        if (strcmp(argv[1], verbs[i].name) == 0) return verbs[i].run(argc - 1, argv + 1);
    const bool asked = argc > 1 && strcmp(argv[1], "--help") == 0;
    fputs(help, asked ? stdout : stderr);
    return asked ? 0 : 2;
}

int main(int argc, char **argv)
{
    signals_hold();
    threads_start();
    signals_end_program();
    return output_finish(run_verb(argc, argv));
}
