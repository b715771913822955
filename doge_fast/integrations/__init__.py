"""Integrations with training frameworks, one file each, and the datasets that they need."""
