"""Share records between the hosts of a job."""
