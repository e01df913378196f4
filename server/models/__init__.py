"""Models: what they are (`config`, `registry`, `pull`: no torch) and how they run (`llama`, `loading`)."""
