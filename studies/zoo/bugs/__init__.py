"""The known bugs, a file per family; `studies.zoo.BUGS` imports them all."""
