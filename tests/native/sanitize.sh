#!/bin/sh
# Looks for faults of memory, undefined behaviour and races: tests/native/sanitize.sh [instruction set]...
# Each set must be one that this machine runs. CC names the compiler, CASES how many cases, SEED which.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
src=$here/../../jaxbench/native/src
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# No call goes alone because it waited: under a sanitizer all of them wait.
check() { # set, cases, name, flags
  instructions=$1 cases=$2 name=$3
  shift 3
  "${CC:-cc}" -std=gnu11 -g -ffp-contract=off -fno-omit-frame-pointer -DLOSS_NS=1000000000000 "$@" -I"$src" \
    -DINSTRUCTION_SET="kernels_$instructions" "$here/kernels_check.c" "$src/$instructions.c" "$src/team.c" "$src/common.c" \
    -o "$out/check" -lpthread -lm
  echo "== $name"
  "$out/check" "${SEED:-1}" "$cases"
}

export ASAN_OPTIONS UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0
for set in ${*:-avx512 avx2 portable}; do
  # GCC 12 stores 64 bytes at once to variables that its stack of returned functions does not align so.
  ASAN_OPTIONS=detect_stack_use_after_return=$([ "$set" = amx ] && echo 0 || echo 1)
  check "$set" "${CASES:-30}" "$set: address, undefined behaviour" -O0 -fsanitize=address,undefined # GCC takes minutes for the portable set at -O1
  check "$set" "${CASES:-10}" "$set: threads" -O1 -fsanitize=thread
done
