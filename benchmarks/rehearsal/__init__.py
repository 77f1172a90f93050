"""A rehearsal on generated GPU evidence. NOT A MEASUREMENT: no GPU has produced any number of it.

Machines are described, a roofline model says how fast they would train, and every file that they
would leave is written from public documentation: nvidia-smi's output, the kernel log, run
directories. The real collectors, readers, phases and reports then judge these files. A launch is
read by the trainer's own `plan_launch`, as on a GPU. What is written here may know nothing of what
reads it: `judged` alone, which judges and produces no evidence, imports the engine.
"""
