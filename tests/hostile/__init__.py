"""Hostile files: made by seed (seeds, mutations), read in processes of their own (readers, judge)."""
