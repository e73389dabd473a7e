/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* generate.c - continues a prompt from the layers' caches. */
#include "decode.h"
#include "options.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool all_finite(const float *logits)
{
    for (int c = 0; c < BYTES; c++)
        if (!isfinite(logits[c]))
            return failure("the model gives a logit of %g: its weights are too large", (double)logits[c]) ==
                   0;
    return true;
}

/* Continues all[0 ... have - 1] to all[0 ... have + o->bytes - 1] and prints each byte. */
static bool continue_text(lm_model *m, const lm_options *o, uint8_t *all, int64_t have)
{
    lm_decoder d;
    uint64_t state = o->run.seed;
    bool ok = decoder_open(&d, m, have + o->bytes);
    int64_t fresh = have;
    for (int64_t i = have; ok && i < have + o->bytes; i++) {
        ok = decoder_extend(&d, all, fresh);
        const float *logits = decoder_logits(&d, fresh);
        ok = ok && all_finite(logits);
        if (!ok) break;
        fresh = 1;
        all[i] = (uint8_t)sample(logits, o->temperature, o->top_p, &state);
        putchar(all[i]);
        ok = fflush(stdout) == 0; /* output_finish says so */
    }
    decoder_close(&d);
    return ok;
}

int verb_generate(int argc, char **argv)
{
    static const char text[] =
        "lm generate --checkpoint FILE [--prompt TEXT] [--bytes 400] [--temperature 0.7] [--top-p 1] [--seed "
        "1]\n"
        "            [--expert-weights f32|bf16|nvfp4]\n"
        "Continues the prompt. A byte is drawn from the likeliest whose chances sum to --top-p; temperature "
        "0 "
        "takes the\n"
        "likeliest. The same options give the same bytes.\n\n"
        "example:\n  lm generate --checkpoint nsa.safetensors --prompt 'struct ' --temperature 0.5\n";
    lm_options o;
    if (!options_parse(argc, argv, text, &o)) return 2;
    if (o.checkpoint == NULL) return failure("--checkpoint FILE is needed") * 2;
    lm_model m = {0};
    lm_run run;
    bool ok = checkpoint_load(&m, o.checkpoint, &run) && served_create(&m, o.expert_weights);
    const char *prompt = o.prompt != NULL && *o.prompt != '\0' ? o.prompt : "\n";
    const int64_t have = (int64_t)strlen(prompt);
    uint8_t *all = malloc((size_t)(have + o.bytes));
    ok = ok && (all != NULL || failure("no memory for %" PRId64 " bytes of text", have + o.bytes) == 0);
    if (all != NULL) memcpy(all, prompt, (size_t)have);
    if (ok) fwrite(prompt, 1, (size_t)have, stdout);
    ok = ok && continue_text(&m, &o, all, have);
    if (ok) putchar('\n');
    free(all);
    model_destroy(&m);
    return ok || ferror(stdout) ? 0 : 3;
}
