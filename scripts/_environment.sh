# Sourced by the other scripts, from the repository's root: the virtual environment .venv, made once and kept up to date.

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "python3 >= 3.10 with the venv module is needed (on Debian and Ubuntu: apt-get install python3 python3-venv)"
}

# make_environment FILE...: .venv with these requirement files, as pinned by constraints.txt. A stamp for each file makes
# the second time fast. Without the constraint pip would take the newest torch, which the rest was not tried with.
make_environment() {
    local python file arguments=()
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python)
        "$python" -m venv .venv || fail "$python -m venv failed (on Debian and Ubuntu: apt-get install python3-venv)"
    fi
    for file in "$@"; do
        [ "$(cat ".venv/.installed_$file" 2>/dev/null)" = "$(stamp "$file")" ] || arguments+=(-r "$file")
    done
    if [ ${#arguments[@]} != 0 ]; then
        say "installing $* into .venv (once; minutes)"
        .venv/bin/python -m pip install --quiet -c constraints.txt "${arguments[@]}"
        for file in "$@"; do stamp "$file" >".venv/.installed_$file"; done
    fi
    quote_python
    export PATH="$PWD/.venv/bin:$PATH"
}

# A kernel splits the first line of a script at spaces. pip writes its own scripts for that, but not those that a package
# brings along, as deepspeed does. They get pip's lines, which are valid in a shell and in Python.
quote_python() {
    local script first python="$PWD/.venv/bin/python"
    [[ $python = *" "* ]] || return 0
    for script in .venv/bin/*; do
        IFS= read -r first <"$script" 2>/dev/null || continue
        [[ $first = "#!$python"* ]] || continue
        cat >.venv/script <<END
#!/bin/sh
'''exec' "${first#??}" "\$0" "\$@"
' '''
END
        tail -n +2 "$script" >>.venv/script
        cat .venv/script >"$script" # keeps its mode
    done
    rm -f .venv/script
}

stamp() { echo "$(cat "$1" constraints.txt | cksum) $(.venv/bin/python -V)"; }

# install_packages WHY PACKAGE...: system packages where this is root on Debian or Ubuntu; elsewhere says what may be missing.
install_packages() {
    local why=$1
    shift
    dpkg -s "$@" >/dev/null 2>&1 && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $* ($why)"
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq "$@" >/dev/null || { apt-get update -qq && apt-get install -y -qq "$@" >/dev/null; } && return
    fi
    say "could not install $* here; where they are missing, $why is skipped"
}
