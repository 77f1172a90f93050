"""Slurm for real: a controller and two nodes of Debian's packages on the loopback interface."""
