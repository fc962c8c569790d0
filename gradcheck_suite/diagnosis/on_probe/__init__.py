"""Names of faults from weight probes, on which every item's weight can be read off the gradient."""
