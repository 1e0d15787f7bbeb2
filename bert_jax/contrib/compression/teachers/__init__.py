"""Teachers of runs: the models of ``--teacher``, and their outputs, stored once (``--teacher_outputs``)."""
