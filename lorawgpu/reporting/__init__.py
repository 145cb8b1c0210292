"""The parts of a run's report: what the run folder holds, the charts, the page."""
