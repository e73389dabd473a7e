#!/bin/sh
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# A header with its comments as Doxygen's: /** before what they tell of, /**< behind it. Backslashes, at signs and
# angle brackets stand for themselves.
exec sed -e '/SPDX-/d' -e 's,\(;\|\,\) */\* ,\1 /**< ,' -e 's,^\( *\)/\* ,\1/** ,' -e 's,^/\*$,/**,' \
    -e 's,^ \* \([a-z_]*\.h\) - , * @file \1\n * ,' "$1"
