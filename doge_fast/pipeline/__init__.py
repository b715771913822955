"""The two-stage pipeline: corpus, proxy, base, evaluation, report."""
