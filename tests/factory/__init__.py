"""Run directories and records made by hand: a column or a field is added here."""
