/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* corpus.c - text to learn from: any file or folder, or the C headers of two Debian packages, ordered by the
 * SHA-256 of their path so that related files are far apart; the last 5% is held out. */
#include "lm.h"

#include <dirent.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct source {
    char *path;
    uint8_t digest[SHA256_DIGEST_SIZE];
} source;

typedef struct source_list {
    source *items;
    size_t count, room;
} source_list;

static bool add_path(source_list *list, const char *path)
{
    if (list->count == list->room) {
        list->room = list->room > 0 ? 2 * list->room : 256;
        source *grown = realloc(list->items, list->room * sizeof *grown);
        if (grown == NULL) return false;
        list->items = grown;
    }
    source *s = &list->items[list->count];
    s->path = strdup(path);
    if (s->path == NULL) return false;
    struct sha256_ctx ctx;
    sha256_init(&ctx);
    sha256_update(&ctx, strlen(path), (const uint8_t *)path);
    sha256_digest(&ctx, sizeof s->digest, s->digest);
    list->count++;
    return true;
}

static bool walk(source_list *list, const char *path, int depth)
{
    struct stat st;
    if (stat(path, &st) != 0) return failure("%s: no such file or folder", path) == 0;
    if (S_ISREG(st.st_mode)) return add_path(list, path);
    if (!S_ISDIR(st.st_mode) || depth > 32) return true;
    DIR *dir = opendir(path);
    if (dir == NULL) return failure("%s: the folder cannot be read", path) == 0;
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(dir)) != NULL;) {
        if (e->d_name[0] == '.') continue;
        char inner[4096];
        if (snprintf(inner, sizeof inner, "%s/%s", path, e->d_name) < (int)sizeof inner)
            ok = walk(list, inner, depth + 1);
    }
    closedir(dir);
    return ok;
}

static bool headers(source_list *list)
{
    FILE *f = popen("dpkg -L linux-libc-dev libc6-dev", "r");
    if (f == NULL) return failure("dpkg cannot be run; name a corpus with --corpus") == 0;
    char line[4096];
    bool ok = true;
    while (ok && fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        const size_t n = strlen(line);
        struct stat st;
        if (n > 2 && strcmp(line + n - 2, ".h") == 0 && stat(line, &st) == 0 && S_ISREG(st.st_mode))
            ok = add_path(list, line);
    }
    ok = pclose(f) == 0 && ok;
    return ok || failure("linux-libc-dev and libc6-dev are not installed (make setup); or name a corpus with "
                         "--corpus") == 0;
}

static int by_digest(const void *a, const void *b)
{
    return memcmp(((const source *)a)->digest, ((const source *)b)->digest, SHA256_DIGEST_SIZE);
}

static bool append(lm_corpus *corpus, const char *path)
{
    FILE *f = fopen(path, "rb");
    struct stat st;
    if (f == NULL || fstat(fileno(f), &st) != 0) {
        if (f != NULL) fclose(f);
        return failure("%s: the file cannot be read", path) == 0;
    }
    uint8_t *grown = realloc(corpus->bytes, (size_t)(corpus->size + st.st_size) + 1);
    bool ok = grown != NULL;
    if (ok) {
        corpus->bytes = grown;
        corpus->size += (int64_t)fread(corpus->bytes + corpus->size, 1, (size_t)st.st_size, f);
    }
    fclose(f);
    return ok;
}

/* Names the corpus of a run by its training bytes; the held-out ones teach nothing. */
static void digest(lm_corpus *corpus)
{
    uint8_t bytes[SHA256_DIGEST_SIZE];
    struct sha256_ctx ctx;
    sha256_init(&ctx);
    sha256_update(&ctx, (size_t)corpus->train, corpus->bytes);
    sha256_digest(&ctx, sizeof bytes, bytes);
    for (int i = 0; i < SHA256_DIGEST_SIZE; i++) snprintf(corpus->digest + 2 * i, 3, "%02x", bytes[i]);
}

bool corpus_load(const char *path, lm_corpus *corpus)
{
    source_list list = {0};
    *corpus = (lm_corpus){0};
    bool ok = path != NULL ? walk(&list, path, 0) : headers(&list);
    if (list.count > 0) qsort(list.items, list.count, sizeof *list.items, by_digest);
    for (size_t i = 0; i < list.count; i++) {
        ok = ok && append(corpus, list.items[i].path);
        free(list.items[i].path);
    }
    free(list.items);
    corpus->train = corpus->size - corpus->size / 20;
    if (ok && corpus->size < 4096)
        ok = failure("the corpus has %lld bytes: at least 4096 are needed", (long long)corpus->size) == 0;
    if (ok) digest(corpus);
    else corpus_free(corpus);
    return ok;
}

void corpus_free(lm_corpus *corpus)
{
    free(corpus->bytes);
    *corpus = (lm_corpus){0};
}

int64_t corpus_piece(const lm_corpus *corpus, int64_t n, uint64_t seed, int64_t i)
{
    /* A random order of all pieces, drawn anew for every pass: piece i of a pass is where a Fisher-Yates
     * shuffle puts it. The shuffle is replayed, which costs microseconds. */
    const int64_t pieces = (corpus->train - 1) / n;
    if (pieces < 1) return 0;
    uint64_t state = seed + (uint64_t)(i / pieces) * 0x9e3779b97f4a7c15u;
    int32_t *order = malloc((size_t)pieces * sizeof *order);
    if (order == NULL) return failure("no memory for the order of %lld pieces", (long long)pieces) * -1;
    for (int64_t j = 0; j < pieces; j++) order[j] = (int32_t)j;
    for (int64_t j = pieces - 1; j > 0; j--) {
        const int64_t k = (int64_t)(random_next(&state) % (uint64_t)(j + 1));
        const int32_t swap = order[j];
        order[j] = order[k];
        order[k] = swap;
    }
    const int64_t piece = order[i % pieces];
    free(order);
    return piece * n;
}

int64_t corpus_held_out(const lm_corpus *corpus, int64_t n, int64_t i, int64_t count)
{
    const int64_t pieces = (corpus->size - corpus->train - 1) / n;
    if (count > pieces) count = pieces;
    return i < count ? corpus->train + i * pieces / count * n : -1;
}
