"""Adapters that let inference engines keep their KV blocks in kvstore, one package per engine."""
