"""The known bugs, a file per family; `gradcheck_suite.studies.zoo.BUGS` imports them all."""
