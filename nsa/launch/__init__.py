"""One launch: command line, plan, ranks, its run directory, signals and heartbeats."""
