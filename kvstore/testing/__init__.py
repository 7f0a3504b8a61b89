"""What an author of a tier tests it with: the conformance suite and a builder of frames. Needs pytest."""
