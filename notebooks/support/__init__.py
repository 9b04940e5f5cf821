"""What notebooks share: claims and their verdicts, figures, parameters, and views of what studies
measured."""
