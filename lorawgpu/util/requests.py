"""What a run may be asked for between two steps, as a number that processes exchange: the weightier, the larger."""

SAVE, STOP = 1, 2
SIGNAL = 256  # plus the number of the signal
