"""What watches a launch: it is handed the trainer's objects, and the trainer knows its results."""
