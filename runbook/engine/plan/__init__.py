"""What a run will do: the options, the planned launches, what they need and how long they take."""
