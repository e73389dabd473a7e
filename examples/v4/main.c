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
    "Token ids go in and come out; words are a tokeniser's. TOKENS and FILE are safetensors files\n"
    "with `tokens` I32 [N]; --batch takes `tokens` I32 [B, N] and `lengths` I32 [B]. OUT gets `logits`\n"
    "F32 [N, vocabulary].\n\n"
    "  --device cpu|cuda        where it computes (cpu)\n"
    "  --activations f32|bf16   what activations and cached rows are in (f32)\n"
    "  --chunk N                tokens of a step while prompts are read (512)\n"
    "  --cache FILE             keeps the repacked experts; later runs map them, an interrupted one\n"
    "                           goes on\n"
    "  --session FILE           keeps the state after the prompt, or what all of --batch begin with,\n"
    "                           for runs whose prompts begin with it\n"
    "  --greedy                 takes the likeliest token, of equals the lowest id, as without it\n"
    "  --threads N              threads of the CPU (OMP_NUM_THREADS, or all)\n"
    "  --json                   prints {\"tokens\": [...]}, with --batch a list of lists\n"
    "  --quiet                  says nothing of progress and speed\n\n"
    "examples:\n"
    "  v4 generate model --tokens prompt.safetensors --max-new 100 --cache model.experts --json\n"
    "  v4 logits model tokens.safetensors logits.safetensors --chunk 256 --activations bf16\n\n"
    "Exit codes: 0 done, 2 wrong usage, 3 failed; 130, 143 ended by SIGINT, SIGTERM. Files are written\n"
    "whole or not at all, but for --cache, whose whole layers count.\n";

#define AT(member) offsetof(v4_options, member)
static const struct {
    const char *name;
    enum { TEXT, FLAG, CHOICE, NUMBER } kind;
    size_t at;
    const char *words[2]; /* of a choice: false, true */
    int64_t least, most;
} table[] = {
    {"tokens", TEXT, AT(tokens), {NULL}, 0, 0},
    {"batch", TEXT, AT(batch), {NULL}, 0, 0},
    {"session", TEXT, AT(session), {NULL}, 0, 0},
    {"cache", TEXT, AT(cache), {NULL}, 0, 0},
    {"device", CHOICE, AT(cuda), {"cpu", "cuda"}, 0, 0},
    {"activations", CHOICE, AT(bf16), {"f32", "bf16"}, 0, 0},
    {"json", FLAG, AT(json), {NULL}, 0, 0},
    {"quiet", FLAG, AT(quiet), {NULL}, 0, 0},
    {"greedy", FLAG, AT(greedy), {NULL}, 0, 0},
    {"chunk", NUMBER, AT(chunk), {NULL}, 1, 1 << 20},
    {"max-new", NUMBER, AT(max_new), {NULL}, 0, 1 << 30},
    {"threads", NUMBER, AT(threads), {NULL}, 0, 1024},
};
#undef AT

/* One option; true where it takes the next word, too. */
static bool set(v4_options *o, const char *name, const char *text)
{
    size_t i = 0;
    while (i < sizeof table / sizeof *table && strcmp(table[i].name, name) != 0) i++;
    if (i == sizeof table / sizeof *table) fail("option --%s is unknown: see --help", name);
    const char *const *words = table[i].words;
    const int64_t least = table[i].least, most = table[i].most;
    void *at = (char *)o + table[i].at;
    char *end;
    if (table[i].kind == FLAG) *(bool *)at = true;
    else if (text == NULL) fail("option --%s lacks its value: see --help", name);
    if (table[i].kind == TEXT) *(const char **)at = text;
    if (table[i].kind == CHOICE) {
        *(bool *)at = strcmp(text, words[1]) == 0;
        if (!*(bool *)at && strcmp(text, words[0]) != 0)
            fail("--%s %s: %s or %s is accepted", name, text, words[0], words[1]);
    } else if (table[i].kind == NUMBER) {
        const int64_t x = *(int64_t *)at = strtoll(text, &end, 10);
        if (end == text || *end != '\0' || x < least || x > most)
            fail("--%s %s: a whole number from %lld to %lld is accepted", name, text, (long long)least,
                 (long long)most);
    }
    return table[i].kind != FLAG;
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
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) return fputs(help, stdout) < 0 || fflush(stdout) != 0 ? 3 : 0;
        if (strncmp(argv[i], "--", 2) == 0) i += set(&o, argv[i] + 2, argv[i + 1]);
        else if (given < 4) words[given++] = argv[i];
        else fail("'%s' is one word too many: see --help", argv[i]);
    }
    const bool logits = strcmp(words[0], "logits") == 0;
    if (!logits && strcmp(words[0], "generate") != 0) fail("logits or generate is accepted: see --help");
    if (logits && (given != 4 || o.tokens != NULL || o.batch != NULL || o.session != NULL))
        fail("logits takes FOLDER TOKENS OUT, and no --tokens, --batch or --session");
    if (!logits && (given != 2 || (o.tokens == NULL) == (o.batch == NULL) || o.max_new < 0))
        fail("generate takes FOLDER, --tokens or --batch, and --max-new: see --help");
    o.folder = words[1];
    if (logits) {
        o.tokens = words[2];
        o.out = words[3];
        o.max_new = 0;
    }
    exit_code = 3;
    run(&o);
    if (fflush(stdout) != 0 || ferror(stdout)) fail("standard output cannot be written");
    return 0;
}
