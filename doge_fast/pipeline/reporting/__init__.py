"""A report, from the records of runs to tables and figures."""
