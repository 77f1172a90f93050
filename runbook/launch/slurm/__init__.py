"""The launcher of a Slurm cluster: a job for each launch, and an agent on each node of it.

Agents and harness share only the run directory. Code belongs here if it talks to Slurm, or if it is
one of the two ends of those files; what a launch means is decided where it is for every launcher.
"""
