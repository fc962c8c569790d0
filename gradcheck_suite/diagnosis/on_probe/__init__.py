"""Names of faults from weight read-out probes, on which every item's weight can be read off the gradient."""
