"""Serving: sequences that join and leave a running batch over one latent cache, and the HTTP server in front of it."""
