"""What several backends share: HTTP, errors, options, streams."""
