/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* error.h - the calling thread's last error sentence. */
#ifndef QUERN_CORE_ERROR_H
#define QUERN_CORE_ERROR_H

#include "core/text.h"

#include <quern/quern.h>

/* Stores the sentence and returns `status`, so that a check reads `return error_set(...)`. The sentence
 * names the argument, what was given and what is accepted. Its control characters are escaped here; a name of
 * any length goes in as TEXT_NAME(name), so that the reason after it is kept. */
quern_status error_set(quern_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same with QUERN_ERR_INVALID_ARGUMENT, as nearly all refusals have it. */
quern_status error_argument(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Refuses a number that is out of its range. */
quern_status error_in_range(const char *name, int64_t given, int64_t least, int64_t most);
/* The status that the calling thread's last sentence was stored with. */
quern_status error_status(void);

#endif
