#!/usr/bin/env bash
# The launch script of the cheatsheet: `runbook launch`, with its options.
exec python -m runbook launch "$@"
