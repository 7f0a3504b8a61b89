"""A tiered, persistent KV cache for LLM serving: `kvstore.client` uses it, `kvstore serve` runs it."""

__version__ = "0.1.0"
