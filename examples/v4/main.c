/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* main.c - v4 logits | generate: the command line. */
#include "v4.h"

#include <quern/file.h>

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char help[] =
    "v4 - runs DeepSeek-V4 from a folder in its released layout\n\n"
    "  v4 logits FOLDER TOKENS OUT                    the logits after every token\n"
    "  v4 generate FOLDER --tokens FILE --max-new N   continues a prompt\n"
    "  v4 generate FOLDER --batch FILE --max-new N    continues several, which may begin alike\n\n"
    "Token ids go in and come out; words are a tokeniser's. TOKENS and FILE are safetensors files with "
    "`tokens`\n"
    "I32 [N]; --batch takes `tokens` I32 [B, N] and `lengths` I32 [B]. OUT gets `logits` F32 [N, "
    "vocabulary].\n\n"
    "  --device cpu|cuda        where it computes (cpu)\n"
    "  --activations f32|bf16   what activations and cached rows are in (f32)\n"
    "  --chunk N                tokens of a step while prompts are read (512)\n"
    "  --cache FILE             keeps the repacked experts; later runs map them, an interrupted one goes on\n"
    "  --session FILE           keeps the state after the prompt, or what all of --batch begin with, for "
    "runs\n"
    "                           whose prompts begin with it\n"
    "  --greedy                 takes the likeliest token, of equals the lowest id, as is done without it\n"
    "  --threads N              threads of the CPU (OMP_NUM_THREADS, or all)\n"
    "  --json                   prints {\"tokens\": [...]}, with --batch a list of lists\n"
    "  --quiet                  says nothing of progress and speed\n\n"
    "examples:\n"
    "  v4 generate model --tokens prompt.safetensors --max-new 100 --cache model.experts --json\n"
    "  v4 logits model tokens.safetensors logits.safetensors --chunk 256 --activations bf16\n\n"
    "Exit codes: 0 done, 2 wrong usage, 3 failed; 130, 143 ended by SIGINT, SIGTERM. Files are written whole "
    "or\n"
    "not at all, but for --cache, whose whole layers count.\n";

#define AT(member) offsetof(v4_options, member)
static const struct {
    const char *name, *word; /* word: what turns a flag on; NULL: the option alone does */
    char kind;               /* text, flag, integer */
    size_t at;
    double least, most;
} table[] = {
    {"tokens", NULL, 't', AT(tokens), 0, 0},
    {"batch", NULL, 't', AT(batch), 0, 0},
    {"session", NULL, 't', AT(session), 0, 0},
    {"cache", NULL, 't', AT(cache), 0, 0},
    {"device", "cpu cuda", 'f', AT(cuda), 0, 0},
    {"activations", "f32 bf16", 'f', AT(bf16), 0, 0},
    {"json", NULL, 'f', AT(json), 0, 0},
    {"quiet", NULL, 'f', AT(quiet), 0, 0},
    {"greedy", NULL, 'f', AT(greedy), 0, 0},
    {"chunk", NULL, 'i', AT(chunk), 1, 1 << 20},
    {"max-new", NULL, 'i', AT(max_new), 0, 1 << 30},
    {"threads", NULL, 'i', AT(threads), 0, 1024},
};
#undef AT

/* One option; *used becomes 2 where it takes the next word, too. */
static bool set(v4_options *o, const char *name, const char *text, int *used)
{
    size_t i = 0;
    while (i < sizeof table / sizeof *table && strcmp(table[i].name, name) != 0) i++;
    if (i == sizeof table / sizeof *table) return fail("option --%s is unknown: see --help", name);
    void *at = (char *)o + table[i].at;
    if (table[i].kind == 'f' && table[i].word == NULL) return *(bool *)at = true;
    if (text == NULL) return fail("option --%s lacks its value: see --help", name);
    *used = 2;
    if (table[i].kind == 't') {
        *(const char **)at = text;
        return true;
    }
    if (table[i].kind == 'f') {
        const char *on = strchr(table[i].word, ' ') + 1;
        *(bool *)at = strcmp(text, on) == 0;
        return *(bool *)at ||
               (strncmp(text, table[i].word, (size_t)(on - table[i].word) - 1) == 0 &&
                text[on - table[i].word - 1] == '\0') ||
               fail("--%s %s: one of %s is accepted", name, text, table[i].word);
    }
    char *end;
    const double x = strtod(text, &end);
    if (end == text || *end != '\0' || !(x >= table[i].least && x <= table[i].most))
        return fail("--%s %s: a number from %g to %g is accepted", name, text, table[i].least, table[i].most);
    *(int64_t *)at = (int64_t)x;
    return true;
}

static void end(int number)
{
    quern_file_discard_all();
    _exit(128 + number);
}

int main(int argc, char **argv)
{
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGPIPE};
    v4_options o = {.chunk = 512, .max_new = -1};
    const char *words[4] = {""};
    int given = 0;
    const struct sigaction action = {.sa_handler = end};
    for (size_t i = 0; i < sizeof ending / sizeof *ending; i++) sigaction(ending[i], &action, NULL);
    signal(SIGXFSZ, SIG_IGN); /* a file limit is then an error of write(), reported like a full disk */
    for (int i = 1, used; i < argc; i += used) {
        used = 1;
        if (strcmp(argv[i], "--help") == 0) return fputs(help, stdout) < 0 || fflush(stdout) != 0 ? 3 : 0;
        if (strncmp(argv[i], "--", 2) == 0) {
            if (!set(&o, argv[i] + 2, argv[i + 1], &used)) return 2;
        } else if (given < 4) {
            words[given++] = argv[i];
        } else {
            return 2 + fail("'%s' is one word too many: see --help", argv[i]);
        }
    }
    const bool logits = strcmp(words[0], "logits") == 0;
    if (!logits && strcmp(words[0], "generate") != 0)
        return 2 + fail("logits or generate is accepted: see --help");
    if (given != (logits ? 4 : 2) || (logits && (o.tokens != NULL || o.batch != NULL || o.session != NULL)) ||
        (!logits && ((o.tokens == NULL) == (o.batch == NULL) || o.max_new < 0)))
        return 2 + fail(logits ? "logits takes FOLDER TOKENS OUT, and no --tokens, --batch or --session"
                               : "generate takes FOLDER, --tokens or --batch, and --max-new: see --help");
    o.folder = words[1];
    if (logits) {
        o.tokens = words[2];
        o.out = words[3];
    }
    if (!(logits ? run_logits(&o) : run_generate(&o))) return 3;
    return fflush(stdout) == 0 && !ferror(stdout) ? 0 : 3 + fail("standard output cannot be written");
}
