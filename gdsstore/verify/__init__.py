"""Verification of a whole store: superblocks, record tables, every payload against its checksum, and the catalog."""
