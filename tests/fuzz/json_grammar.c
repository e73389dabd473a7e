/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "json_grammar.h"

#include "fuzz.h"

#include <glob.h>
#include <stdio.h>
#include <string.h>

static const char *const words[] = {"0",
                                    "1",
                                    "4",
                                    "64",
                                    "-1",
                                    "-0",
                                    "01",
                                    "9223372036854775807",
                                    "9223372036854775808",
                                    "18446744073709551616",
                                    "1.0",
                                    "1e400",
                                    "{}",
                                    "[]",
                                    "{",
                                    "}",
                                    "[",
                                    "]",
                                    ",",
                                    ":",
                                    "null",
                                    "true",
                                    "false",
                                    "nul",
                                    "\"F32\"",
                                    "\"F4\"",
                                    "\"F6_E2M3\"",
                                    "\"F8_E4M3FNUZ\"",
                                    "\"C64\"",
                                    "\"BOOL\"",
                                    "\"dtype\"",
                                    "\"shape\"",
                                    "\"data_offsets\"",
                                    "\"__metadata__\"",
                                    "\"a\"",
                                    "\"\"",
                                    "\"\\u0000\"",
                                    "\"\\ud83d\\ude00\"",
                                    "\"\\ud800\"",
                                    "\"\\n\\\"\"",
                                    "\"\xc3\xa9\"",
                                    "\"\xff\"",
                                    "\"",
                                    " ",
                                    "\n",
                                    "[0,0]",
                                    "[0,64]",
                                    "[0]",
                                    "[4,4]",
                                    ",\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[64,64]}",
                                    "\"__metadata__\":{\"k\":\"v\"},",
                                    "\"weight_map\"",
                                    "\"one.safetensors\"",
                                    "\"../one.safetensors\"",
                                    "\"vocab_size\"",
                                    "\"hidden_size\"",
                                    "\"num_hidden_layers\"",
                                    "\"num_experts\"",
                                    "\"model_type\"",
                                    "\"gpt_oss\"",
                                    "\"deepseek_v4\"",
                                    "\"tie_word_embeddings\"",
                                    "\"quantization_config\"",
                                    "\"ignore\"",
                                    "[[[[[[[[[[[[[[[[",
                                    "{\"x\":{\"x\":{\"x\":1}}}"};

size_t json_tokens(const char *text, size_t size, json_token *tokens)
{
    size_t n = 0;
    for (size_t at = 0; at < size && n < JSON_TOKENS;) {
        size_t end = at + 1;
        if (text[at] == '"') {
            while (end < size && text[end] != '"') end += text[end] == '\\' ? 2 : 1;
            end = end < size ? end + 1 : size;
        } else if (strchr("+-.0123456789", text[at]) != NULL && text[at] != '\0') {
            while (end < size && text[end] != '\0' && strchr("+-.eE0123456789", text[end]) != NULL) end++;
        }
        tokens[n++] = (json_token){text + at, end - at};
        at = end;
    }
    return n;
}

/* Puts `count` tokens in before token `at`. */
static size_t insert(json_token *tokens, size_t n, size_t at, const json_token *from, size_t count)
{
    json_token copy[8];
    if (count > 8) count = 8;
    if (n + count > JSON_TOKENS) return n;
    memcpy(copy, from, count * sizeof *copy);
    memmove(tokens + at + count, tokens + at, (n - at) * sizeof *tokens);
    memcpy(tokens + at, copy, count * sizeof *copy);
    return n + count;
}

size_t json_mutate(json_token *tokens, size_t n)
{
    const size_t at = fuzz_random((uint32_t)n), other = fuzz_random((uint32_t)n);
    const char *word = words[fuzz_random(sizeof words / sizeof *words)];
    const json_token put = {word, strlen(word)}, was = tokens[at];
    size_t count = 1 + fuzz_random(8);
    switch (fuzz_random(5)) {
    case 0: tokens[at] = put; return n;
    case 1: return insert(tokens, n, at, &put, 1);
    case 2:
        tokens[at] = tokens[other];
        tokens[other] = was;
        return n;
    case 3:
        if (count > n - other) count = n - other;
        return insert(tokens, n, at, tokens + other, count);
    default:
        if (count > n - at) count = n - at;
        memmove(tokens + at, tokens + at + count, (n - at - count) * sizeof *tokens);
        return n - count;
    }
}

size_t json_mutate_text(uint8_t *file, size_t size, size_t room)
{
    static json_token tokens[JSON_TOKENS];
    static char text[FUZZ_ROOM];
    memcpy(text, file, size);
    size_t n = json_tokens(text, size, tokens), at = 0;
    for (uint32_t i = 1 + fuzz_random(4); i > 0 && n > 0; i--) n = json_mutate(tokens, n);
    for (size_t i = 0; i < n && tokens[i].size <= room - at; i++) {
        memcpy(file + at, tokens[i].text, tokens[i].size);
        at += tokens[i].size;
    }
    return at;
}

size_t json_seed(const char *pattern, size_t index, uint8_t *text)
{
    glob_t found;
    if (glob(pattern, 0, NULL, &found) != 0) return 0;
    FILE *f = index < found.gl_pathc ? fopen(found.gl_pathv[index], "rb") : NULL;
    globfree(&found);
    if (f == NULL) return 0;
    const size_t size = fread(text, 1, FUZZ_ROOM, f);
    fclose(f);
    return size;
}
