"""Cost of a step: time per phase, compared with the limits of the machine."""
