"""The wire: generated code (v1), its mapping to values of kvstore.api (wire), stubs and channel options."""
