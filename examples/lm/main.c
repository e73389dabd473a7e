/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* main.c - lm train | eval | generate | order2. */
#include "options.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char help[] =
    "lm - a byte-level language model on Quern\n\n"
    "  lm train      train with native sparse or dense attention\n"
    "  lm eval       held-out bits per byte of a checkpoint\n"
    "  lm generate   continue a prompt\n"
    "  lm order2     held-out bits per byte of an interpolated order-2 byte model\n\n"
    "lm VERB --help says more. Exit codes: 0 done, 2 wrong usage, 3 failed; 130, 143 ended by SIGINT, "
    "SIGTERM. Files are\n"
    "written whole or not at all: an interrupted run leaves the checkpoint before it.\n";

int verb_eval(int argc, char **argv)
{
    static const char text[] =
        "lm eval --checkpoint FILE [--corpus PATH] [--pieces 48] [--json FILE] - held-out bits per byte\n"
        "  --expert-weights f32|bf16|nvfp4   of a mixture: as trained (default), or as a server holds "
        "them\n\n"
        "examples:\n"
        "  lm eval --checkpoint nsa.safetensors --pieces 90\n"
        "  lm eval --checkpoint experts.safetensors --expert-weights nvfp4\n";
    lm_options o;
    if (!options_parse(argc, argv, text, &o)) return 2;
    if (o.checkpoint == NULL) return failure("--checkpoint FILE is needed") * 2;
    if (!output_check(o.json)) return 3;
    lm_model m = {0};
    lm_corpus corpus;
    lm_run run;
    if (!corpus_load(o.corpus, &corpus)) return 3;
    const bool fits = checkpoint_load(&m, o.checkpoint, &run) && held_out_fits(&corpus, m.config.context) &&
                      served_create(&m, o.expert_weights);
    const double bits = fits ? evaluate(&m, &corpus, o.pieces) : -1.0;
    bool ok = bits >= 0.0;
    if (ok)
        printf("%.4f held-out bits per byte (%s, step %lld)\n", bits, config_title(&m.config),
               (long long)m.step);
    ok = ok && json_write(o.json, "{\"bits_per_byte\": %.6f}\n", bits);
    model_destroy(&m);
    corpus_free(&corpus);
    return ok ? 0 : 3;
}

int verb_generate(int argc, char **argv)
{
    static const char text[] =
        "lm generate --checkpoint FILE [--prompt TEXT] [--bytes 400] [--temperature 0.7] [--seed 1]\n\n"
        "example:\n  lm generate --checkpoint nsa.safetensors --prompt 'struct ' --temperature 0.5\n";
    lm_options o;
    if (!options_parse(argc, argv, text, &o)) return 2;
    if (o.checkpoint == NULL) return failure("--checkpoint FILE is needed") * 2;
    lm_model m = {0};
    lm_run run;
    bool ok = checkpoint_load(&m, o.checkpoint, &run);
    const char *prompt = o.prompt != NULL && *o.prompt != '\0' ? o.prompt : "\n";
    const int64_t have = (int64_t)strlen(prompt);
    uint8_t *all = malloc((size_t)(have + o.bytes));
    ok = ok && (all != NULL || failure("no memory for %" PRId64 " bytes of text", have + o.bytes) == 0);
    if (all != NULL) memcpy(all, prompt, (size_t)have);
    if (ok) fwrite(prompt, 1, (size_t)have, stdout);
    uint64_t state = o.run.seed;
    for (int64_t i = have; ok && i < have + o.bytes; i++) {
        const int64_t n = i < m.config.context ? i : m.config.context;
        const float *logits = model_next(&m, all + i - n, (int32_t)n);
        ok = logits != NULL;
        for (int c = 0; c < BYTES && ok; c++)
            ok = isfinite(logits[c]) ||
                 failure("the model gives a logit of %g: its weights are too large", (double)logits[c]) == 0;
        if (!ok) break;
        double p[BYTES], sum = 0.0, top = logits[0];
        int best = 0;
        for (int c = 1; c < BYTES; c++)
            if (logits[c] > top) {
                top = logits[c];
                best = c;
            }
        for (int c = 0; c < BYTES; c++)
            sum += p[c] = o.temperature > 0.0 ? exp((logits[c] - top) / o.temperature) : c == best;
        double at = (double)(random_next(&state) >> 11) * 0x1p-53 * sum;
        int c = 0;
        while (c < BYTES - 1 && (at -= p[c]) >= 0.0) c++;
        all[i] = (uint8_t)c;
        putchar(c);
        ok = fflush(stdout) == 0; /* output_finish says so */
    }
    if (ok) putchar('\n');
    free(all);
    model_destroy(&m);
    return ok || ferror(stdout) ? 0 : 3;
}

int verb_order2(int argc, char **argv)
{
    static const char text[] =
        "lm order2 [--corpus PATH] [--steps 390] [--context 4096] [--pieces 48] [--json FILE]\n"
        "An order-2 byte model (Witten-Bell) on the bytes that `lm train` sees in --steps steps, and on "
        "all.\n\n"
        "example:\n  lm order2 --steps 390\n";
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
    } verbs[] = {
        {"train", verb_train}, {"eval", verb_eval}, {"generate", verb_generate}, {"order2", verb_order2}};
    for (size_t i = 0; argc > 1 && i < sizeof verbs / sizeof *verbs; i++)
        if (strcmp(argv[1], verbs[i].name) == 0) return verbs[i].run(argc - 1, argv + 1);
    const bool asked = argc > 1 && strcmp(argv[1], "--help") == 0;
    fputs(help, asked ? stdout : stderr);
    return asked ? 0 : 2;
}

int main(int argc, char **argv)
{
    output_end_on_signals();
    return output_finish(run_verb(argc, argv));
}
