"""One backward pass for all domains, and what it needs of modules and losses."""
