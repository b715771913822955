"""The kinds of groups that an experiment has, each with its answers, tables and figures."""
