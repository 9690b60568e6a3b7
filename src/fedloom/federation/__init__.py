"""A real federation: a server and sites that reach each other over a network only."""
