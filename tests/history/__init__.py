"""Tests of the index of runs."""
