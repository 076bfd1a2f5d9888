"""Transcripts, requests to backends with their answers, and usage. Plain data."""
