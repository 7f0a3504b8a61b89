"""A tiered, persistent KV cache for LLM serving. Import `kvstore.client` to use it; the daemon is `kvstore serve`."""

__version__ = "0.1.0"
