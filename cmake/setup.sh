#!/bin/sh
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Installs the named Debian packages that are missing: as root with apt-get, otherwise prints the line to run.
#   cmake/setup.sh [--print] PACKAGE...   --print: installs nothing, prints the line, and is content
print=no
if [ "$1" = --print ]; then
    print=yes
    shift
fi
command -v dpkg-query >/dev/null || exit 0
missing=""
for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if [ $print = yes ] || [ "$(id -u)" != 0 ]; then
    sudo=$([ "$(id -u)" = 0 ] || echo 'sudo ')
    echo "These packages are missing; to install them:" >&2
    echo "    ${sudo}apt-get install -y --no-install-recommends$missing" >&2
    [ $print = yes ]
    exit
fi
echo "installing$missing"
apt-get update -q >/dev/null || exit 1
# The names are split on purpose.
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >/dev/null
