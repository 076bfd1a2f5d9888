"""Handling of replies: reasoning is separated, invalid values are requested again, tool calls are run."""
