# Sourced by scripts/check and scripts/demo, which both work in the checkout's own virtual
# environment, .venv. PYTHON=python3.12 chooses the interpreter; pip's own settings are honoured.

set -euo pipefail
[[ "${PYTHON:-}" != */* || "$PYTHON" == /* ]] || PYTHON=$PWD/$PYTHON
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
name=scripts/$(basename "$0")
venv=.venv
venv_python=$venv/bin/python
everything='.[dev,docs,fast,plot,rich,test-models,test-trainers]' # what scripts/check installs

fail() {
    echo "$name: $*" >&2
    exit 1
}

# Each of these answers for one interpreter by its exit status.
runs() { "$1" -c '' >/dev/null 2>&1; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
has_venv() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

# Sets python: $PYTHON, or the first good one on PATH.
find_python() {
    local candidate
    python=
    if [[ -n "${PYTHON:-}" ]]; then
        runs "$PYTHON" || fail "PYTHON=$PYTHON does not run; name a Python >= 3.10"
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $("$PYTHON" -V 2>&1); backstash needs Python >= 3.10"
        python=$PYTHON
    else
        for candidate in python3 python python3.{13,12,11,10,14}; do
            if runs "$candidate" && is_new_enough "$candidate"; then
                python=$candidate
                break
            fi
        done
        [[ -n "$python" ]] || fail "no Python >= 3.10 found; install one, or name it: PYTHON=/path/to/python $name"
    fi
    has_venv "$python" || fail "$python has no venv module; install it (Debian, Ubuntu: apt install python3-venv) or name another: PYTHON=/path/to/python $name"
}

# What an environment is made from, by one interpreter; pip is asked again when it changes.
fingerprint() {
    { pwd -P; "$1" -c 'import sys; print(sys.version, sys.base_prefix)'; cat pyproject.toml constraints.txt; } | cksum
}

# is_ready REQUIREMENT...: whether .venv holds one of these already, made as it would be today.
is_ready() {
    local requirement python=$venv_python
    runs "$venv_python" || return 1
    if [[ -n "${PYTHON:-}" ]]; then find_python; fi
    for requirement; do
        if [[ "$(cat "$venv/made-for $requirement" 2>/dev/null)" == "$(fingerprint "$python")" ]]; then return 0; fi
    done
    return 1
}

# install REQUIREMENT: makes .venv again if it is of another Python or does not work, and fills it.
install() {
    local python
    find_python
    echo "$name: installing into $venv (the first time this downloads PyTorch: minutes) ..."
    rm -f "$venv"/made-for*
    if ! runs "$venv_python" || ! "$venv_python" -m pip --version >/dev/null 2>&1 ||
        [[ "$("$venv_python" -V)" != "$("$python" -V)" ]]; then
        "$python" -m venv --clear "$venv" || fail "$python could not make a virtual environment in $venv"
    fi
    "$venv_python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e "$1" ||
        fail "pip could not install $1 into $venv; its own words are above"
    fingerprint "$venv_python" >"$venv/made-for $1"
}
