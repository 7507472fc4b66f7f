"""``distill-run completion``: tab completion for bash and zsh.

The script knows the subcommands and their options. What is not a subcommand is passed on to Hydra's own completion.
"""

from argparse import Namespace

from distill_runner.commands.parser import SUBCOMMANDS, parser_of

SHARED = """\
# Tab completion of distill-run: eval "$(distill-run completion {shell})"

# Print the candidates for a word, one a line; none where the name of a file may stand.
# Arguments: number of words, first argument, the word before, the word, and the line up to the cursor.
_distill_run_candidates() {{
    local count=$1 subcommand=$2 previous=$3 word=$4 line=$5
    if [ "$count" -eq 2 ]; then
        printf '%s\\n' {names}
        subcommand=
    fi
    case "$subcommand" in
{subcommands}
    *) COMP_LINE="$line" COMP_POINT="${{#line}}" "${{line%% *}}" -sc query=bash 2>/dev/null | tr ' ' '\\n' ;;
    esac
}}
"""
BASH = """
_distill_run() {
    local line=${COMP_LINE:0:COMP_POINT} candidate
    local -a words
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local count=${#words[@]}
    local word=${words[count - 1]}
    local replaced=$2  # bash splits words at = and :, and replaces only the last part
    [[ $replaced == [=:] ]] && replaced=
    local prefix=${word%"$replaced"}
    COMPREPLY=()
    while IFS= read -r candidate; do
        if [[ -n $candidate && $candidate == "$word"* ]]; then
            [[ $candidate == *[=./] ]] && compopt -o nospace 2>/dev/null
            COMPREPLY+=("${candidate#"$prefix"}")
        fi
    done < <(_distill_run_candidates "$count" "${words[1]}" "${words[count - 2]}" "$word" "$line")
}
complete -o default -F _distill_run distill-run
"""
ZSH = """
_distill_run() {
    local line="${words[1,CURRENT-1]} $PREFIX"
    local -a candidates
    candidates=(${(f)"$(_distill_run_candidates $CURRENT "$words[2]" "$words[CURRENT-1]" "$PREFIX" "$line")"})
    compadd -S '' -- ${(M)candidates:#*[=./]} && local added=1
    compadd -- ${candidates:#*[=./]} && local added=1
    (( ${added:-0} )) || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _distill_run distill-run
"""


def print_completion(options: Namespace) -> None:
    """Print the script that completes ``distill-run`` in a shell."""
    print(script(options.shell), end="")


def script(shell: str) -> str:
    """Return the script for ``bash`` or ``zsh``."""
    branches = []
    for name in SUBCOMMANDS:
        actions = parser_of(name)._actions  # private: argparse lists its options nowhere else
        cases = {f"{option} ": action.choices for action in actions for option in action.option_strings}
        cases[" -"] = [option for action in actions for option in action.option_strings]
        cases[f"{name} "] = next((action.choices for action in actions if not action.option_strings), None)
        lines = (f"        *\"{end}\"*) printf '%s\\n' {' '.join(words)} ;;" for end, words in cases.items() if words)
        branches.append("\n".join([f"    {name})", '        case "$previous $word" in', *lines, "        esac ;;"]))
    shared = SHARED.format(shell=shell, names=" ".join(SUBCOMMANDS), subcommands="\n".join(branches))
    return shared + {"bash": BASH, "zsh": ZSH}[shell]
