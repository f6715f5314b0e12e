"""What this machine can do for a store, as data: `gather` reads it, `advice` says what follows from it.

Nothing here opens a device or changes a setting; only the O_DIRECT test writes, one block that it removes again.
"""
