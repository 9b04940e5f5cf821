"""What a notebook writes and shows: tables, verdicts on claims, figures, and views of steps and caches."""
