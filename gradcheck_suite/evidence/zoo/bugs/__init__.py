"""The known bugs, a file per family; `gradcheck_suite.evidence.zoo.BUGS` collects every `Bug` that a file defines."""
