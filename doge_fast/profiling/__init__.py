"""What a step costs, in phases and against the limits of the machine."""
