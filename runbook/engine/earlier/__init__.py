"""What earlier runs are good for: a number to compare with, and the GO of a launch."""
