"""How a launch ended, and for what reason."""
