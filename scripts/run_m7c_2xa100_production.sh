#!/usr/bin/env bash
# The launch script of the production runbook: `runbook launch`, with its options.
exec python -m runbook launch "$@"
