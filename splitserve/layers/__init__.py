"""Pieces that models are made of; each takes the Forward context by hand."""
