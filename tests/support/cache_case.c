/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_case.c - memory, pages and rows of a cache under test. */
#include "cache_case.h"

#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

void cache_case_make(cache_case *c, const quern_cache_params *params, test_random *random)
{
    memset(c, 0, sizeof *c);
    c->params = *params;
    c->columns = (quern_cache_columns)QUERN_CACHE_COLUMNS_INIT;
    if (params->page != 0) c->params.pages = 1;
    if (quern_cache_columns_of(&c->params, &c->columns) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    if (params->page != 0) c->params.pages = params->sequences * c->columns.columns + 1;
    size_t memory, rows;
    if (quern_cache_size(&c->params, &memory, &rows) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    c->memory = test_workspace_make(memory);
    const size_t element = quern_dtype_size(params->dtype);
    c->rows = test_workspace_make(rows + element);
    c->rows_at = (char *)c->rows.data +
                 (element - (uintptr_t)c->rows.data % element) % element; /* aligned to the element only */
    c->rows_bytes = rows;
    memset(c->rows_at, 0xff, rows); /* NaN in every dtype */
    if (quern_cache_create(&c->params, c->memory.data, memory, c->rows_at, rows, &c->cache) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
    if (params->page == 0) return;
    const int64_t cells = params->sequences * c->columns.columns;
    c->free_count = c->params.pages;
    c->table = malloc((size_t)(cells + 1) * sizeof *c->table);
    c->free_pages = malloc((size_t)c->free_count * sizeof *c->free_pages);
    for (int64_t i = 0; i < cells; i++)
        c->table[i] = i % 2 ? -1 - (int32_t)i : INT32_MAX; /* no call may read these */
    for (int64_t i = 0; i < c->free_count; i++) {
        const int64_t j = test_random_int(random, 0, i);
        c->free_pages[i] = c->free_pages[j];
        c->free_pages[j] = (int32_t)i;
    }
}

void cache_case_free(cache_case *c)
{
    test_workspace_close(&c->memory);
    test_workspace_close(&c->rows);
    free(c->table);
    free(c->free_pages);
}

static bool is_page(const cache_case *c, int32_t entry)
{
    return entry >= 0 && entry < c->params.pages;
}

void cache_case_assign(cache_case *c, int64_t sequence, int64_t tokens)
{
    quern_cache_columns pages = QUERN_CACHE_COLUMNS_INIT;
    if (c->table == NULL) return;
    if (quern_cache_pages_of(&c->params, tokens, &pages) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    const int64_t first[] = {c->columns.tokens, c->columns.entries, c->columns.slc, c->columns.win};
    const int64_t count[] = {pages.tokens, pages.entries, pages.slc, pages.win};
    int32_t *row = c->table + sequence * c->columns.columns;
    for (int i = 0; i < 4; i++)
        for (int64_t k = first[i]; k < first[i] + count[i]; k++)
            if (!is_page(c, row[k])) row[k] = c->free_pages[--c->free_count];
}

void cache_case_reset(cache_case *c, int64_t sequence)
{
    assert_int_equal(quern_cache_reset(c->cache, sequence), QUERN_OK);
    if (c->table == NULL) return;
    int32_t *row = c->table + sequence * c->columns.columns;
    for (int64_t k = 0; k < c->columns.columns; k++) {
        if (is_page(c, row[k])) c->free_pages[c->free_count++] = row[k];
        row[k] = -1;
    }
}

void *cache_case_copy(const cache_case *c)
{
    char *copy = malloc(c->memory.bytes + c->rows_bytes + 1);
    memcpy(copy, c->memory.data, c->memory.bytes);
    memcpy(copy + c->memory.bytes, c->rows_at, c->rows_bytes);
    return copy;
}

void cache_case_check_same(const cache_case *c, void *copy)
{
    assert_memory_equal(copy, c->memory.data, c->memory.bytes);
    assert_memory_equal((char *)copy + c->memory.bytes, c->rows_at, c->rows_bytes);
    free(copy);
}

test_tensor cache_rows(test_random *random, quern_dtype dtype, const double *values, const int64_t *rows,
                       int64_t n, int64_t b, int64_t c)
{
    const int64_t shape[] = {n, b, c};
    test_tensor t =
        test_tensor_make(random, dtype, 3, shape, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    double *chosen = test_doubles(n * b * c);
    for (int64_t i = 0; i < n; i++)
        memcpy(chosen + i * b * c, values + rows[i] * b * c, (size_t)(b * c) * sizeof *chosen);
    test_tensor_set(&t, chosen);
    free(chosen);
    return t;
}
