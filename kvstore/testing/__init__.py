"""What an author of a tier or of an engine adapter tests it with: conformance suites. Needs pytest."""
