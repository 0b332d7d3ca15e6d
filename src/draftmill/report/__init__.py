"""report: one self-contained HTML page of what happened in a run, from the cards its rooms left and its metrics."""
