"""Record every collective of this rank where the other ranks of the job can read it."""
