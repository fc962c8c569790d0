"""When two gradients are equal, and what an unequal one says. numpy only."""
