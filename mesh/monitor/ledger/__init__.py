"""Read the records of a job: as a table, as traces, step by step."""
