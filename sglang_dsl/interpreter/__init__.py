"""Running a program: nodes are lowered, evaluated over a transcript, and answered by a backend."""
