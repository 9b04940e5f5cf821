"""What is measured: acceptance, costs and speed-up, with intervals, and the gamma that they
recommend."""
