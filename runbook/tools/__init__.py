"""What a person does beside running: inspect, compare, replay, triage, watch, drill.

Each reads folders or files and says what they hold, or starts launches through `runbook.launch`;
it may enter if it judges no run and writes into no run's folder.
"""
