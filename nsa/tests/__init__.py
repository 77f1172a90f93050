"""Tests that the runbook runs on the target machine; shipped with the package."""
