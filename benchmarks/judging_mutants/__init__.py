"""How many changes of the code that judges the tests notice."""
