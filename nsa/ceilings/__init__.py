"""What the devices and the links between them can do, in seconds: `-m nsa.ceilings`.

Started like the trainer, by one process or by torchrun. It knows no model and no setting of one, so
a number that is too small here is the card's.
"""
