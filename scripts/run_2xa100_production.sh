#!/usr/bin/env bash
# The launch script of the cheatsheet: `runbook launch`, with its options.
exec "$(command -v python || command -v python3)" "$(dirname "$0")/_own_python.py" launch "$@"
