"""What the phases share: rows that cannot vanish, launches, and the guards on evidence."""
