"""Read the records of a job: as a table, as traces, per step."""
