"""What a report is made of, from records to tables and figures."""
