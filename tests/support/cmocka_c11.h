/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cmocka_c11.h - cmocka with the headers that it expects to be included before it. */
#ifndef QUERN_TEST_CMOCKA_C11_H
#define QUERN_TEST_CMOCKA_C11_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
