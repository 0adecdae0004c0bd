"""Connections to other peers: streams, handshakes, certificates, and what is refused before anything is believed."""
