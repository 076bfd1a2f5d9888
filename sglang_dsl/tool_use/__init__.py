"""Tools that programs offer to models."""
