"""Proofs and measurements: references, parity, memory and latency checks of what the exporter and the engines make."""
