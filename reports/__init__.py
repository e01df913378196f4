"""Result schema and report writers."""
