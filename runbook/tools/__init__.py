"""What a person does with runs beside running them: inspect, compare, decide, replay, triage."""
