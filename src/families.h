/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* families.h - every family of operations, in the order of their public numbers. A new one is a row of
 * families.c. */
#ifndef QUERN_FAMILIES_H
#define QUERN_FAMILIES_H

struct op_family;
extern const struct op_family *const quern_families[]; /* ends with NULL */

#endif
