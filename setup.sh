#!/usr/bin/env bash
# Sets up all that Cutaway runs on: a virtual environment, pinned libraries, torch, the built-in model.
# Asks nothing. Stop it at any moment and run it again: it goes on from what is whole. `./setup.sh --help` lists the options.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: ./setup.sh [--cpu | --gpu] [--torch] [--jax] [--dev]

  --cpu, --gpu   which build of torch; without either: the GPU's where nvidia-smi sees one
  --torch        the torch backend; until there is another, every set-up has it
  --jax          jax as well
  --dev          what the tests and checks need as well (./vc verify adds it by itself)

  PYTHON         the Python to use, 3.11 or newer        (default: python3.11 to python3.14, then python3)
  CUTAWAY_VENV   where the virtual environment goes      (default: .venv beside this file)
  CUTAWAY_HOME   where models go                         (default: ~/.cache/cutaway)
TEXT
}

TORCH=2.13.0
CPU_WHEELS=https://download.pytorch.org/whl/cpu
here=${BASH_SOURCE[0]}
while [ -L "$here" ]; do # the folder of the file itself, where it was called through a link
    link=$(readlink "$here")
    case $link in /*) here=$link ;; *) here=$(dirname "$here")/$link ;; esac
done
root=$(cd "$(dirname "$here")" && pwd -P)
venv=${CUTAWAY_VENV:-$root/.venv}
case $venv in /*) ;; *) venv=$PWD/$venv ;; esac
python=$venv/bin/python
stamps=$venv/.setup
log=/dev/null
child=
hardware=
jax=
dev=
then=

fail() {
    printf '%s\n' "setup: $1" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --cpu) hardware=cpu ;;
        --gpu) hardware=gpu ;;
        --torch) ;;
        --jax) jax=1 ;;
        --dev) dev=1 ;;
        --then) # what ./vc asks: set up whatever is missing, then become the program
            then=1
            shift
            break
            ;;
        -h | --help) usage && exit 0 ;;
        *) printf '%s\n' "setup: unknown option $1; ./setup.sh --help lists them" >&2 && exit 2 ;;
    esac
    shift
done

# --- stamps: a stage is done when its file holds the key of what it was made from ---------------------------------------

key=$({ cat "$root/constraints.txt" "$root/setup.sh" && sed '/^\[tool/,$d' "$root/pyproject.toml" && printf '%s' "$root"; } | cksum | tr ' ' -)

stamped() { # stamped STAGE: prints what was noted when it was done with this key
    local found note
    { read -r found note <"$stamps/$1"; } 2>/dev/null || [ -n "${found:-}" ] || return 1
    [ "$found" = "$key" ] && printf '%s' "${note:-}"
}

stamp() { # stamp STAGE [NOTE]: written beside and moved, so that it is whole or not there
    printf '%s\n' "$key ${2:-}" >"$stamps/$1.new" && mv "$stamps/$1.new" "$stamps/$1"
}

everything_stands() {
    local variant
    [ -x "$python" ] && [ -f "$venv/pyvenv.cfg" ] && stamped libraries >/dev/null && variant=$(stamped torch) || return 1
    [ -z "$hardware" ] || [ "$hardware" = "$variant" ] || return 1
    [ -z "$dev" ] || stamped dev >/dev/null || return 1
    [ -z "$jax" ] || stamped jax >/dev/null
}

if [ -n "$then" ] && everything_stands; then exec "$python" "$@"; fi
if [ -n "$then" ]; then exec 3>&2; else exec 3>&1; fi # stdout belongs to the program that follows

# --- one line a stage, its noise in a log -------------------------------------------------------------------------------

stopped() {
    trap '' INT TERM HUP
    [ -z "$child" ] || kill -TERM -- "-$child" 2>/dev/null || true
    [ -z "$child" ] || wait "$child" 2>/dev/null || true
    printf '\n%s\n' "Stopped. The same command goes on from here." >&2
    [ "$log" = /dev/null ] || rm -f "$log"
    exit "$1"
}
trap 'stopped 130' INT
trap 'stopped 143' TERM
trap 'stopped 129' HUP

try() { # try LABEL COMMAND...: runs one program, showing the seconds
    local label=$1 begun=$SECONDS status=0
    shift
    [ -t 3 ] || printf '  %-34s' "$label" >&3
    : >"$log"
    # A process group of its own: a stop then ends the program with all that it started.
    set -m
    (cd "$root" && exec "$@") >>"$log" 2>&1 </dev/null 3>&- &
    child=$!
    set +m
    if [ -t 3 ]; then
        while kill -0 "$child" 2>/dev/null; do
            printf '\r  … %-34s %4d s' "$label" $((SECONDS - begun)) >&3
            sleep 0.2
        done
    fi
    wait "$child" || status=$?
    child=
    local mark='✓'
    [ "$status" = 0 ] || mark='✗'
    if [ -t 3 ]; then
        printf '\r  %s %-34s %4d s\n' "$mark" "$label" $((SECONDS - begun)) >&3
    else
        printf ' %s %4d s\n' "$mark" $((SECONDS - begun)) >&3
    fi
    return "$status"
}

become() { # the program that --then names, in this process
    [ "$log" = /dev/null ] || rm -f "$log"
    trap - INT TERM HUP
    exec 3>&- 9>&- "$python" "$@"
}

must() { try "$@" || explain "$1"; }

free_mb() { # what the disk of a folder, or of the nearest one above it that exists, has free
    local at=$1
    while [ ! -d "$at" ]; do at=$(dirname "$at"); done
    df -Pk "$at" | awk 'NR == 2 { print int($4 / 1024) }'
}

no_space() {
    fail "no space for $venv: ${1} MB free, about ${2} MB needed; make room, or set CUTAWAY_VENV to a folder on a larger disk"
}

explain() { # explain LABEL: the one line that says why a stage failed and what to do
    local tmp=${TMPDIR:-/tmp} why
    if grep -qiE 'no space left|errno 28|disk quota' "$log" 2>/dev/null || [ "$(free_mb "$venv")" -lt 8 ]; then
        if [ "$(free_mb "$tmp")" -lt 500 ] && [ "$(free_mb "$venv")" -ge 500 ]; then
            fail "no space in $tmp, where pip unpacks; make room, or set TMPDIR to a folder on a larger disk"
        fi
        no_space "$(free_mb "$venv")" "$needed"
    elif grep -qiE 'read-only file system|permission denied' "$log"; then
        fail "cannot write to $venv; set CUTAWAY_VENV to a folder that you may write to (log: $log)"
    elif grep -qiE 'NewConnectionError|Max retries|name resolution|ConnectTimeout|ReadTimeout|timed out|ProxyError|SSLError|unreachable|Connection (refused|reset|broken|aborted)' "$log"; then
        fail "the package index cannot be reached; check the network or the proxy, then run this again (log: $log)"
    fi
    why=$(grep -E '^(ERROR|error)' "$log" | head -n 1) || true
    fail "$1 failed${why:+: $why} (log: $log)"
}

# --- what there is to work with -----------------------------------------------------------------------------------------

recent() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }
# A .venv/bin/python without its pyvenv.cfg is the system's Python: what pip did there, it would do to the whole machine.
is_ours() {
    [ "$("$python" -c 'import os, sys; print(os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1]))' "$venv" 2>/dev/null)" = True ] &&
        recent "$python"
}
usable() { recent "$1" && "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }

find_python() { # a Python that is new enough and can make virtual environments
    local name bare=
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3; do
        if usable "$name"; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
        [ "$name" != "${PYTHON:-}" ] || fail "PYTHON=$name is not a Python 3.11 or newer with venv and ensurepip"
        if [ -z "$bare" ] && recent "$name"; then bare=$name; fi
    done
    [ -z "$bare" ] || fail "$bare cannot make virtual environments; install its venv package (Debian, Ubuntu: apt install $(basename "$bare")-venv)"
    fail "no Python 3.11 or newer here; install one (Debian, Ubuntu: apt install python3 python3-venv), or name it in PYTHON"
}

sees_gpu() { [ "$(uname -s)" = Linux ] && command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

reaches_cpu_wheels() { # one try of four seconds: where the index is closed off, waiting would not open it
    "$python" - "$CPU_WHEELS/torch/" >>"$log" 2>&1 <<'PY'
import signal, sys, urllib.request
signal.alarm(4)
urllib.request.urlopen(sys.argv[1], timeout=4).read(1)
PY
}

drop_torn_packages() { # what a killed pip left half-written counts as installed to the next pip; take its record away
    # Answers whether there was any.
    "$python" -S - "$venv" <<'PY'
import csv, pathlib, shutil, sys
torn = False
for site in pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"):
    for left in site.glob("~*"):
        shutil.rmtree(left, ignore_errors=True)
    for info in site.glob("*.dist-info"):
        try:
            rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
            whole = bool(rows) and all((site / path).stat().st_size == int(size) for path, _, size in rows if size)
        except (OSError, ValueError):
            whole = False
        if not whole:
            shutil.rmtree(info)
            torn = True
sys.exit(not torn)
PY
}

# --- the stages ---------------------------------------------------------------------------------------------------------

log=$(mktemp "${TMPDIR:-/tmp}/cutaway-setup.XXXXXX" 2>/dev/null) || log=/dev/null
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX
export PIP_REQUIRE_VIRTUALENV=1 PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
install=("$python" -m pip install --retries 2 --prefer-binary -c "$root/constraints.txt")
begun=$SECONDS

base=$(find_python)
[ -n "$hardware" ] || hardware=$(stamped torch) || if sees_gpu; then hardware=gpu; else hardware=cpu; fi
needed=2300
[ "$hardware" = cpu ] || needed=9000
if ! stamped torch >/dev/null && [ ! -d "$stamps" ]; then
    free=$(free_mb "$venv")
    [ "$free" -ge "$needed" ] || no_space "$free" "$needed"
fi
# .venv beside this file is ours whatever is left of it; a folder that somebody named may be anything.
if [ "$venv" != "$root/.venv" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ ! -d "$stamps" ]; then
    fail "$venv holds something else than a virtual environment; set CUTAWAY_VENV to another folder"
fi
mkdir -p "$stamps" 2>/dev/null || fail "cannot write to $venv; set CUTAWAY_VENV to a folder that you may write to"
{ exec 9>"$stamps/lock"; } 2>/dev/null || fail "cannot write to $venv; set CUTAWAY_VENV to a folder that you may write to"

# The lock lives as long as any process that inherited it, a pip orphaned by kill -9 included.
lock() { "$base" -c "import fcntl; fcntl.flock(9, fcntl.LOCK_EX$1)" 2>/dev/null; }
if ! lock '|fcntl.LOCK_NB'; then
    printf '%s\n' "Another set-up is at work in $venv; waiting for it." >&3
    lock '' || stopped 130
    if [ -n "$then" ] && everything_stands; then become "$@"; fi
fi

printf '%s\n%s\n\n' "Setting up in $venv: $("$base" -V), $hardware." \
    "It may be stopped at any time; the same command goes on from there." >&3

if ! is_ours; then
    (cd "$stamps" && rm -f libraries torch jax dev)
    (cd "$venv" && rm -rf bin lib lib64 include pyvenv.cfg)
    must "virtual environment" "$base" -m venv --without-pip "$venv"
fi
# Asked for by name, set-up looks at everything again; pip is quick where nothing is missing.
if drop_torn_packages || [ -z "$then" ]; then (cd "$stamps" && rm -f libraries torch jax dev); fi
"$python" -m pip --version >/dev/null 2>&1 || must "pip" "$python" -m ensurepip --upgrade

if ! stamped libraries >/dev/null; then
    must "build tools" "${install[@]}" hatchling editables
    must "libraries" "${install[@]}" --no-build-isolation -e .
    stamp libraries
fi
if [ "$(stamped torch || true)" != "$hardware" ]; then
    if [ "$hardware" = gpu ]; then
        # To pip the CPU build satisfies the same pin.
        "$python" -c 'import importlib.metadata as m, sys; sys.exit("+cpu" in m.version("torch"))' 2>/dev/null ||
            try "remove the CPU's torch" "$python" -m pip uninstall -y torch triton || true
        must "torch $TORCH, GPU" "${install[@]}" "torch==$TORCH"
    else
        if [ "$(uname -s)" != Linux ] || ! reaches_cpu_wheels ||
            ! try "torch $TORCH, CPU wheels" "${install[@]}" --extra-index-url "$CPU_WHEELS" "torch==$TORCH+cpu"; then
            must "torch $TORCH" "${install[@]}" "torch==$TORCH"
        fi
        if [ "$(uname -s)" = Linux ]; then
            try "triton" "${install[@]}" triton || printf '    %s\n' "without triton: its kernels cannot be run here, all else can" >&3
        fi
    fi
    stamp torch "$hardware"
fi
if [ -n "$jax" ] && ! stamped jax >/dev/null; then
    if [ "$hardware" = gpu ]; then extra='[cuda13]'; else extra=; fi
    must "jax" "${install[@]}" "jax$extra"
    stamp jax
fi
if [ -n "$dev" ] && ! stamped dev >/dev/null; then
    must "tests and checks" "${install[@]}" --no-build-isolation -e '.[test]'
    stamp dev
fi
# Not fatal on the way to another verb: that may not need this model, and says so itself if it does.
if ! try "model SmolLM2-135M-Instruct" "$python" -m cutaway.checkpoints.hub; then
    why=$(tail -n 1 "$log")
    [ -n "$then" ] || fail "${why:-the built-in model could not be had} (log: $log)"
    printf '    %s\n' "$why" >&3
fi

printf '\n%s\n' "Set up in $((SECONDS - begun)) s." >&3
if [ -n "$then" ]; then become "$@"; fi
printf '\n%s\n' "  next   ./vc serve" >&3
[ "$log" = /dev/null ] || rm -f "$log"
