"""False-decision rates of our rules and of the hand-written runbook's, on simulated machines."""
