"""What a run is made from: profiles, limits, presets, plans and settings given with `--set`."""
