"""Defects that a run has to notice, injected into a copy of the packages."""
