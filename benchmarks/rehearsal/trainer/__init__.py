"""What the trainer and the tests would leave of a launch on a rehearsed machine."""
