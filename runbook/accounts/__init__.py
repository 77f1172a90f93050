"""Accounts that must balance: facts of one launch that two sources tell, held against each other.

What the trainer says about itself is believed only where something else in the same folder says
so too. Every account returns what does not balance, in words; a source that is missing does not
balance either. `registry` has all of them: rows and `inspect` go through the same table.
"""
