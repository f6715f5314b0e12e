"""What this machine can do for a store, as data: `gather` reads it, `advice` says what follows from it.

Nothing here changes a setting. What is written goes to files that are removed again, and what may hang runs in a process of its
own.
"""
