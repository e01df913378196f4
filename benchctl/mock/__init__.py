"""A server that streams scripted answers as fast as one process can: what a load generator is measured against."""
