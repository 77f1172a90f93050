"""Run directories made by hand, from the contract's tables: a column or a field is added here."""
