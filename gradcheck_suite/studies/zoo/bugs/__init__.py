"""The known bugs, a file per family; `gradcheck_suite.studies.zoo.BUGS` collects every `Bug` that a file defines."""
