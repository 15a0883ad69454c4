"""Room 6: optimizers, schedules and the Lightning side of training. Import its modules directly; `lit`, `run` and the
callbacks need Lightning, which takes seconds to import, the others do not."""
