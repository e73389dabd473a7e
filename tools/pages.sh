#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Writes what follows from the command's --help: quern.1, a manual page, and quern.bash, completions for bash.
#   tools/pages.sh QUERN FOLDER
set -eu
quern=$1
to=$2
mkdir -p "$to"

# names WORD...: the verbs, operations and subjects that a help lists in its first indented paragraph.
names() {
    "$quern" "$@" --help | awk '/^  [a-z]/ { seen = 1; print $1; next } seen { exit }'
}

# options WORD...: each option of a help; those of few values as --name=a|b.
options() {
    "$quern" "$@" --help | awk '/^ *--[a-z]/ {
        n = split($2, choices, "|")
        print $1 (n > 1 ? "=" $2 : "")
    }' | sort -u
}

# quoted: text as roff, in which a dot, an apostrophe at a line's start and a backslash mean something.
quoted() {
    sed 's/\\/\\e/g; s/-/\\-/g; s/^[.'\'']/\\\&&/'
}

manual() {
    local verb title
    echo ".TH QUERN 1 \"\" \"$("$quern" --version)\""
    printf '.SH NAME\nquern \\- %s\n' "$("$quern" --help | sed -n '1s/^quern [0-9.]*: //p')"
    printf '.SH SYNOPSIS\n.B quern\nVERB [\\-\\-option value ...]\n.SH DESCRIPTION\n.nf\n'
    "$quern" --help | sed '1,/^usage/d' | quoted
    echo .fi
    for verb in $(names); do
        title=${verb^^}
        printf '.SH %s\n.nf\n' "$title"
        "$quern" "$verb" --help | quoted
        echo .fi
    done
}

completions() {
    local verb name
    cat <<'END'
# Completions of quern for bash.
_quern_words() {
    case $1 in
END
    printf "    '') echo '%s' ;;\n" "$(names | paste -sd' ')"
    for verb in $(names); do
        printf "    %s) echo '%s' ;;\n" "$verb" "$(options "$verb" | paste -sd' ')"
        [[ $verb == run || $verb == bench ]] || continue
        printf "    '%s of') echo '%s' ;;\n" "$verb" "$(names "$verb" | paste -sd' ')"
        for name in $(names "$verb"); do
            printf "    '%s %s') echo '%s' ;;\n" "$verb" "$name" "$(options "$verb" "$name" | paste -sd' ')"
        done
    done
    cat <<'END'
    esac
}

_quern() {
    local word=$2 before=$3 verb=${COMP_WORDS[1]} options option of=${COMP_WORDS[2]-}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        mapfile -t COMPREPLY < <(compgen -W "$(_quern_words '') --help --version" -- "$word")
        return
    fi
    options=$(_quern_words "$verb $of")
    options=${options:-$(_quern_words "$verb")}
    for option in $options; do
        if [[ $before == "${option%%=*}" && $option == *=* ]]; then
            option=${option#*=}
            mapfile -t COMPREPLY < <(compgen -W "${option//|/ }" -- "$word")
            return
        fi
    done
    if [[ $word == -* ]]; then
        for option in $options; do options=${options/"$option"/"${option%%=*}"}; done
        mapfile -t COMPREPLY < <(compgen -W "$options --help" -- "$word")
    elif ((COMP_CWORD == 2)) && [[ -n $(_quern_words "$verb of") ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_quern_words "$verb of")" -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -o filenames -F _quern quern
END
}

manual >"$to/quern.1"
completions >"$to/quern.bash"
