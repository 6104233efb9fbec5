"""One module per backend; ``omni_fastshm.factory`` imports the one that a pipeline's file names."""
