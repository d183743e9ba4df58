"""A served model under load: how many answers, how soon, in which batches, and whether they are right."""
