"""Many endpoints as one backend."""
