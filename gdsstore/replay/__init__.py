"""Replay of recorded or made-up request traces through a store, with every loaded byte checked."""
